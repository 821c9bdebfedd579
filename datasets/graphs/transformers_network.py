"""`TransformersNetwork`: any network that transformers builds, for the price of a pass.

It is that of a folder, or of the network zoo. Plans need a `Model`, whose layers are described. A
pass is captured from the module itself, so that encoders, encoder-decoders and networks of images
have a price, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from foreplan.datasets.graphs.decoder_module import LOCAL_DATA, blank
from foreplan.datasets.graphs.network_config import LAYER_FIELDS, check_config
from foreplan.datasets.kept_documents import KeptDocument
from foreplan.datasets.models._config_fields import UnmodelledError
from foreplan.datasets.models.families import ARCHITECTURES
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.model_zoo import pretrained_folders, zoo_names
from foreplan.datasets.models.network_zoo import ZooNetwork, network_aliases, zoo_network
from foreplan.datasets.quantity import whole_number
from foreplan.datasets.specs import StrictModel, load_document, nearest
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: Form of what is kept of a folder's network: it is built to find that out.
_SCHEMA = "foreplan.network/1"
_DTYPES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
#: What only networks have whose layers carry a state from token to token.
_SCANNED = (
    "state_size", "mamba_d_state", "ssm_state_size", "lru_width", "linear_key_head_dim",
)  # fmt: skip

#: Of those, the ones that transformers 5 computes token by token, in operators of their own for
#: each; the others go by chunks of 64 to 256 tokens.
_STEPWISE = ("falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv", "zamba")

#: Of those, the ones whose layers are all alike: two are captured for all.
_ALIKE = ("falcon_mamba", "mamba")

#: Tokens times captured layers of such a network: 1,024 take 17 s on one core.
_MOST_STEPS = 2048


class TransformersNetwork(StrictModel):
    """A network of transformers, known by its class.

    Attributes:
        name: of the folder, or in the network zoo.
        path: the folder; ``None`` of the zoo.
        family: transformers' ``model_type``.
        dtype: in which it is built.
        parameters: distinct ones.
        images: it takes images, not tokens.
        scans: its layers carry a state from token to token. What transformers itself computes is
            priced; fused kernels of other packages (mamba-ssm, flash-linear-attention) are faster.
        layers: how many there are where they are known to be alike, else ``None``.
        beside: what an encoder takes beside the decoder's tokens, in words; "" without one.
        config: the zoo's configuration, with the class under ``architectures``; ``None`` of a
            folder.
        frames: of each video that it takes, ``None`` of one that takes images or tokens.
        image_size: height and width of its images that were asked for; ``None`` leaves them to
            the configuration.
        source: digest of the files of its classes that are not transformers' own, so that what is
            kept of them does not outlive an edit; "" of others, and where no file is known.
    """

    name: str
    path: str | None
    family: str
    dtype: Literal["fp32", "fp16", "bf16"]
    parameters: PositiveInt
    images: bool
    scans: bool = False
    layers: PositiveInt | None = None
    beside: str = ""
    config: Mapping[str, Any] | None = None
    frames: PositiveInt | None = None
    image_size: tuple[PositiveInt, PositiveInt] | None = None
    source: str = ""

    @property
    def where(self) -> str:
        """What errors call its configuration."""
        return f"model {self.name}" if self.path is None else f"{self.path}/config.json"

    def images_of(self, batch: int | None) -> str:
        """A batch of its images or videos in words, as ``4 images of 224 x 224``."""
        of, sides = "video" if self.frames else "image", self.image_size
        parts = [f"{self.frames} frames"] if self.frames else []
        parts += [f"{sides[0]} x {sides[1]}"] if sides else []
        counted = f"{batch} {of}" + ("" if batch == 1 else "s")
        return " of ".join([counted, *parts])


def network_or_model(
    name_or_path: str | Path | Model | TransformersNetwork,
    dtype: str | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> Model | TransformersNetwork:
    """What ``foreplan predict`` prices: a described `Model`, else any network of transformers.

    Args:
        name_or_path: as `load_model`, a name of the network zoo, or what this or that returned.
        dtype: of weights and activations, ``fp32``, ``fp16`` or ``bf16``; the checkpoint's if
            ``None``.
        image_size: side of a network's images in pixels, or height and width; its usual ones if
            ``None``.

    Raises:
        SpecError: as `load_model`; another dtype; what transformers does not build; a multimodal
            network, whose parts are priced one by one; experts that are run in a loop; a size of
            images that is none, or of a network that takes none.
    """
    if dtype is not None and dtype not in _DTYPES.values():
        raise SpecError(
            "dtype", got=dtype, expected=f"one of {', '.join(_DTYPES.values())}",
            fix="'foreplan plan serving' prices weights of 8 bits and fewer",
        )  # fmt: skip
    found = _read(name_or_path)
    changes: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if image_size is not None:
        sides = _pixels(image_size)
        if sides is None:
            raise SpecError("image size", got=image_size, expected="pixels, or (height, width)")
        if not isinstance(found, TransformersNetwork) or not found.images:
            raise SpecError(
                "image size", got="{} x {}".format(*sides),
                expected=f"none: {found.name} takes no images",
            )  # fmt: skip
        changes["image_size"] = sides
    return found.model_copy(update=changes) if changes else found


def _read(name_or_path: str | Path | Model | TransformersNetwork) -> Model | TransformersNetwork:
    if isinstance(name_or_path, (Model, TransformersNetwork)):
        return name_or_path
    if isinstance(name_or_path, str) and (listed := _listed(name_or_path)) is not None:
        return listed
    folder = Path(name_or_path) if isinstance(name_or_path, (str, Path)) else None
    if folder is None or not (folder / "config.json").is_file():
        return load_model(name_or_path)
    file = folder / "config.json"
    fields = load_document(file)
    family = fields.get("model_type")
    if not isinstance(family, str):
        raise SpecError(
            f"{file}: model_type", got=family, expected="an architecture of transformers, as 'bert'"
        )
    if family in ARCHITECTURES:
        try:
            return load_model(name_or_path)
        except UnmodelledError as error:
            return _captured(folder, fields, unless=error)
    return _captured(folder, fields)


def _listed(name: str) -> TransformersNetwork | None:
    """A network of the zoo; ``None`` for what `load_model` knows, or says what is wrong with.

    Raises:
        SpecError: a name that is like one of this zoo's.
    """
    decoders = (*zoo_names(), *pretrained_folders())
    if name in decoders or Path(name).expanduser().exists():
        return None
    found = zoo_network(name)
    if found is not None:
        return _of_zoo(found)
    aliases = network_aliases()
    guess = nearest(name, (*decoders, *aliases))
    if guess is None or guess not in aliases:
        return None
    raise SpecError(
        "model", got=name, expected="a Hugging Face folder, a Python file, or a name of the zoo",
        fix=f"did you mean {aliases[guess]!r}?",
    )  # fmt: skip


def _of_zoo(entry: ZooNetwork) -> TransformersNetwork:
    config = {**entry.config, "model_type": entry.model_type, "architectures": [entry.class_]}
    return TransformersNetwork(
        name=entry.name, path=None, family=entry.model_type, dtype="fp32",
        parameters=entry.parameters, images=entry.image is not None, beside=entry.beside,
        config=config, image_size=None if entry.image is None else (entry.image, entry.image),
    )  # fmt: skip


def _captured(
    folder: Path, fields: dict[str, Any], unless: SpecError | None = None
) -> TransformersNetwork:
    """The folder's network by its class; ``unless`` is raised where it cannot be built."""
    file, family = folder / "config.json", fields["model_type"]
    check_config(fields, str(file))
    own: dict[str, Any] = {"name": folder.resolve().name or "model", "path": str(folder)}
    kept = KeptDocument(_SCHEMA, fields)
    found = kept.read(lambda document: TransformersNetwork.model_validate({**document, **own}))
    if found is not None:
        return found
    try:
        module, config = _build(_configuration(folder), None, str(file))
    except SpecError:
        if unless is None:
            raise
        raise unless from None
    check_config({**config.to_dict(), **fields}, str(file))  # what the file leaves to defaults, too
    network = TransformersNetwork(
        **own, family=family,
        dtype=_DTYPES.get(str(config.dtype), "fp32"),  # type: ignore[arg-type]
        parameters=sum(p.numel() for p in module.parameters()),
        images=module.main_input_name == "pixel_values",
        frames=_of_videos(module.main_input_name, config),
        scans=family in _STEPWISE
        or any(getattr(config, field, None) is not None for field in _SCANNED),
        layers=config.num_hidden_layers if family in _ALIKE else None,
        beside=_beside(module.main_input_name, config),
        source=_source(module),
    )  # fmt: skip
    if type(module).__module__.startswith("transformers."):  # not of code that a user may change
        kept.keep(network.model_dump(mode="json", exclude=set(own)))
    return network


