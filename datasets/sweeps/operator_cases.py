"""`graph_cases`: library operators of random shapes, to be timed inside CUDA graphs.

Shapes are drawn from general ranges (the larger of two log-uniform draws, half of them round), from
no network. What a pass finds cold is cold here: weights of products come in turn, together larger
than the caches; what an operator before has just written (activations, gradients) is as near as the
caches leave it. Gradients of convolutions, norms and attention are operators of their own, those of
products are products whose operands lie as gradients find them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from foreplan.datasets.sweeps.apart_cases import apart
from foreplan.datasets.sweeps.attention_cases import MASKED, attention
from foreplan.datasets.sweeps.convolution_cases import GROUPED, IMAGES, SOUND, STAGED, convolution
from foreplan.datasets.sweeps.function_cases import function, layout
from foreplan.datasets.sweeps.image_cases import group_norm, interpolated
from foreplan.datasets.sweeps.lying_cases import crossed, mixed, ordered, shared
from foreplan.datasets.sweeps.map_cases import (
    batch_norm,
    broadcast,
    convert,
    elementwise,
    map_sizes,
    reduction,
    roll,
    row_norm,
)
from foreplan.datasets.sweeps.operator_case import (
    MOST_BYTES,
    NARROW,
    Calls,
    Case,
    Operands,
    gradient_call,
    width_of,
)
from foreplan.datasets.sweeps.pool_cases import pool
from foreplan.datasets.sweeps.product_cases import bmm, linear
from foreplan.datasets.sweeps.staged_cases import feature_norm, softmax_gradient
from foreplan.datasets.sweeps.update_packing import packed_update

#: First word of the library of torch's own operators timed inside CUDA graphs
#: (``torch_graph-2.11-cuda``); ``torch-2.11-cuda`` is torch called eagerly, launch included.
RECORDED = "torch_graph"
#: Elements of an embedding's table at most.
_MOST_TABLE = 2**27
#: Operators, and how often each is drawn: most where experts of the first sweep were worst.
_SHARES: Mapping[str, float] = MappingProxyType(
    {
        "linear": 0.15, "bmm": 0.05, "conv": 0.13, "conv_input_gradient": 0.10,
        "conv_weight_gradient": 0.10, "elementwise": 0.06, "broadcast": 0.06, "convert": 0.02,
        "softmax": 0.01, "layernorm": 0.02, "layernorm_gradient": 0.04, "batchnorm": 0.04,
        "batchnorm_gradient": 0.05, "attention": 0.03, "attention_gradient": 0.03,
        "generation": 0.01, "embedding": 0.01, "reduction": 0.06, "update": 0.03,
    }
)  # fmt: skip
#: Operators that are drawn where they are asked for, and how often beside the others.
_ASKED: Mapping[str, float] = MappingProxyType(
    {
        f"{GROUPED}conv": 0.13,
        f"{GROUPED}conv_input_gradient": 0.10,
        f"{GROUPED}conv_weight_gradient": 0.10,
        f"{MASKED}attention": 0.10,
        f"{MASKED}attention_gradient": 0.10,
        f"{MASKED}generation": 0.02,
        "embedding_gradient": 0.03,
        # Of the fifth sweep, half of it convolutions.
        f"{IMAGES}conv": 0.30,
        f"{IMAGES}conv_input_gradient": 0.25,
        f"{IMAGES}conv_weight_gradient": 0.25,
        f"{SOUND}conv": 0.06,
        f"{SOUND}conv_input_gradient": 0.05,
        f"{SOUND}conv_weight_gradient": 0.05,
        f"{NARROW}linear": 0.30,
        f"{NARROW}layernorm": 0.10,
        f"{NARROW}layernorm_gradient": 0.16,
        f"{NARROW}reduction": 0.08,
        f"{NARROW}embedding": 0.08,
        "roll": 0.08,
        "fp32_masked_generation": 0.12,
        # Of the sixth sweep, beside updates and sums.
        "function": 0.40,
        "layout": 0.12,
        "pool": 0.08,
        "pool_gradient": 0.10,
        "apart": 0.20,
        # Of the eighth sweep.
        "crossed": 0.16,
        "mixed": 0.24,
        "shared": 0.12,
        "ordered": 0.06,
        "group_norm": 0.10,
        "group_norm_gradient": 0.10,
        "interpolated": 0.06,
        "interpolated_gradient": 0.06,
        # Of the ninth sweep.
        f"{STAGED}conv": 0.34,
        f"{STAGED}conv_input_gradient": 0.28,
        f"{STAGED}conv_weight_gradient": 0.28,
        "softmax_gradient": 0.06,
        "feature_norm": 0.02,
        "feature_norm_gradient": 0.03,
    }
)
#: Sizes that say what an operator is, or follow from others.
_FOLLOW = frozenset({"kernels", "longest", "function", "side"})
_CONVOLUTIONS = (GROUPED, IMAGES, SOUND, STAGED)
#: Names of operators that are drawn without being asked for, and of all that can be.
USUAL = tuple(_SHARES)
NAMES = (*USUAL, *_ASKED)
#: Data types in the words of the tables, and how often each is drawn.
_DTYPES: Mapping[str, float] = MappingProxyType({"bfloat16": 0.6, "float16": 0.12, "fp32": 0.28})


def graph_cases(seed: int, *, scale: float = 1.0, names: Collection[str] = USUAL) -> Iterator[Case]:
    """Operators without end, each draw independent of the ones before it.

    Args:
        seed: of all draws.
        scale: of the largest FLOP and bytes.
        names: draw these of `NAMES` alone, as often beside each other as among all.
    """
    shares = {name: share for name, share in {**_SHARES, **_ASKED}.items() if name in names}
    whole = sum(shares.values())
    odds = [share / whole for share in shares.values()]
    for index in range(1 << 30):
        rng = np.random.default_rng([seed, index])
        op = str(rng.choice(list(shares), p=odds))
        dtype = str(rng.choice(list(_DTYPES), p=list(_DTYPES.values())))
        # Half of all single draws would take no longer than an empty kernel.
        yield max((_DRAW[op](op, dtype, rng, scale) for _ in "ab"), key=_extent)


def _extent(case: Case) -> int:
    """Product of an operator's sizes, to tell larger from smaller ones of its name."""
    own = (size for name, size in case.dims.items() if name not in _FOLLOW)
    return math.prod(max(1, size) for size in own)


