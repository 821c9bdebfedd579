"""`NetworkFolder`: a folder of any network that transformers builds, for the price of a pass.

Plans need a `Model`, whose layers are described. A pass is captured from the module itself, so that
encoders, encoder-decoders and networks of images have a price, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from foreplan.datasets.graphs.decoder_module import LOCAL_DATA, blank
from foreplan.datasets.models._config_fields import UnmodelledError
from foreplan.datasets.models.families import ARCHITECTURES
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import MOST_LAYERS, Model
from foreplan.datasets.specs import StrictModel, load_document
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

_DTYPES = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
#: Parts of a multimodal configuration.
_PARTS = ("text_config", "vision_config", "audio_config")
#: What only networks have whose layers carry a state from token to token.
_SCANNED = (
    "state_size", "mamba_d_state", "ssm_state_size", "lru_width", "linear_key_head_dim",
)  # fmt: skip

#: Of those, the ones that transformers 5 computes token by token, in operators of their own for
#: each; the others go by chunks of 64 to 256 tokens.
_STEPWISE = ("falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv", "zamba")

#: Tokens times layers of such a network. 1,024 are captured and lowered in 17 s on one core.
_MOST_STEPS = 2048

#: Mixtures whose experts transformers 5 runs in a loop that values decide, and not as grouped
#: products: no trace says how many tokens an expert gets.
_LOOPED = ("dbrx", "longcat_flash", "nllb_moe", "switch_transformers")


class NetworkFolder(StrictModel):
    """A network of transformers, known by its class.

    Attributes:
        name: of the folder.
        path: the folder.
        family: transformers' ``model_type``.
        dtype: in which it is built.
        parameters: distinct ones.
        images: it takes images, not tokens.
        scans: its layers carry a state from token to token. What transformers itself computes is
            priced; fused kernels of other packages (mamba-ssm, flash-linear-attention) are faster.
    """

    name: str
    path: str
    family: str
    dtype: Literal["fp32", "fp16", "bf16"]
    parameters: PositiveInt
    images: bool
    scans: bool = False


def network_or_model(
    name_or_path: str | Path | Model | NetworkFolder, dtype: str | None = None
) -> Model | NetworkFolder:
    """What ``foreplan predict`` prices: a described `Model`, else any network of transformers.

    Args:
        name_or_path: as `load_model`, or what this or that returned.
        dtype: of weights and activations, ``fp32``, ``fp16`` or ``bf16``; the checkpoint's if
            ``None``.

    Raises:
        SpecError: as `load_model`; another dtype; what transformers does not build; a multimodal
            network, whose parts are priced one by one; experts that are run in a loop.
    """
    if dtype is not None and dtype not in _DTYPES.values():
        raise SpecError(
            "dtype", got=dtype, expected=f"one of {', '.join(_DTYPES.values())}",
            fix="'foreplan plan serving' prices weights of 8 bits and fewer",
        )  # fmt: skip
    found = _read(name_or_path)
    return found if dtype is None else found.model_copy(update={"dtype": dtype})


def _read(name_or_path: str | Path | Model | NetworkFolder) -> Model | NetworkFolder:
    if isinstance(name_or_path, (Model, NetworkFolder)):
        return name_or_path
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


def _captured(
    folder: Path, fields: dict[str, Any], unless: SpecError | None = None
) -> NetworkFolder:
    """The folder's network by its class; ``unless`` is raised where it cannot be built."""
    file, family = folder / "config.json", fields["model_type"]
    _check(fields, str(file))
    try:
        module, config = _build(folder, None)
    except SpecError:
        if unless is None:
            raise
        raise unless from None
    _check({**config.to_dict(), **fields}, str(file))  # what the file leaves to defaults, too
    return NetworkFolder(
        name=folder.resolve().name or "model", path=str(folder), family=family,
        dtype=_DTYPES.get(str(config.dtype), "fp32"),  # type: ignore[arg-type]
        parameters=sum(p.numel() for p in module.parameters()),
        images=module.main_input_name == "pixel_values",
        scans=family in _STEPWISE
        or any(getattr(config, field, None) is not None for field in _SCANNED),
    )  # fmt: skip


