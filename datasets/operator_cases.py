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
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from foreplan.datasets.attention_cases import MASKED, attention
from foreplan.datasets.convolution_cases import GROUPED, convolution
from foreplan.datasets.map_cases import (
    batch_norm,
    broadcast,
    convert,
    elementwise,
    reduction,
    row_norm,
)
from foreplan.datasets.operator_case import (
    MOST_BYTES,
    Calls,
    Case,
    Operands,
    gradient_call,
    most_flops,
    product_shape,
    width_of,
)

#: First word of the library of torch's own operators timed inside CUDA graphs
#: (``torch_graph-2.11-cuda``); ``torch-2.11-cuda`` is torch called eagerly, launch included.
RECORDED = "torch_graph"
#: Weights in turn take so many bytes together: four times the largest cache of today.
_COLD_BYTES, _MOST_TURNS = 2.5e8, 16
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
    }
)
#: Names of operators that can be asked for.
NAMES = (*_SHARES, *_ASKED)
#: Data types in the words of the tables, and how often each is drawn.
_DTYPES: Mapping[str, float] = MappingProxyType({"bfloat16": 0.6, "float16": 0.12, "fp32": 0.28})


def graph_cases(
    seed: int, *, scale: float = 1.0, names: Collection[str] = tuple(_SHARES)
) -> Iterator[Case]:
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
    return math.prod(max(1, size) for size in case.dims.values())


def _linear(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    width = width_of(dtype)
    _, m, n, k = product_shape(
        rng,
        batched=False,
        width=width,
        flops=most_flops(dtype, scale),
        most_bytes=MOST_BYTES * scale,
    )
    # Forward, gradient of the input, gradient of the weight: other operands are transposed.
    role, bias = int(rng.integers(3)), bool(rng.random() < 0.5)
    if role == 2:  # adds up over rows
        m, k = k, m
    turns = max(1, min(_MOST_TURNS, round(_COLD_BYTES / (width * n * k))))

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        first = view(dtype, 0, m, k)
        room = n * k + 256
        weights = [view(dtype, m * k + n + 256 + turn * room, n, k) for turn in range(turns)]
        if role == 0:
            added = view(dtype, m * k, n) if bias else None
            return [partial(F.linear, first, w, added) for w in weights]
        if role == 1:
            return [partial(torch.mm, first, w.view(k, n)) for w in weights]
        turned = first.view(k, m).t()
        return [partial(torch.mm, turned, w.view(k, n)) for w in weights]

    return Case(op, op, dtype, {"b": 1, "m": m, "n": n, "k": k, "turned": role}, calls)


def _bmm(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    b, m, n, k = product_shape(
        rng, batched=True, width=width_of(dtype), flops=most_flops(dtype, scale),
        most_bytes=MOST_BYTES * scale,
    )  # fmt: skip
    # Scores of attention, their product with values, gradients by the second operand.
    turned = int(rng.integers(3))

    def calls(view: Operands) -> Calls:
        import torch

        x, y = view(dtype, 0, b, m, k), view(dtype, b * m * k, b, k, n)
        x = x.view(b, k, m).transpose(1, 2) if turned == 2 else x
        y = y.view(b, n, k).transpose(1, 2) if turned == 0 else y
        return [lambda: torch.bmm(x, y)]

    return Case(op, op, dtype, {"b": b, "m": m, "n": n, "k": k, "turned": turned}, calls)


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

    return Case(op, op, dtype, {"rows": rows, "cols": cols}, calls)


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
        rates = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
        return [lambda: fused(*lists, [], steps, **rates, amsgrad=False, maximize=False)]

    dims = {"rows": 1, "cols": sum(sizes), "inputs": 6, "cost": 12, "strided": 0, "broadcast": 0,
            "converts": 0}  # fmt: skip
    return Case(op, "elementwise", dtype, dims, calls)


_DRAW: Mapping[str, Callable[[str, str, np.random.Generator, float], Case]] = MappingProxyType(
    {
        "linear": _linear, "bmm": _bmm, "elementwise": elementwise, "broadcast": broadcast,
        "convert": convert, "reduction": reduction, "embedding": _embedding, "update": _update,
        **dict.fromkeys(("attention", "attention_gradient", "generation"), attention),
        **dict.fromkeys(("conv", "conv_input_gradient", "conv_weight_gradient"), convolution),
        **{name: attention for name in _ASKED if name.startswith(MASKED)},
        **{name: convolution for name in _ASKED if name.startswith(GROUPED)},
        "embedding_gradient": _embedding_gradient,
        **dict.fromkeys(("softmax", "layernorm", "layernorm_gradient"), row_norm),
        **dict.fromkeys(("batchnorm", "batchnorm_gradient"), batch_norm),
    }
)  # fmt: skip
