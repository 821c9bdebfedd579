"""Network: the workload zoo that tensor programs are taken from, by family, at several shapes.

Networks are built from configurations, those of `network_zoo` where that has them; nothing is
downloaded, weights are empty. Blocks that repeat are described by ``layers``: the network is
captured with one and with two of them, and a task's calls grow linearly from there (see
`foreplan.datasets.tir.extract`).

Shape legend: ``batch``, ``tokens`` (sequence length), ``height``/``width`` of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from foreplan.datasets.models.network_zoo import ZooNetwork, zoo_networks
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

Shape = Mapping[str, int]
Build: TypeAlias = Callable[[Shape, int], "tuple[torch.nn.Module, tuple[Any, ...]]"]


@dataclass(frozen=True)
class Network:
    """One architecture of the zoo.

    Attributes:
        name: unique name.
        family: networks of one family are held out together.
        layers: repeated blocks of the real network, 0 if blocks do not repeat.
        shapes: input shapes that are captured.
        build: ``build(shape, layers)`` gives the module, on the CPU with empty weights, and its
            positional example inputs; ``layers`` is ignored where blocks do not repeat.
    """

    name: str
    family: str
    layers: int
    shapes: tuple[Shape, ...]
    build: Build

    def label(self, shape: Shape) -> str:
        """Name of the network at a shape, as ``bert-base/batch=1,tokens=128``."""
        return self.name + "/" + ",".join(f"{key}={value}" for key, value in shape.items())


def network(name: str) -> Network:
    """Return a network of the zoo.

    Raises:
        SpecError: no such network.
    """
    found = zoo().get(name)
    if found is None:
        raise SpecError("network", got=name, expected="one of " + ", ".join(sorted(zoo())))
    return found


def zoo() -> Mapping[str, Network]:
    """Return every network by name, in the zoo's order."""
    return MappingProxyType({item.name: item for item in _vision() + _language()})


def _images(*sizes: tuple[int, int, int]) -> tuple[Shape, ...]:
    return tuple({"batch": b, "height": h, "width": w} for b, h, w in sizes)


def _tokens(*sizes: tuple[int, int]) -> tuple[Shape, ...]:
    return tuple({"batch": b, "tokens": t} for b, t in sizes)


_IMAGES = _images((1, 224, 224), (4, 224, 224), (16, 224, 224), (1, 320, 256))
_TOKENS = _tokens((1, 128), (4, 128), (1, 512), (8, 64))
_DECODER = _tokens((1, 128), (4, 64), (1, 512), (16, 1))


def _vision() -> list[Network]:
    return [
        _published("resnet-18", 0, _IMAGES),
        _published("resnet-50", 0, _IMAGES),
        _published("mobilenet-v2", 0, _IMAGES),
        _published("convnext-tiny", 0, _IMAGES[:3]),
        _published("vit-base", 12, _IMAGES[:3]),
        _published("vit-small", 12, _IMAGES[:2]),
        _published("swin-tiny", 0, _IMAGES[:2]),
        Network("detector-fpn", "detector", 0,
                _images((1, 320, 480), (1, 416, 256), (2, 256, 384), (1, 608, 800)), _detector),
        Network("unet", "unet", 0,
                _images((1, 64, 64), (2, 128, 128), (1, 256, 192)), _unet),
    ]  # fmt: skip


def _language() -> list[Network]:
    return [
        _published("bert-tiny", 2, _TOKENS),
        _published("bert-base", 12, _TOKENS),
        Network("gpt2", "gpt2", 12, _DECODER, _text_model("GPT2", attn_implementation="eager")),
        Network("opt-125m", "opt", 12, _DECODER, _text_model("OPT", word_embed_proj_dim=768)),
        Network("llama-1b", "llama", 16, _DECODER, _text_model(
            "Llama", hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=32000)),
        Network("qwen3-0.6b", "qwen", 28, _DECODER, _text_model(
            "Qwen3", hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, vocab_size=32000)),
        _published("t5-small", 6, _TOKENS),
        Network("mixtral-small", "moe", 8, _tokens((1, 64), (4, 16), (1, 256)), _text_model(
            "Mixtral", hidden_size=512, intermediate_size=1024, num_attention_heads=8,
            num_key_value_heads=4, num_local_experts=4, vocab_size=8000,
            experts_implementation="batched_mm")),
    ]  # fmt: skip


