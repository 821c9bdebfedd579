"""`expert_parts`: operators of a mixture of experts as ones that a predictor has seen.

Nothing that the shipped predictor was fitted to is a mixture of experts. Its products are matrix
products all the same: where ``rows`` rows touch ``t`` experts (see `touched_experts`), ``m = rows *
active / t`` rows fall to each, and a grouped kernel reads ``t`` weights ``[n, k]`` once and
multiplies each by ``m`` rows. That is the traffic and the FLOP of one product of ``m`` rows by a
weight ``[t n, k]``. Rows are taken to be spread evenly over the experts that are touched.

``t`` and ``m`` are no whole numbers; between whole ones the price is linear in both, so that it is
continuous in the rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from foreplan.cost_models.costs import Estimate
from foreplan.datasets.device import Device
from foreplan.datasets.experts import EXPERT_OPERATORS, touched_experts
from foreplan.datasets.kernels.expert_kernels import runs_grouped
from foreplan.datasets.kernels.registry import FEW_ROWS
from foreplan.datasets.kernels.token_shapes import takes_rows
from foreplan.datasets.program import Program, Variant, program

#: Programs and how often each counts.
Shares = list[tuple[Program, float]]

_ACTIVATION = Variant("bf16", "bf16", "torch.silu_mul")

#: `torch._grouped_mm` over one product of one weight, and seconds besides (``fitted``: nine shapes
#: and four numbers of rows on an H200, mostly within 12 %, docs/results/kernels.md).
_GROUPED, _GROUPED_S = 1.4, 6e-6
#: This project's own grouped kernels take as long as a product, up to the first number of rows an
#: expert; from the second on so much longer: in bf16, where it is their last, and in 4 bits, which
#: they unpack for each block of rows (``fitted``, likewise).
_OWN_ROWS, _OWN_SLOWER = (20, 32), 0.3
_INT4_ROWS, _INT4_SLOWER = (6, 12), 0.25
#: Choices that one small kernel sorts, seconds of it, and those of torch's sort beyond (``fitted``,
#: likewise). They are counted with the activation, which there is one of.
_SORTED = (8192, 4e-6, 1e-4)
#: What the host takes for an expert that it calls by itself, so that the GPU waits, and for one
#: whose weight of 4 bits is unpacked by torch (``measured``: 64 experts of 768 features, 1 to 2048
#: rows of which each takes 8, int8 and int4 on an H200, 2026-11-29).
_CALLED_S, _UNPACKED_S = 2e-4, 4.5e-4
#: The largest scores of a row, picked by a radix search, their sum and what divides by it: seconds
#: of few rows, more for so many that they fill the chip, and of a row (``measured``: 64 experts of
#: which a row takes 8, 1 to 2048 rows on an H200, 2026-11-29). Counted with the softmax.
_PICKED_S, _FULL_S, _FULL_ROWS, _PICKED_ROW_S = 12.5e-6, 6e-6, 256, 3e-9
#: Fused kernels of many rows, all experts unpacked first (``fitted``, likewise).
_UNPACKED_ONCE = 1.3


def expert_parts(item: Program, figures: Device | None = None) -> Shares | None:
    """The parts of a router, of experts, of their products or of a shared expert's gate.

    Args:
        item: any program.
        figures: of the device, if known.

    Returns:
        ``None`` of all else.
    """
    d, v = item.dims, item.variant
    if item.op == "router":
        scores = program("linear", v, rows=d["rows"], n=d["experts"], k=d["hidden"])
        size = {"rows": d["rows"], "cols": d["experts"]}
        found = [(scores, 1.0), (program("softmax", v, **size), 1.0)]
        if "grouped" in v.kernel:  # groups are judged, and those that lose left out
            found.append((program("elementwise", replace(v, kernel="any"), **size, inputs=1), 2.0))
        return found
    if item.op == "shared_gate":
        return [(program("elementwise", v, rows=d["rows"], cols=d["cols"], inputs=2), 1.0)]
    if item.op not in (*EXPERT_OPERATORS, "grouped", "grouped_gradient"):
        return None
    rows = d["rows"]
    touched = touched_experts(rows, d["experts"], d["active"])
    drawn = rows * d["active"]
    if item.op == "grouped":
        return _grouped(v, drawn / touched, touched, d["n"], d["k"])
    if item.op == "grouped_gradient":
        return _grouped_gradient(item, drawn / touched, touched)
    ffn, hidden = d["ffn"], d["hidden"]
    wide = Variant("bf16", "bf16", "any")
    beside: Shares = []
    if item.op == "biased_experts":
        beside = [
            (program("elementwise", wide, rows=drawn, cols=2 * ffn, inputs=2), 1.0),
            (program("elementwise", wide, rows=drawn, cols=hidden, inputs=2), 1.0),
        ]
        if figures is None or figures.kind == "cpu" or not takes_rows(figures.compute_capability):
            # Values are clamped, shifted and scaled one after another.
            beside.append((program("elementwise", wide, rows=drawn, cols=ffn, inputs=1), 5.0))
    return [
        *beside,
        (program("elementwise", wide, rows=drawn, cols=hidden, inputs=1), 1.0),  # gathered
        *_grouped(v, drawn / touched, touched, 2 * ffn, hidden),
        (program("activation", _ACTIVATION, rows=drawn, cols=ffn), 1.0),
        *_grouped(v, drawn / touched, touched, hidden, ffn),
        (program("elementwise", wide, rows=drawn, cols=hidden, inputs=2), 1.0),  # added up
    ]


def on_a_gpu(item: Program, part: Program, estimate: Estimate) -> Estimate:
    """What a part of `expert_parts` takes on a GPU, where one kernel has the rows of all experts.

    Experts whose kernels have none for all (`runs_grouped`) are called one by one.

    Args:
        item: the whole.
        part: one of its parts.
        estimate: of the part, by itself one product of one weight.
    """
    if item.op == "router" and part.op == "softmax":
        rows = part.dims["rows"]
        picked_s = _PICKED_S + _FULL_S * min(1.0, rows / _FULL_ROWS) + _PICKED_ROW_S * rows
        return Estimate.total([estimate, Estimate.exact(picked_s, estimate.source)])
    if part.op == "activation" and item.op in EXPERT_OPERATORS:
        if not runs_grouped(item.variant):
            d = item.dims
            touched = touched_experts(d["rows"], d["experts"], d["active"])
            each_s = _UNPACKED_S if item.variant.storage == "int4" else _CALLED_S
            called = Estimate.exact(touched * each_s, estimate.source)
            return Estimate.total([estimate, called])
        few, sorted_s, more_s = _SORTED
        sorting_s = sorted_s if part.dims["rows"] <= few else more_s
        return Estimate.total([estimate, Estimate.exact(sorting_s, estimate.source)])
    if part.op != "linear" or item.op not in (*EXPERT_OPERATORS, "grouped"):
        return estimate
    rows, v = part.dims["rows"], part.variant
    if v.kernel.endswith("fragment_linear"):
        if rows > FEW_ROWS:
            return estimate.times(_UNPACKED_ONCE)
        return estimate.times(
            1.0 + _INT4_SLOWER * _between_rows(rows, _INT4_ROWS) * (v.storage == "int4")
        )
    if item.op in EXPERT_OPERATORS and rows <= _OWN_ROWS[1]:
        return estimate.times(1.0 + _OWN_SLOWER * _between_rows(rows, _OWN_ROWS))
    return Estimate.total([estimate.times(_GROUPED), Estimate.exact(_GROUPED_S, estimate.source)])


def _between_rows(rows: int, ends: tuple[int, int]) -> float:
    """0 up to the first number of rows, 1 from the second on."""
    few, many = ends
    return min(1.0, max(0.0, (rows - few) / (many - few)))


def _grouped(variant: Variant, rows: float, experts: float, n: int, k: int) -> Shares:
    # A kernel of its own: that of one weight has blocks for tens of rows.
    variant = replace(variant, kernel=variant.kernel.replace("foreplan.", "foreplan.grouped_"))
    return [
        (program("linear", variant, rows=m, n=t * n, k=k), share * part)
        for m, share in _between(rows)
        for t, part in _between(experts)
    ]


def _grouped_gradient(item: Program, rows: float, experts: float) -> Shares:
    """By the weights: of each expert touched a product over its rows, of the others zeros."""
    d, v = item.dims, Variant(item.variant.compute, item.variant.compute, "torch.linear")
    found = [
        (program("linear", v, rows=t * d["n"], n=d["k"], k=m), share * part)
        for m, share in _between(rows)
        for t, part in _between(experts)
    ]
    untouched = d["experts"] - experts
    if untouched > 1e-9:
        zeros = program("fill", replace(v, kernel="torch.zeros"), rows=d["n"], cols=d["k"])
        found.append((zeros, untouched))
    return found


def _between(value: float) -> list[tuple[int, float]]:
    """The whole numbers around a value of at least 1, weighted to make it."""
    least = max(1, math.floor(value + 1e-9))
    more = min(1.0, max(0.0, value - least))
    return [(least, 1.0 - more), (least + 1, more)] if more > 1e-9 else [(least, 1.0)]