def _embedding(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    rows, cols = int(2.0 ** rng.uniform(0, 15)), int(2.0 ** rng.uniform(4, 13)) // 8 * 8
    vocab = max(8, min(int(2.0 ** rng.uniform(8, 17)), int(_MOST_TABLE * scale) // cols))
    seed = int(rng.integers(1 << 31))

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        ids = torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, rows))
        ids, table = ids.to(view.device), view(dtype, 0, vocab, cols)
        return [lambda: F.embedding(ids, table)]

    return Case(op, op, dtype, {"rows": rows, "cols": cols, "strided": 0}, calls)


def _narrow_embedding(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """Many short rows of a small table, as biases of pairs of positions are looked up."""
    width, index = width_of(dtype), int(rng.random() < 0.4)
    while True:
        rows, cols = int(2.0 ** rng.uniform(6, 21)), int(2.0 ** rng.uniform(2, 7.5))
        values = int(2.0 ** rng.uniform(4, 14))
        if width * (2.0 * rows + values) * cols < MOST_BYTES * scale / 2:
            break
    seed = int(rng.integers(1 << 31))

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        ids = torch.from_numpy(np.random.default_rng(seed).integers(0, values, rows))
        ids, table = ids.to(view.device), view(dtype, 0, values, cols)
        return [(lambda: table[ids]) if index else lambda: F.embedding(ids, table)]

    name = op.removeprefix(NARROW)
    return Case(name, name, dtype, {"rows": rows, "cols": cols, "strided": index}, calls)


def _embedding_gradient(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """The gradient by a table that rows were looked up in, each as often as chance has it.

    Of tokens' embeddings, or of a few biases that many pairs of tokens share.
    """
    few, index = bool(rng.random() < 0.4), int(rng.random() < 0.4)
    rows = int(2.0 ** rng.uniform(0, 18 if few else 15))
    cols = int(2.0 ** rng.uniform(2, 7)) if few else int(2.0 ** rng.uniform(4, 13)) // 8 * 8
    low, high = (4, 12) if few else (8, 17)
    values = max(8, min(int(2.0 ** rng.uniform(low, high)), int(_MOST_TABLE * scale) // cols))
    seed = int(rng.integers(1 << 31))

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        ids = torch.from_numpy(np.random.default_rng(seed).integers(0, values, rows))
        ids, table = ids.to(view.device), view(dtype, 0, values, cols)
        return [gradient_call(lambda t: t[ids] if index else F.embedding(ids, t), [table])]

    return Case(
        op, op, dtype, {"rows": rows, "cols": cols, "values": values, "strided": index}, calls
    )


def _fp32_masked_generation(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    return attention(f"{MASKED}generation", "fp32", rng, scale)


def _update(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """One fused AdamW of many tensors: elements that are read four times and written three."""
    top = 29.2 if dtype == "fp32" else 30.2
    total = int(2.0 ** rng.uniform(12, top) * min(1.0, 10 * scale)) + 1
    count = max(1, min(int(2.0 ** rng.uniform(0, 9)), total // 16))
    parts = rng.dirichlet(np.full(count, 0.5)) * total
    # Kernels take several elements at a time where that leaves no rest, as in nearly all tensors.
    unit = 64 if rng.random() < 0.75 else 1
    sizes = [max(1, int(part) // unit) * unit for part in parts]

    def calls(view: Operands) -> Calls:
        import torch

        lists: list[list[Any]] = [[] for _ in range(4)]
        offset = 0
        for size in sizes:
            for tensors in lists:
                tensors.append(view(dtype, offset, size))
                offset += size + 256
        steps = [torch.ones((), device=view.device) for _ in sizes]
        fused: Any = torch._fused_adamw_
        # Rates that leave the operands as they are: after thousands of calls moments would be
        # squares of squares, infinite or next to nothing, and divisions take a slow way (so they
        # do by a rate of 0): in FP32 2.4 times as long.
        rates = {
            "lr": 1e-12,
            "beta1": 1 - 1e-7,
            "beta2": 1 - 1e-7,
            "weight_decay": 0.0,
            "eps": 1e-8,
        }
        return [lambda: fused(*lists, [], steps, **rates, amsgrad=False, maximize=False)]

    packed = packed_update(sizes)
    dims = map_sizes(
        1, sum(sizes), 6, cost=12, kernels=packed.kernels, longest=packed.longest
    )  # fmt: skip
    return Case(op, "elementwise", dtype, dims, calls)


_DRAW: Mapping[str, Callable[[str, str, np.random.Generator, float], Case]] = MappingProxyType(
    {
        "linear": linear, f"{NARROW}linear": linear, "bmm": bmm, "elementwise": elementwise,
        "broadcast": broadcast, "convert": convert, "roll": roll, "update": _update,
        "embedding": _embedding, f"{NARROW}embedding": _narrow_embedding,
        **dict.fromkeys(("attention", "attention_gradient", "generation"), attention),
        **dict.fromkeys(("conv", "conv_input_gradient", "conv_weight_gradient"), convolution),
        **{name: attention for name in _ASKED if name.startswith(MASKED)},
        **{name: convolution for name in _ASKED if name.startswith(_CONVOLUTIONS)},
        "fp32_masked_generation": _fp32_masked_generation,
        **dict.fromkeys(("reduction", f"{NARROW}reduction"), reduction),
        "embedding_gradient": _embedding_gradient,
        **dict.fromkeys(("softmax", "layernorm", "layernorm_gradient"), row_norm),
        **dict.fromkeys((f"{NARROW}layernorm", f"{NARROW}layernorm_gradient"), row_norm),
        **dict.fromkeys(("batchnorm", "batchnorm_gradient"), batch_norm),
        "function": function, "layout": layout, "apart": apart,
        **dict.fromkeys(("pool", "pool_gradient"), pool),
        "crossed": crossed, "mixed": mixed, "ordered": ordered, "shared": shared,
        **dict.fromkeys(("group_norm", "group_norm_gradient"), group_norm),
        **dict.fromkeys(("interpolated", "interpolated_gradient"), interpolated),
        "softmax_gradient": softmax_gradient,
        **dict.fromkeys(("feature_norm", "feature_norm_gradient"), feature_norm),
    }
)  # fmt: skip