def _source(module: torch.nn.Module) -> str:
    """Digest of the files that a network's classes beside torch's and transformers' are of."""
    names = {of.__module__ for part in module.modules() for of in type(part).__mro__}
    own = sorted(n for n in names if n.split(".")[0] not in ("builtins", "torch", "transformers"))
    digest, found = hashlib.sha256(), False
    for name in own:
        with contextlib.suppress(OSError):
            digest.update(Path(getattr(sys.modules.get(name), "__file__", None) or "").read_bytes())
            found = True
    return digest.hexdigest() if found else ""


def _beside(main: str, config: Any) -> str:
    """What an encoder takes beside the decoder's tokens; `network_module` gives it that."""
    if not getattr(config, "is_encoder_decoder", False) or main == "pixel_values":
        return ""
    if main == "input_ids":
        return "on both sides"
    spectrum = _spectrum(config)
    return "" if spectrum is None else f"and {spectrum[0]} frames"


def _spectrum(config: Any) -> tuple[int, tuple[int, int]] | None:
    """Frames and shape of the longest spectrum that a network takes; ``None`` where not known.

    Whisper's first convolutions halve what lies in ``[bins, frames]``. Speech2Text counts its
    positions before its convolutions, and takes ``[frames, bins]``.
    """
    positions = getattr(config, "max_source_positions", None)
    if positions and (bins := getattr(config, "num_mel_bins", None)):
        return 2 * positions, (bins, 2 * positions)
    if positions and (bins := getattr(config, "input_feat_per_channel", None)):
        return positions, (positions, bins * getattr(config, "input_channels", 1))
    return None


