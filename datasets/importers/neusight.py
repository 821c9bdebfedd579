"""Format ``neusight``: single PyTorch operators (sitar-lab/NeuSight, MIT).

Upstream CSV (``scripts/asplos/data/dataset``): ``OPName, Latency`` (ms), ``Device``, ``B, M, N, K``
or ``B, H`` or ``B, Input_Channel, Output_Channel, Kernel_Szie, Input_Size, Stride, Padding``.
Derived Parquet: the same in lower case with ``op`` and ``latency_ms``. All FP32 with TF32 off; the
latency is the mean of the 5 fastest of 25 runs, launch included.
"""

from __future__ import annotations

import numpy as np

from foreplan.datasets.importers._columns import Columns
from foreplan.datasets.sweeps.operator_table import UNKNOWN, OperatorTable, operator_table, texts

#: Elementwise operator to (tensors read, relative arithmetic cost); ``u`` reads one tensor.
_ELEMENTWISE = {
    "add": (2, 1), "sub": (2, 1), "mul": (2, 1), "div": (2, 2), "pow": (2, 8),
    "addu": (1, 1), "subu": (1, 1), "mulu": (1, 1), "divu": (1, 2), "powu": (1, 8),
    "relu": (1, 1), "gelu": (1, 8), "tanh": (1, 6), "sigmoid": (1, 6), "silu": (1, 6),
    "exp": (1, 4), "sqrt": (1, 4), "neg": (1, 1),
}  # fmt: skip

_KIND = {
    "bmm": "bmm", "matmul": "bmm",
    "linear": "linear", "fc": "linear", "addmm": "linear",
    "conv": "conv", "conv2d": "conv",
    "softmax": "softmax",
    "ln": "layernorm", "layernorm": "layernorm", "layer_norm": "layernorm",
}  # fmt: skip


def convert(columns: Columns) -> OperatorTable:
    """Turn NeuSight's columns into a table.

    Raises:
        SpecError: a missing column, a row without a device, or a size or latency that is not
            positive.
    """
    op = columns.texts("op", "opname", "op_name")
    device = columns.devices("device", "gpu")
    plain = {name: _plain(name) for name in set(op)}
    kind_of = {name: _kind(word) for name, word in plain.items()}
    kind = texts(kind_of[name] for name in op)
    dims: dict[str, np.ndarray] = {name: np.zeros(len(columns)) for name in ("b", "m", "n", "k")}
    product = np.isin(kind, ("bmm", "linear"))
    if product.any():
        size = {name: columns.sizes(name, rows=product) for name in ("m", "n", "k")}
        # NeuSight multiplies (M, N) by (N, K): its N is the contracted size.
        dims["m"] = size["m"]
        dims["n"], dims["k"] = size["k"], size["n"]
    conv = kind == "conv"
    if conv.any():
        for name, sources in {
            "cin": ("in_channels", "input_channel"),
            "cout": ("out_channels", "output_channel"),
            "window": ("kernel_size", "kernel_szie"),
            "size": ("input_size",),
            "stride": ("stride",),
        }.items():
            dims[name] = columns.sizes(*sources, rows=conv)
        dims["padding"] = columns.sizes("padding", rows=conv, least=0, default=0.0)
    dims["b"] = columns.sizes("b", rows=product | conv) if columns.has("b") else np.ones(len(op))
    wide = np.isin(kind, ("elementwise", "softmax", "layernorm"))
    if wide.any():
        dims["rows"] = columns.sizes("b", rows=wide)
        dims["cols"] = columns.sizes("h", rows=wide)
    traits = {name: _ELEMENTWISE.get(word, (0, 0)) for name, word in plain.items()}
    dims["inputs"] = np.array([traits[name][0] for name in op], dtype=np.float64)
    dims["cost"] = np.array([traits[name][1] for name in op], dtype=np.float64)
    version = columns.texts("torch version", "torch_version", default="2.1")
    library = {text: _library(text) for text in set(version)}
    return operator_table(
        op=op,
        kind=kind,
        dtype=texts(["fp32"] * len(op)),
        library=texts(library[text] for text in version),
        device=device,
        dims=dims,
        latency_s=columns.milliseconds("latency_ms", "latency"),
        kernel=columns.texts("kernel_name", "kernel name", default=""),
    )


def _plain(name: str) -> str:
    word = name.lower().strip()
    return word[3:] if word.startswith("vec") and word != "vec" else word


def _kind(word: str) -> str:
    if word in _ELEMENTWISE:
        return "elementwise"
    return _KIND.get(word, UNKNOWN)


def _library(version: str) -> str:
    number = ".".join((version or "2.1").split("+")[0].split(".")[:2])
    return f"torch-{number}-rocm" if "rocm" in version else f"torch-{number}-cuda"
