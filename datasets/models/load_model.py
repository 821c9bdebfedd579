"""`load_model`: a model by its folder or by a name of the zoo."""

from __future__ import annotations

from pathlib import Path

from foreplan.datasets.models.model import Model
from foreplan.datasets.models.model_folder import read_folder
from foreplan.datasets.models.model_zoo import pretrained_folders, zoo_model, zoo_names
from foreplan.datasets.models.network_zoo import zoo_network
from foreplan.datasets.specs import nearest
from foreplan.errors import SpecError


def load_model(name_or_path: str | Path) -> Model:
    """Describe the model in a Hugging Face folder, or the zoo model of that name.

    A string that is a zoo name means the zoo model, unless it contains a path separator; likewise
    the name of a trained model that comes along.

    Args:
        name_or_path: folder with a ``config.json``, or a name listed by ``model_zoo.zoo_names`` or
            ``model_zoo.pretrained_folders``.

    Raises:
        SpecError: neither; an architecture, attention or rotary scaling that is not supported; a
            size that does not fit; a shard that its index names but the folder lacks.
    """
    if not isinstance(name_or_path, (str, Path)):  # from a notebook, unseen by a type checker
        raise SpecError(
            "model", got=type(name_or_path).__name__,
            expected="a folder, a name of the zoo or a Model",
            fix="predict_latency prices any module, register_network lets plans train one",
        )  # fmt: skip
    text = str(name_or_path)
    if not text.strip():  # as a path, the current folder
        raise SpecError("model", got=text, expected="a folder, or a name of the zoo")
    if isinstance(name_or_path, str) and text in zoo_names():
        return zoo_model(text)
    if isinstance(name_or_path, str) and text in pretrained_folders():
        return read_folder(pretrained_folders()[text])
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return read_folder(folder)
    inside = folder.is_file() and (folder.parent / "config.json").is_file()
    guess = str(folder.parent) if inside else nearest(text, zoo_names())
    fix = f"did you mean {guess!r}?" if guess else "`foreplan models` lists the zoo"
    if (network := zoo_network(text)) is not None:
        fix = f"'foreplan predict {network.name}' prices a pass of it; plans take decoders"
    file, colon, inside_file = text.partition(":")
    if file.endswith(".py"):
        fix = "'foreplan predict FILE.py' prices it; foreplan.predict_latency takes the module"
    elif Path(f"{file}.py").is_file():
        fix = f"'foreplan predict {file}.py{colon}{inside_file}' prices the module in that file"
    raise SpecError(
        "model",
        got=text,
        expected="a Hugging Face folder with a config.json, or a name of the zoo",
        fix=fix,
    )
