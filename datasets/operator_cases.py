"""`graph_cases`: library operators of random shapes, to be timed inside CUDA graphs.

Shapes are drawn from general ranges (the larger of two log-uniform draws, half of them round), from
no network. What a pass finds cold is cold here: weights of products come in turn, together larger
than the caches; what an operator before has just written (activations, gradients) is as near as the
caches leave it. Gradients of convolutions are operators of their own, those of products products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

#: Calls of one operator on its operands in turn.
Calls = list[Callable[[], Any]]

#: First word of the library of torch's own operators timed inside CUDA graphs
#: (``torch_graph-2.11-cuda``); ``torch-2.11-cuda`` is torch called eagerly, launch included.
RECORDED = "torch_graph"
#: Largest FLOP and bytes of one operator in FP32: about 20 ms on an H200.
MOST_FLOPS, MOST_BYTES = 8e11, 8e9
#: FLOP of 16-bit products over those of FP32, and of convolutions over those of products: kernels
#: of few channels reach a tenth of the peak. Both assumed.
_HALF_FLOPS, _CONV_FLOPS = 8.0, 0.2
#: Weights in turn take so many bytes together: four times the largest cache of today.
_COLD_BYTES, _MOST_TURNS = 2.5e8, 16
#: Elements of an embedding's table at most.
_MOST_TABLE = 2**27
#: Operators, and how often each is drawn.
_SHARES: Mapping[str, float] = MappingProxyType(
    {
        "linear": 0.20, "bmm": 0.09, "conv": 0.11, "conv_input_gradient": 0.06,
        "conv_weight_gradient": 0.06, "elementwise": 0.18, "softmax": 0.03, "layernorm": 0.05,
        "batchnorm": 0.03, "attention": 0.07, "embedding": 0.03, "reduction": 0.06,
        "update": 0.03,
    }
)  # fmt: skip
#: Data types in the words of the tables, and how often each is drawn.
_DTYPES: Mapping[str, float] = MappingProxyType({"bfloat16": 0.5, "float16": 0.25, "fp32": 0.25})


class Case(NamedTuple):
    """One operator to time.

    Attributes:
        op: its name.
        kind: of `operator_table.KINDS`.
        dtype: as an operator table has it.
        dims: sizes by name.
        calls: makes the calls from views of a buffer.
    """

    op: str
    kind: str
    dtype: str
    dims: dict[str, int]
    calls: Callable[[Operands], Calls]


class Operands:
    """Views of one random buffer a data type, because zeros run faster than data.

    Args:
        device: torch device.
        most_bytes: of all operands of one case.
    """

    def __init__(self, device: str, most_bytes: float = 2 * MOST_BYTES) -> None:
        self.device = device
        self._bytes = int(most_bytes)
        self._buffers: dict[str, Any] = {}

    def __call__(self, dtype: str, offset: int, *shape: int) -> Any:
        """A tensor of a shape that begins behind so many elements."""
        import torch

        if dtype not in self._buffers:
            name, width = ("float32", 4) if dtype == "fp32" else (dtype, 2)
            kind = getattr(torch, name)
            made = torch.empty(self._bytes // width, dtype=kind, device=self.device)
            self._buffers[dtype] = made.uniform_(0.5, 1.5)
        start = -(-offset // 256) * 256  # allocators align tensors, and kernels count on it
        return self._buffers[dtype][start : start + int(np.prod(shape))].view(*shape)


def graph_cases(seed: int, *, scale: float = 1.0) -> Iterator[Case]:
    """Operators without end, each draw independent of the ones before it.

    Args:
        seed: of all draws.
        scale: of the largest FLOP and bytes.
    """
    for index in range(1 << 30):
        rng = np.random.default_rng([seed, index])
        op = str(rng.choice(list(_SHARES), p=list(_SHARES.values())))
        dtype = str(rng.choice(list(_DTYPES), p=list(_DTYPES.values())))
        # Half of all single draws would take no longer than an empty kernel.
        yield max((_DRAW[op](op, dtype, rng, scale) for _ in "ab"), key=_extent)


def product_shape(
    rng: np.random.Generator, *, batched: bool, width: int, flops: float = MOST_FLOPS,
    most_bytes: float = MOST_BYTES,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Batch, rows, columns and contracted size of a product of ``width`` bytes an element."""
    while True:
        if batched:
            top = rng.choice([10.0, 12.0, 14.0], p=[0.6, 0.25, 0.15])
            sizes = 2.0 ** rng.uniform([0, 3, 3, 3], [10, top, top, top])
        else:
            sizes = 2.0 ** rng.uniform([0, 2, 4, 4], [0, 13, 16, 16])
        shape = np.maximum(np.round(sizes), 1).astype(int)
        if rng.random() < 0.5:  # models have round sizes
            shape[1:] = np.maximum(shape[1:] // 64, 1) * 64
        b, m, n, k = (int(size) for size in shape)
        small = width * b * (m * k + k * n + m * n) < most_bytes
        if small and 2.0 * b * m * n * k < flops:
            return b, m, n, k


def wide_shape(rng: np.random.Generator, most_bytes: float = MOST_BYTES) -> tuple[int, int]:
    """Rows and columns of an operator over single elements."""
    while True:
        rows, cols = (int(2.0 ** rng.uniform(low, high)) for low, high in ((1, 17), (4, 15)))
        if rng.random() < 0.5 and cols > 64:
            cols = cols // 64 * 64
        if 12.0 * rows * cols < most_bytes / 2:
            return rows, cols


def _extent(case: Case) -> int:
    """Product of an operator's sizes, to tell larger from smaller ones of its name."""
    return math.prod(max(1, size) for size in case.dims.values())


def _width(dtype: str) -> int:
    return 4 if dtype == "fp32" else 2


def _flops(dtype: str, scale: float) -> float:
    return MOST_FLOPS * scale * (1.0 if dtype == "fp32" else _HALF_FLOPS)


def _linear(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    width = _width(dtype)
    _, m, n, k = product_shape(
        rng, batched=False, width=width, flops=_flops(dtype, scale), most_bytes=MOST_BYTES * scale
    )
    # Forward, gradient of the input, gradient of the weight: other operands are transposed.
    role, bias = int(rng.integers(3)), bool(rng.random() < 0.5)
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

    return Case(op, op, dtype, {"b": 1, "m": m, "n": n, "k": k}, calls)


def _bmm(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    b, m, n, k = product_shape(
        rng, batched=True, width=_width(dtype), flops=_flops(dtype, scale),
        most_bytes=MOST_BYTES * scale,
    )  # fmt: skip
    turned = bool(rng.random() < 0.5)

    def calls(view: Operands) -> Calls:
        import torch

        x, y = view(dtype, 0, b, m, k), view(dtype, b * m * k, b, k, n)
        y = y.view(b, n, k).transpose(1, 2) if turned else y
        return [lambda: torch.bmm(x, y)]

    return Case(op, op, dtype, {"b": b, "m": m, "n": n, "k": k}, calls)


def _conv(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    while True:
        b, size = int(2.0 ** rng.uniform(0, 8)), int(2.0 ** rng.uniform(2, 8))
        cin, cout = (int(2.0 ** rng.uniform(3, 11.3)) for _ in "io")
        if rng.random() < 0.85:
            cin, cout = cin // 8 * 8, cout // 8 * 8
        window = int(rng.choice([1, 3, 5, 7], p=[0.4, 0.4, 0.1, 0.1]))
        stride, padding, groups = int(rng.choice([1, 2], p=[0.75, 0.25])), window // 2, 1
        layout = rng.random()
        if layout < 0.06:  # patches
            window = stride = int(rng.choice([2, 4, 8, 14, 16]))
            padding, cin = 0, int(rng.choice([1, 3, cin]))
        elif layout < 0.22:  # one filter a channel
            cout = groups = cin
            window = int(rng.choice([3, 5, 7]))
            padding = window // 2
        elif layout < 0.32:
            groups = 2 ** int(rng.integers(1, 6))
            cin, cout = (-(-channels // groups) * groups for channels in (cin, cout))
        out = (size + 2 * padding - window) // stride + 1
        if size < window or out < 1:
            continue
        kernel = cin // groups * cout * window**2
        moved = _width(dtype) * (b * (cin * size**2 + cout * out**2) + kernel)
        flops = 2.0 * b * kernel * out**2
        # What no product of matrix units computes takes as long as in FP32.
        most = _flops("fp32" if groups > 1 else dtype, scale) * _CONV_FLOPS
        if moved < MOST_BYTES * scale / 4 and flops < most:
            break
    last = bool(rng.random() < 0.5)
    gradient = {"conv_input_gradient": 0, "conv_weight_gradient": 1}.get(op)

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        def image(offset: int, channels: int, extent: int) -> Any:
            if not last:
                return view(dtype, offset, b, channels, extent, extent)
            return view(dtype, offset, b, extent, extent, channels).permute(0, 3, 1, 2)

        x = image(0, cin, size)
        behind = x.numel() + 256
        w = view(dtype, behind, cout, cin // groups, window, window)
        if gradient is None:
            return [lambda: F.conv2d(x, w, None, stride, padding, 1, groups)]
        g = image(behind + w.numel(), cout, out)
        mask = [gradient == 0, gradient == 1, False]
        return [
            lambda: torch.ops.aten.convolution_backward(
                g, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups, mask
            )
        ]

    dims = {"b": b, "cin": cin, "cout": cout, "window": window, "size": size, "stride": stride,
            "padding": padding, "groups": groups, "channels_last": int(last)}  # fmt: skip
    return Case(op, op, dtype, dims, calls)


def _elementwise(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    rows, cols = wide_shape(rng, MOST_BYTES * scale)
    inputs = int(rng.choice([1, 2, 3], p=[0.5, 0.4, 0.1]))
    strided = inputs == 1 and bool(rng.random() < 0.3)
    which = int(rng.integers(8))

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        x, y, z = (view(dtype, at * (rows * cols + 256), rows, cols) for at in range(3))
        if strided:
            turned, half = x.view(cols, rows).t(), cols // 2
            return [
                [lambda: turned.contiguous(),
                 lambda: torch.cat((x[:, half:], x[:, :half]), -1)][which % 2]
            ]  # fmt: skip
        aten: Any = torch.ops.aten
        one: Calls = [
            lambda: torch.relu(x), lambda: F.gelu(x), lambda: F.silu(x), lambda: torch.tanh(x),
            lambda: x * 2.0, lambda: x + y[0], lambda: torch.rsqrt(x), lambda: x.clone(),
        ]  # fmt: skip
        two: Calls = [
            lambda: x + y, lambda: x * y, lambda: x - y, lambda: x / y,
            lambda: aten.gelu_backward(x, y), lambda: aten.silu_backward(x, y),
            lambda: aten.threshold_backward(x, y, 0), lambda: aten.tanh_backward(x, y),
        ]  # fmt: skip
        three: Calls = [lambda: torch.addcmul(x, y, z), lambda: torch.lerp(x, y, z)] * 4
        return [(one, two, three)[inputs - 1][which]]

    # The cost of an element is not known of a program; see `predictor`.
    dims = {"rows": rows, "cols": cols, "inputs": inputs, "cost": 1, "strided": int(strided)}
    return Case(op, op, dtype, dims, calls)


def _rows(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """Softmax, norms and sums: operators over the rows of a matrix, or its columns."""
    rows, cols = wide_shape(rng, MOST_BYTES * scale)
    which, strided = int(rng.integers(3)), op == "reduction" and bool(rng.random() < 0.4)

    def calls(view: Operands) -> Calls:
        import torch
        import torch.nn.functional as F

        x, factor = view(dtype, 0, rows, cols), view(dtype, rows * cols, max(rows, cols))
        if op == "softmax":
            return [lambda: torch.softmax(x, -1)]
        if op == "layernorm":
            own = factor[:cols]
            if which == 0:
                return [lambda: F.rms_norm(x, (cols,), own)]
            return [lambda: F.layer_norm(x, (cols,), own, own)]
        if op == "batchnorm":  # of up to 64 channels' images
            channels = 1 << min(6, (rows & -rows).bit_length() - 1)
            images, own = x.view(rows // channels, channels, cols), factor[:channels]
            return [lambda: F.batch_norm(images, own, own, own, own)]
        if strided:  # `rows` columns are summed up
            turned = x.view(cols, rows)
            return [lambda: turned.sum(0)]
        return [[lambda: x.sum(-1), lambda: x.mean(-1), lambda: x.amax(-1)][which]]

    dims = {"rows": rows, "cols": cols} | ({"strided": int(strided)} if op == "reduction" else {})
    return Case(op, op, dtype, dims, calls)


def _attention(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    dtype = "bfloat16" if dtype == "fp32" else dtype
    while True:
        b, heads = int(2.0 ** rng.uniform(0, 7)), int(2.0 ** rng.uniform(0, 6.5))
        head_dim = int(rng.choice([32, 64, 80, 96, 128], p=[0.1, 0.4, 0.1, 0.1, 0.3]))
        queries = 1 if rng.random() < 0.3 else int(2.0 ** rng.uniform(2, 12.5))
        causal = queries > 1 and bool(rng.random() < 0.5)
        keys = queries if causal or rng.random() < 0.7 else int(2.0 ** rng.uniform(4, 13))
        if queries == 1:
            keys = int(2.0 ** rng.uniform(4, 14))
        moved = 4.0 * b * heads * (queries + keys) * head_dim
        flops = 4.0 * b * heads * queries * keys * head_dim
        if moved < MOST_BYTES * scale / 2 and flops < _flops(dtype, scale) / 2:
            break

    def calls(view: Operands) -> Calls:
        import torch.nn.functional as F

        # As linears leave them: heads of one token lie together.
        q = view(dtype, 0, b, queries, heads, head_dim).transpose(1, 2)
        behind, room = q.numel() + 256, b * keys * heads * head_dim + 256
        k, v = (
            view(dtype, behind + at * room, b, keys, heads, head_dim).transpose(1, 2)
            for at in range(2)
        )
        return [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)]

    # Tables count causal pairs; so many keys leave as many pairs as no mask does.
    more = 0 if causal or queries == 1 else (queries - 1) // 2
    dims = {"b": b, "queries": queries, "keys": keys + more, "heads": heads, "kv_heads": heads,
            "head_dim": head_dim, "window": 0}  # fmt: skip
    kind = "generation_attention" if queries == 1 else "context_attention"
    return Case(kind, kind, f"{dtype}/{dtype}", dims, calls)


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


def _update(op: str, dtype: str, rng: np.random.Generator, scale: float) -> Case:
    """One fused AdamW of many tensors: elements that are read four times and written three."""
    total = int(2.0 ** rng.uniform(10, 29) * min(1.0, 10 * scale)) + 1
    count = max(1, min(int(2.0 ** rng.uniform(0, 9)), total // 16))
    parts = rng.dirichlet(np.full(count, 0.5)) * total
    sizes = [max(1, int(part)) for part in parts]

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

    dims = {"rows": 1, "cols": sum(sizes), "inputs": 6, "cost": 12, "strided": 0}
    return Case(op, "elementwise", dtype, dims, calls)


_DRAW: Mapping[str, Callable[[str, str, np.random.Generator, float], Case]] = MappingProxyType(
    {
        "linear": _linear, "bmm": _bmm, "elementwise": _elementwise, "attention": _attention,
        "embedding": _embedding, "update": _update,
        **dict.fromkeys(("conv", "conv_input_gradient", "conv_weight_gradient"), _conv),
        **dict.fromkeys(("softmax", "layernorm", "batchnorm", "reduction"), _rows),
    }
)  # fmt: skip