def network_module(
    network: NetworkFolder, *, batch: int, tokens: int
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The module without weights, and inputs for `capture`.

    Args:
        network: what to build.
        batch: sequences or images.
        tokens: of each sequence; an encoder-decoder takes as many on both sides, or as many
            beside the sound that its encoder takes. Images have the network's own size.

    Raises:
        SpecError: more tokens than positions, inputs that nothing is known of, or larger ones than
            `blank` makes; more tokens than a graph of their steps should hold.
    """
    import torch

    word = next(name for name, ours in _DTYPES.items() if ours == network.dtype)
    dtype = getattr(torch, word.removeprefix("torch."))
    module, config = _build(Path(network.path), dtype)
    # XLNet, whose positions are relative, has -1 of them.
    most = next((n for n in (getattr(config, f, None) for f in _POSITIONS) if n and n > 0), tokens)
    if tokens > most and not network.images:
        raise SpecError("sequence length", got=tokens, expected=f"at most {most} positions")
    layers = next((n for n in (getattr(config, f, None) for f in _LAYERS) if n), 1)
    if network.family in _STEPWISE and tokens * layers > _MOST_STEPS:
        raise SpecError(
            "sequence length", got=tokens, expected=f"at most {max(_MOST_STEPS // layers, 1)} "
            f"tokens: {network.family} goes through its {layers} layers token by token",
            fix="price fewer tokens: time grows with their number",
        )  # fmt: skip
    main = module.main_input_name
    ids = blank(batch, tokens, dtype=torch.int64)
    inputs: dict[str, Any]
    if main == "input_ids":
        inputs = {main: ids}
    elif main == "pixel_values":
        channels = getattr(config, "num_channels", 3)
        inputs = {main: blank(batch, channels, *_sides(network, config), dtype=dtype)}
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions  # which the first convolutions halve
        inputs = {main: blank(batch, config.num_mel_bins, frames, dtype=dtype)}
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


def _sides(network: NetworkFolder, config: Any) -> tuple[int, int]:
    """Height and width of a network's images: ``224``, or ``[224, 192]``."""
    stated = getattr(config, "image_size", None)
    sides = stated if isinstance(stated, (list, tuple)) else (stated, stated)
    match sides:
        case (int(height), int(width)) if height > 0 and width > 0:
            return height, width
    raise SpecError(
        f"{network.path}/config.json: image_size", got=stated,
        expected="a number of pixels, or [height, width]",
        fix='networks for images of any size do not state it: add "image_size": 224, say',
    )  # fmt: skip


def _check(fields: dict[str, Any], where: str) -> None:
    if any(fields.get(part) is not None for part in _PARTS):
        raise SpecError(
            f"{where}: model_type", got=fields["model_type"], expected="one network",
            fix="put the text_config or vision_config into a folder of its own; "
            "'foreplan plan bubbles' takes multimodal models",
        )  # fmt: skip
    if fields.get("quantization_config") is not None:
        raise SpecError(
            f"{where}: quantization_config", got="one", expected="unquantised weights",
            fix="leave it out to price the network in its own dtype",
        )  # fmt: skip
    if fields.get("model_type") in _LOOPED:
        raise SpecError(
            f"{where}: model_type", got=fields["model_type"],
            expected="experts that transformers can compute as grouped products",
            fix="price a dense network of the same layers, each as wide as a token's experts",
        )  # fmt: skip
    for field in _LAYERS:
        count = fields.get(field, 1)
        if not isinstance(count, int) or not 0 < count <= MOST_LAYERS:
            raise SpecError(
                f"{where}: {field}", got=count, expected=f"a whole number from 1 to {MOST_LAYERS}"
            )


def _build(folder: Path, dtype: Any) -> tuple[Any, Any]:
    """A folder's module on the meta device, in its own dtype if ``None``, and its configuration."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL_DATA)
        named: Any = getattr(transformers, (config.architectures or [""])[0], None)
        known = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
        build: Any = named._from_config if known else transformers.AutoModel.from_config
        with torch.device("meta"):
            module = build(config, dtype=dtype or config.dtype or torch.float32)
        return module.to("meta"), config  # what is made by torch.FloatTensor lies on the CPU
    except Exception as error:  # transformers raises whatever its code runs into
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        raise SpecError(
            f"{folder / 'config.json'}", got=f"{type(error).__name__}: {lines[0]}",
            expected=f"a network that transformers {transformers.__version__} builds",
        ) from error  # fmt: skip
