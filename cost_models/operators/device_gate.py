"""Device gate: how much each chip's expert says about another device.

An expert is fitted on one chip's rows. For a device it has not seen, experts of like chips should
count most: kernels are chosen by generation, and what is left after normalising by peak, bandwidth
and multiprocessors goes with the balance of one multiprocessor. The weight of an expert is

    exp(-(sum over figures of scale * |difference|))

with three scales and two penalties, all fitted by hand on leave-one-chip-out folds.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_cases import RECORDED
from foreplan.datasets.sweeps.operator_table import includes_launch

#: Where a generation stands; kernels of one are used on the next ones. Assumed.
_GENERATION = MappingProxyType(
    {"pascal": 0.0, "volta": 1.0, "turing": 1.2, "ampere": 2.0, "ada": 2.4, "hopper": 2.8,
     "blackwell": 3.4}
)  # fmt: skip


#: Data types whose kernels come from the vendor's library in every framework.
_VENDOR = frozenset({"bfloat16", "float16", "fp8"})


@dataclass(frozen=True, slots=True)
class GateScales:
    """Scales of the gate.

    Attributes:
        generation: per generation between them.
        balance: per factor e in FLOP a clock and unit, bytes a clock and unit, L2 a unit.
        power: per factor e in power share.
        library: another version of the same library; see `library_distance`.
        dtype: another data type; one of the same bytes and arithmetic counts a tenth.
    """

    generation: float = 1.0
    balance: float = 0.5
    power: float = 0.5
    library: float = 1.0
    dtype: float = 1.0


def figures(device: Device) -> dict[str, float]:
    """What the gate compares, NaN where unknown."""
    nan = float("nan")
    units, clock = float(device.units or nan), float(device.clock_hz or nan)
    fp32 = float(device.peak("fp32") or nan)
    return {
        "generation": _GENERATION.get(device.architecture or "", nan),
        "flops": float(np.log(fp32 / units / clock)),
        "bytes": float(np.log(float(device.memory_bandwidth or nan) / units / clock)),
        "l2": float(np.log(float(device.l2_bytes or nan) / units)),
        "power": float(np.log(float(device.tdp_w or nan) / fp32)),
    }


def distance(target: Device, expert: Device, scales: GateScales) -> float:
    """Gate distance of two devices; 0 for the same one. An unknown figure counts as 0.5."""
    if target.name == expert.name:
        return 0.0
    one, two = figures(target), figures(expert)
    weight = {
        "generation": scales.generation, "flops": scales.balance, "bytes": scales.balance,
        "l2": scales.balance / 2, "power": scales.power,
    }  # fmt: skip
    total = 0.0
    for name, scale in weight.items():
        gap = abs(one[name] - two[name])
        total += scale * (0.5 if np.isnan(gap) else gap)
    # Boards of one chip run the same kernels.
    return total / 4 if target.chip == expert.chip else total


def library_distance(
    target: str, expert: str, dtype: str, scales: GateScales, *, same_chip: bool
) -> float:
    """Gate distance of two libraries (``torch-2.1-cuda``, ``trtllm``) for a data type.

    On one chip, frameworks call the vendor's kernels for plain products and their own for the rest.
    Eager calls of torch are noisier than kernels in a CUDA graph, and far from them. Farther still
    are the few hundred operators of a sweep inside CUDA graphs: beside a published table they are
    not heard (fitted: else an H100's own GEMMs, 14.0 % off, become 26 % with an H200's sweep).
    """
    if target == expert:
        return 0.0
    if target.split("-")[0] == expert.split("-")[0]:
        return scales.library
    if target.startswith(RECORDED) or expert.startswith(RECORDED):
        return scales.library * 5.0
    eager = includes_launch(target) or includes_launch(expert)
    return scales.library * (0.7 if same_chip and dtype in _VENDOR and not eager else 3.0)