def _of_videos(main: str, config: Any) -> int | None:
    return getattr(config, "num_frames", None) if main == "pixel_values" else None


def network_module(
    network: TransformersNetwork, *, batch: int, tokens: int, layers: int | None = None
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The module without weights, and inputs for `capture`.

    Args:
        network: what to build.
        batch: sequences or images.
        tokens: of each sequence; an encoder-decoder takes as many on both sides, or as many
            beside the sound that its encoder takes. Images have the size that was asked for, else
            the network's own.
        layers: how many of those that are alike to build; ``None`` for all.

    Raises:
        SpecError: more tokens than positions, inputs that nothing is known of, or larger ones than
            `blank` makes; more tokens than a graph of their steps should hold; a size of images
            that the network does not take.
    """
    import torch

    word = next(name for name, ours in _DTYPES.items() if ours == network.dtype)
    dtype = getattr(torch, word.removeprefix("torch."))
    module, config = _build(lambda: _own_configuration(network, layers), dtype, network.where)
    # XLNet, whose positions are relative, has -1 of them.
    most = next((n for n in (getattr(config, f, None) for f in _POSITIONS) if n and n > 0), tokens)
    if tokens > most and not network.images:
        raise SpecError("sequence length", got=tokens, expected=f"at most {most} positions")
    built = next((n for n in (getattr(config, f, None) for f in LAYER_FIELDS) if n), 1)
    if network.family in _STEPWISE and tokens * built > _MOST_STEPS:
        raise SpecError(
            "sequence length", got=tokens, expected=f"at most {max(_MOST_STEPS // built, 1)} "
            f"tokens: {network.family} goes through its layers token by token",
            fix="price fewer tokens: time grows with their number",
        )  # fmt: skip
    main = module.main_input_name
    ids = blank(batch, tokens, dtype=torch.int64)
    inputs: dict[str, Any]
    if main == "input_ids":
        inputs = {main: ids}
    elif main == "pixel_values":
        frames = (network.frames,) if network.frames else ()
        images = (*frames, getattr(config, "num_channels", 3), *_sides(network, config))
        inputs = {main: blank(batch, *images, dtype=dtype)}
    elif main == "input_features" and (spectrum := _spectrum(config)) is not None:
        inputs = {main: blank(batch, *spectrum[1], dtype=dtype)}
    else:
        raise SpecError(
            f"model {network.name}", got=f"the input {main}",
            expected="tokens (input_ids), images (pixel_values) or a spectrum (input_features)",
            fix="in Python: foreplan.predict_latency(module, device, inputs=...)",
        )  # fmt: skip
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    if main != "pixel_values":
        inputs["use_cache"] = False
    return module, inputs


def _sides(network: TransformersNetwork, config: Any) -> tuple[int, int]:
    """Height and width of a network's images: ``224``, or ``[224, 192]``."""
    stated = network.image_size or getattr(config, "image_size", None)
    if (sides := _pixels(stated)) is not None:
        return sides
    raise SpecError(
        f"{network.where}: image_size", got=stated,
        expected="a number of pixels, or [height, width]",
        fix="networks for images of any size do not state it: say --image-size 224, or add "
        '"image_size": 224',
    )  # fmt: skip


def _pixels(stated: object) -> tuple[int, int] | None:
    """Height and width of what says one number or both; ``None`` of anything else."""
    try:
        height, width = stated if isinstance(stated, (list, tuple)) else (stated, stated)
        sides = whole_number(height, "height"), whole_number(width, "width")
    except (SpecError, ValueError):  # no number, or not two of them
        return None
    return sides if min(sides) > 0 else None


def _own_configuration(network: TransformersNetwork, layers: int | None = None) -> Any:
    """Configuration of a network, for images of the size and as many layers as were asked for."""
    import transformers

    if network.config is not None:
        config: Any = transformers.AutoConfig.for_model(**network.config)
    else:
        config = _configuration(Path(network.path or ""))()
    if layers is not None:
        config.num_hidden_layers = layers
    # What has a parameter for each part of an image is made for its size.
    if network.image_size is not None and hasattr(config, "image_size"):
        height, width = network.image_size
        config.image_size = height if height == width else [height, width]
    return config


def _configuration(folder: Path) -> Callable[[], Any]:
    def read() -> Any:
        import transformers

        return transformers.AutoConfig.from_pretrained(folder, **LOCAL_DATA)

    return read


def _build(configuration: Callable[[], Any], dtype: Any, where: str) -> tuple[Any, Any]:
    """A module on the meta device, in its own dtype if ``None``, and its configuration.

    Args:
        configuration: gives it, and may fail as transformers' code does.
        dtype: torch's.
        where: what to call it in an error.
    """
    import torch
    import transformers

    try:
        config = configuration()
        named: Any = getattr(transformers, (config.architectures or [""])[0], None)
        known = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
        build: Any = named._from_config if known else transformers.AutoModel.from_config
        with torch.device("meta"):
            module = build(config, dtype=dtype or config.dtype or torch.float32)
        return module.to("meta"), config  # what is made by torch.FloatTensor lies on the CPU
    except Exception as error:  # transformers raises whatever its code runs into
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        raise SpecError(
            where, got=f"{type(error).__name__}: {lines[0]}",
            expected=f"a network that transformers {transformers.__version__} builds",
        ) from error  # fmt: skip
