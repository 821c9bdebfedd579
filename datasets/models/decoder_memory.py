"""Bytes that a stage of a decoder holds, item by item, before any weight is loaded.

The counterpart of ``DecoderStage.memory_bytes``, which counts real tensors: a test holds the two
together. Activations of a pass are temporary and not counted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from foreplan.datasets.dtypes import weight_bytes
from foreplan.datasets.experts import LayerClass
from foreplan.datasets.models.decoder_programs import only_class
from foreplan.datasets.models.model import Model

#: Everything that is no linear's weight and no cache (norms, biases, embeddings) is kept in bf16.
_BF16 = 2
#: What a router adds to its experts' scores before it chooses is kept as it is stored.
_FP32 = 4
#: Weights that are quantised at a time: few, because a stage is loaded under its memory cap; more
#: on a GPU, where a copy to the device costs more than room does.
_SLICE_ELEMENTS: Mapping[str, int] = MappingProxyType({"cpu": 1 << 19, "cuda": 1 << 22})


def slice_rows(columns: int, kind: str) -> int:
    """Rows of a weight of so many columns that are packed at a time on a kind of device."""
    # Torch's int4 layout stores blocks of up to 64 rows.
    return max(64, _SLICE_ELEMENTS[kind] // columns // 64 * 64)


def layer_bytes(model: Model, storage: str, layer_class: LayerClass | None = None) -> int:
    """Weights of one decoder layer whose linears are stored as ``storage``, scales included.

    Args:
        model: the model.
        storage: of the linears, those of all experts too; a router is kept in bf16.
        layer_class: of the layer; ``None`` where the model has only one.

    Raises:
        SpecError: unknown storage dtype, or no class for a model of both.
    """
    layer_class = layer_class or only_class(model)
    held = list(model.linears_of(layer_class))
    if layer_class == "moe" and model.experts is not None:
        held += model.expert_linears * model.experts.count
    linears = sum(weight_bytes(linear.n, linear.k, storage) for linear in held)
    plain = sum(linear.n * linear.k for linear in held)
    exact = model.heads * (_FP32 - _BF16) if model.sinks else 0
    if layer_class == "moe" and model.experts is not None and model.experts.routing.corrected:
        exact += model.experts.count * _FP32
    return linears + (model.parameters_of(layer_class) - plain) * _BF16 + exact


def stage_bytes(
    model: Model,
    start: int,
    end: int,
    storages: Sequence[str],
    *,
    batch: int,
    positions: int,
    head_storage: str = "bf16",
    cache_storage: str = "bf16",
) -> dict[str, int]:
    """Static memory of the stage that runs layers ``[start, end)``.

    Args:
        model: the model.
        start: first layer; 0 means that the stage also embeds.
        end: one past the last layer; the number of layers means that it also has the head.
        storages: storage dtype of each of the stage's layers.
        batch: sequences that it caches, all micro-batches together.
        positions: of the cache: prompt and new tokens.
        head_storage: storage dtype of the head.
        cache_storage: storage dtype of keys and values, ``bf16`` or ``int8``.

    Returns:
        Bytes of ``weights``, ``embedding``, ``head``, ``kv_cache`` and ``buffers`` (tables of the
        rotation).
    """
    embedding = model.embedding_parameters * _BF16 if start == 0 else 0
    head = 0
    if end == model.layers:
        matrix = weight_bytes(model.vocab, model.hidden, head_storage)
        head = matrix + model.norm_parameters * _BF16
    classes = model.layer_classes[start:end]
    cached = (end - start) * batch * positions * model.kv_bytes_per_token(cache_storage)
    rotation = 2 * positions * model.head_dim * _BF16 * len(model.rotations_of(start, end))
    return {
        "weights": sum(
            layer_bytes(model, storage, c) for storage, c in zip(storages, classes, strict=True)
        ),
        "embedding": embedding,
        "head": head,
        "kv_cache": round(cached),
        "buffers": rotation,
    }
