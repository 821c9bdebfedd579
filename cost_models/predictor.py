"""Predictor: the trained model behind ``foreplan.Predictor``, asked in terms of `Program`s.

Weights measured around CUDA graphs (TensorRT-LLM, SGLang) answer for reduced precision and
attention; torch's FP32 operators answer for the rest. Times are of the device alone: the launch by
the host is a `HostLaunch` of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from foreplan.cost_models.costs import Estimate
from foreplan.cost_models.operator_predictor import OperatorPredictor
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.operator_table import UNKNOWN, OperatorTable, operator_table, texts
from foreplan.datasets.program import Program
from foreplan.errors import MissingDataError

#: (storage, compute) of a linear to the data type of the tables.
_LINEAR = {
    ("fp32", "fp32"): "fp32",
    ("bf16", "bf16"): "bfloat16",
    ("fp16", "fp16"): "float16",
    ("int8", "bf16"): "int8_wo",
    ("int8", "fp16"): "int8_wo",
    ("int4", "bf16"): "int4_wo",
    ("int4", "fp16"): "int4_wo",
    ("fp8", "fp8"): "fp8",
    ("fp8", "bf16"): "fp8",
    ("int8", "int8"): "sq",
}

#: (cache, compute) of an attention to the data type of the tables.
_ATTENTION = {
    ("bf16", "bf16"): "bfloat16/bfloat16",
    ("fp16", "fp16"): "float16/float16",
    ("fp8", "bf16"): "bfloat16/fp8",
    ("int8", "bf16"): "bfloat16/int8",
    ("fp8", "fp8"): "fp8/fp8",
}

_WIDE = {"fp32": "fp32", "bf16": "bfloat16", "fp16": "float16"}


class Predictor:
    """Predicts the time of library operators on any device with known figures.

    Build it with `load`.
    """

    def __init__(self, model: OperatorPredictor) -> None:
        self.model = model

    @classmethod
    def load(cls, name_or_path: str = "pretrained:ops") -> Self:
        """Load weights.

        Args:
            name_or_path: ``pretrained:ops`` or a folder that ``foreplan train`` wrote.

        Raises:
            MissingDataError: no such shipped model.
            SpecError: no such folder, or broken weights.
        """
        from foreplan.cost_models.model_store import model_folder

        return cls(OperatorPredictor.load(model_folder(name_or_path)))

    def predict(self, programs: Sequence[Program], device: Device | str) -> list[Estimate]:
        """Estimate each program, in order, seconds with a nominal 90 % interval.

        Raises:
            MissingDataError: a program or device outside what the model saw; see `supported`.
            SpecError: no such device in the zoo.
        """
        found = self.supported(programs, device)
        for program, estimate in zip(programs, found, strict=True):
            if estimate is None:
                raise MissingDataError(
                    f"the predictor has seen nothing like {program} on "
                    f"{device if isinstance(device, str) else device.name}",
                    fix="profile the device, or allow '--costs roofline'",
                )
        return [estimate for estimate in found if estimate is not None]

    def supported(self, programs: Sequence[Program], device: Device | str) -> list[Estimate | None]:
        """As `predict`, with ``None`` for what is outside of what the model saw.

        Outside are CPUs (no row was of one), gathers, reductions, cache writes and arg-max, FP32
        attention, grouped convolutions and three-bit weights.
        """
        target = device_zoo.device(device) if isinstance(device, str) else device
        if not programs or target.kind == "cpu":
            return [None] * len(programs)
        mean, low, high = self.model.predict_interval(program_table(programs, target))
        return [
            Estimate(float(m), float(lo), float(hi), "predicted") if np.isfinite(m) else None
            for m, lo, hi in zip(mean, low, high, strict=True)
        ]


def program_table(programs: Sequence[Program], device: Device) -> OperatorTable:
    """Programs as rows of an operator table; what the tables have no like of is `UNKNOWN`."""
    rows = [_row(program) for program in programs]
    names = sorted({name for _, _, dims in rows for name in dims})
    count = len(rows)
    return operator_table(
        op=texts(kind for kind, _, _ in rows),
        kind=texts(kind for kind, _, _ in rows),
        dtype=texts(dtype for _, dtype, _ in rows),
        # No torch: times without the host's launch.
        library=texts("trtllm" for _ in rows),
        device=texts(device.name for _ in rows),
        dims={
            name: np.array([dims.get(name, 0) for _, _, dims in rows], dtype=np.float64)
            for name in names
        },
        latency_s=np.full(count, np.nan),
        devices={device.name: device},
    )


_NOTHING: tuple[str, str, dict[str, int]] = (UNKNOWN, "", {})


def _row(program: Program) -> tuple[str, str, dict[str, int]]:
    """Kind, data type and dimensions of a program in the words of an operator table."""
    d, v = program.dims, program.variant
    if program.op == "linear":
        dtype = _LINEAR.get((v.storage, v.compute))
        dims = {"b": 1, "m": d["rows"], "n": d["n"], "k": d["k"]}
        return ("linear", dtype, dims) if dtype else _NOTHING
    if program.op in ("attention", "full_attention"):
        dtype = _ATTENTION.get((v.storage, v.compute))
        kind = "generation_attention" if d["queries"] == 1 else "context_attention"
        # The tables' attention is causal; so many keys leave as many pairs as no mask does.
        more = (d["queries"] - 1) // 2 if program.op == "full_attention" else 0
        shape = {"b": d["batch"], "queries": d["queries"], "keys": d["keys"] + more}
        shape |= {name: d[name] for name in ("heads", "kv_heads", "head_dim")}
        return (kind, dtype, shape) if dtype else _NOTHING
    dtype = _WIDE.get(v.compute)
    if dtype is None:
        return _NOTHING
    if program.op in ("norm", "softmax"):
        kind = "layernorm" if program.op == "norm" else "softmax"
        return kind, dtype, {"rows": d["rows"], "cols": d["cols"]}
    if program.op == "matmul":
        return "bmm", dtype, {"b": d["batch"], "m": d["m"], "n": d["n"], "k": d["k"]}
    if program.op == "conv":
        square = _square_conv(d)
        return ("conv", dtype, square) if square else _NOTHING
    if program.op == "adamw":
        return "elementwise", dtype, {"rows": 1, "cols": d["parameters"], "inputs": 6, "cost": 12}
    if program.op == "elementwise":
        return "elementwise", dtype, {name: d[name] for name in ("rows", "cols", "inputs")} | {
            "cost": 1}  # fmt: skip
    if program.op == "rope":
        wide = {"rows": d["rows"], "cols": d["heads"] * d["head_dim"], "inputs": 1, "cost": 6}
        return "elementwise", dtype, wide
    inputs = {"activation": 2 if v.kernel.endswith("_mul") else 1, "add": 2}.get(program.op)
    if inputs is None:
        return _NOTHING
    cost = 1 if program.op == "add" else 6
    return "elementwise", dtype, {"rows": d["rows"], "cols": d["cols"], "inputs": inputs,
                                  "cost": cost}  # fmt: skip


def _square_conv(d: dict[str, int]) -> dict[str, int] | None:
    """A convolution in the tables' words, which know square ones without groups alone."""
    size, out, window = (math.isqrt(d[name]) for name in ("inputs", "outputs", "taps"))
    if d["groups"] != 1 or size**2 != d["inputs"] or window**2 != d["taps"]:
        return None
    stride = max(1, round(size / out))
    padding = max(0, ((out - 1) * stride + window - size + 1) // 2)
    return {"b": d["batch"], "cin": d["cin"], "cout": d["cout"], "window": window, "size": size,
            "stride": stride, "padding": padding}  # fmt: skip