def _published(name: str, layers: int, shapes: tuple[Shape, ...]) -> Network:
    """A network of `network_zoo`, without the head that it was trained with."""
    entry = zoo_networks()[name]
    if entry.image is not None:
        build = _image_model(entry)
    elif entry.model_type == "t5":
        build = _t5(entry)
    else:
        build = _encoder(entry)
    return Network(name, entry.family, layers, shapes, build)


def _empty(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Build on the meta device, then take memory without initialising it: seconds, not minutes."""
    import torch

    with torch.device("meta"):
        module = build()
    module = module.to_empty(device="cpu").eval()
    for buffer in module.buffers():
        # Position ids are among them, and TVM folds constants by running look-ups on them.
        buffer.zero_()
    return module


def _without_head(entry: ZooNetwork, **settings: Any) -> torch.nn.Module:
    """The network's body, with other settings than the published ones."""
    import transformers

    config = transformers.AutoConfig.for_model(entry.model_type, **{**entry.config, **settings})
    build: Any = transformers.AutoModel.from_config
    return _empty(lambda: build(config))


def _image_model(entry: ZooNetwork) -> Build:
    def build(shape: Shape, layers: int) -> tuple[torch.nn.Module, tuple[Any, ...]]:
        import torch

        from foreplan.datasets.tir import _wrappers

        options: dict[str, Any] = {}
        if entry.family == "vit":
            options["image_size"] = (shape["height"], shape["width"])
            options["num_hidden_layers"] = layers
        elif entry.family == "swin":
            options["image_size"] = shape["height"]
        image = torch.zeros(shape["batch"], 3, shape["height"], shape["width"])
        return _wrappers.ImageModel(_without_head(entry, **options)), (image,)

    return build


def _encoder(entry: ZooNetwork) -> Build:
    def build(shape: Shape, layers: int) -> tuple[torch.nn.Module, tuple[Any, ...]]:
        import torch

        from foreplan.datasets.tir import _wrappers

        model = _without_head(entry, num_hidden_layers=layers)
        tokens = torch.zeros(shape["batch"], shape["tokens"], dtype=torch.int64)
        return _wrappers.TextModel(model, cached=False), (tokens,)

    return build


def _text_model(kind: str, **settings: Any) -> Build:
    """A decoder of these settings; what is not said is the default of its class."""

    def build(shape: Shape, layers: int) -> tuple[torch.nn.Module, tuple[Any, ...]]:
        import torch
        import transformers

        from foreplan.datasets.tir import _wrappers

        options: dict[str, Any] = dict(settings)
        options["n_layer" if kind == "GPT2" else "num_hidden_layers"] = layers
        implementation = options.pop("attn_implementation", None)
        experts = options.pop("experts_implementation", None)
        config = getattr(transformers, kind + "Config")(**options)
        if implementation is not None:
            config._attn_implementation = implementation
        if experts is not None:
            config._experts_implementation = experts
        model = _empty(lambda: getattr(transformers, kind + "Model")(config))
        tokens = torch.zeros(shape["batch"], shape["tokens"], dtype=torch.int64)
        return _wrappers.TextModel(model, cached=True), (tokens,)

    return build


def _t5(entry: ZooNetwork) -> Build:
    def build(shape: Shape, layers: int) -> tuple[torch.nn.Module, tuple[Any, ...]]:
        import torch

        from foreplan.datasets.tir import _wrappers

        model = _without_head(entry, num_layers=layers, num_decoder_layers=layers)
        tokens = torch.zeros(shape["batch"], shape["tokens"], dtype=torch.int64)
        few = tokens[:, : max(1, shape["tokens"] // 4)]
        return _wrappers.EncoderDecoder(model), (tokens, few)

    return build


def _detector(shape: Shape, layers: int) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    import torch

    from foreplan.datasets.tir import _wrappers

    image = torch.zeros(shape["batch"], 3, shape["height"], shape["width"])
    return _empty(_wrappers.Detector), (image,)


def _unet(shape: Shape, layers: int) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    import torch

    from foreplan.datasets.tir import _wrappers

    image = torch.zeros(shape["batch"], 4, shape["height"], shape["width"])
    return _empty(_wrappers.UNet), (image,)
