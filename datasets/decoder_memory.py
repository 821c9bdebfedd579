"""Bytes that a stage of a decoder holds, item by item, before any weight is loaded.

The counterpart of ``DecoderStage.memory_bytes``, which counts real tensors: a test holds the two
together. Activations of a pass are temporary and not counted here.
"""

from __future__ import annotations

from collections.abc import Sequence

from foreplan.datasets.model import Model
from foreplan.datasets.program import weight_bytes

#: Everything that is not a linear's weight (norms, biases, embeddings, cache) is kept in bf16.
_BF16 = 2


def layer_bytes(model: Model, storage: str) -> int:
    """Weights of one decoder layer whose linears are stored as ``storage``, scales included.

    Raises:
        SpecError: unknown storage dtype.
    """
    linears = sum(weight_bytes(linear.n, linear.k, storage) for linear in model.linears)
    plain = sum(linear.n * linear.k for linear in model.linears)
    return linears + (model.layer_parameters - plain) * _BF16


def stage_bytes(
    model: Model,
    start: int,
    end: int,
    storages: Sequence[str],
    *,
    batch: int,
    positions: int,
    head_storage: str = "bf16",
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

    Returns:
        Bytes of ``weights``, ``embedding``, ``head``, ``kv_cache`` and ``buffers`` (tables of the
        rotation).
    """
    embedding = model.embedding_parameters * _BF16 if start == 0 else 0
    head = 0
    if end == model.layers:
        matrix = weight_bytes(model.vocab, model.hidden, head_storage)
        head = matrix + model.norm_parameters * _BF16
    rotation = 2 * positions * model.head_dim * _BF16 if model.position == "rope" else 0
    return {
        "weights": sum(layer_bytes(model, storage) for storage in storages),
        "embedding": embedding,
        "head": head,
        "kv_cache": round((end - start) * batch * positions * model.kv_bytes_per_token("bf16")),
        "buffers": rotation,
    }
