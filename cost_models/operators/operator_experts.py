"""Experts of the operator predictor, and how the experts of like devices answer for another one.

The law is that of `operator_predictor`.

Shape legend: ``N`` rows of one device, library and data type; ``E`` experts that answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.carried_convolutions import carried
from foreplan.cost_models.operators.decoding_kernels import HOPPER
from foreplan.cost_models.operators.device_gate import GateScales, distance, library_distance
from foreplan.cost_models.operators.launch_head import head
from foreplan.cost_models.operators.operator_features import Features, features
from foreplan.cost_models.operators.operator_work import PRECISIONS
from foreplan.cost_models.operators.prompt_kernels import multiplies_narrow, takes_turns
from foreplan.cost_models.operators.tile_selector import kernel_line, select
from foreplan.cost_models.tree_ensemble import TreeEnsemble
from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_cases import RECORDED
from foreplan.datasets.sweeps.operator_table import OperatorTable, includes_launch

Floats = NDArray[np.float64]

#: Share of the experts' correction that is believed on a device none of them has seen; the rest
#: falls back to the structure. Fitted on leave-one-chip-out folds, one a family.
_BELIEF = MappingProxyType({"product": 0.8, "wide": 0.85})

#: The same of TensorRT-LLM's prompts, whose structure holds on a chip by itself. Fitted likewise:
#: any two of three chips prefer it, or less, to all.
_PROMPT_BELIEF = 0.75

#: Families whose unseen devices get the experts' weighted median offset; others take the believed
#: share of the weighted mean.
_ANCHORED = frozenset({"product", "conv"})

#: Families whose kernels for operands of another width say nothing of a row.
_BY_WIDTH = frozenset({"context", "generation"})

#: Chips with the row's data type from which a median says something of offsets. Assumed.
_ENOUGH_CHIPS = 3

#: The library whose attention of prompts is told apart by kernels (`prompt_kernels`).
_LIBRARY = "trtllm"

#: Features of how the rows of a product's operands and of its result lie, and from which power of
#: two on libraries load them in words of 16 bytes (8 numbers of 16 bits).
_ALIGNMENTS, _WHOLE = ("align_n", "align_k"), 3

#: 90 % quantile of abs(ln error) of convolutions that are carried from a swept chip to another.
#: Measured: 2,757 plain FP32 ones of NeuSight's five GPUs, asked of an H200's sweep.
_CARRIED_QUANTILE = 1.0

#: Rows of an expert that only measure the host, at most this much roofline time.
_LAUNCH_BOUND_S = 2e-6


@dataclass(frozen=True, slots=True)
class Expert:
    """Trees of one device, library and data type in one family.

    Attributes:
        family: one of `operator_features.FAMILIES`.
        device: figures of the device.
        library: as `OperatorTable.library`.
        dtype: as `OperatorTable.dtype`.
        trees: the correction.
        rows: rows it was fitted on.
        overhead_s: launch overhead by operator name; empty for libraries timed in CUDA graphs.
        seen_quantile: 90 % quantile of abs(ln error) on rows of the expert kept out of its fit.
        offsets: mean correction by kind.
        tiles: of matrix products, which tile the library takes (`tile_selector`); ``None`` where
            the data name no kernels.
    """

    family: str
    device: Device
    library: str
    dtype: str
    trees: TreeEnsemble
    rows: int
    overhead_s: dict[str, float] = field(default_factory=dict)
    seen_quantile: float = 0.3
    offsets: dict[str, float] = field(default_factory=dict)
    tiles: TreeEnsemble | None = None

    @property
    def key(self) -> str:
        """Name of the expert in a weight file."""
        return f"{self.family}|{self.device.name}|{self.library}|{self.dtype}"


@dataclass(frozen=True, slots=True)
class Mixture:
    """What experts say of rows of one device, library and data type in one family.

    Attributes:
        rows: of the table (N,).
        corrections: of each expert (N, E).
        offsets: mean correction of each expert for the row's kind (N, E).
        base: the mixed correction (N,), the tiles' included; NaN where no expert answers.
        overhead_s: launch overhead (N,).
        seen_quantile: of the very device's expert or of carried rows, NaN if there is none.
    """

    rows: NDArray[np.int64]
    corrections: Floats
    offsets: Floats
    base: Floats
    overhead_s: Floats
    seen_quantile: float


def mix(
    pool: Sequence[Expert], table: OperatorTable, block: Features, device: Device,
    scales: GateScales,
) -> Mixture:  # fmt: skip
    """What experts of one family say of rows of one device, library and data type.

    Args:
        pool: the experts, at least one.
        table: the rows (N,).
        block: their features, of no known tile.
        device: their device.
        scales: of the gate.
    """
    family, library, dtype = pool[0].family, table.library[0], table.dtype[0]
    count = len(table)
    weights = _weights(device, library, dtype, pool, scales)
    stranger = all(expert.device.chip != device.chip for expert, _ in weights)
    carry = family == "conv" and stranger and library.startswith(RECORDED)
    own = np.zeros((count, len(weights)))
    offsets = np.zeros_like(own)
    tiled = np.zeros(count)
    for part, tiles in _by_tile(weights, table, block, device):
        tiled += part * np.log(tiles.structural_s / block.structural_s)
        for column, (expert, _) in enumerate(weights):
            own[:, column] += part * (
                carried(table, block, device, expert.device, expert.trees)
                if carry else expert.trees.predict(tiles.values)
            )  # fmt: skip
    lost = _misaligned(pool, block, device, dtype)
    for column, (expert, _) in enumerate(weights):
        if not (includes_launch(expert.library) or expert.library.startswith(RECORDED)):
            own[:, column] += lost  # torch's own were timed at any size and know
        offsets[:, column] = [expert.offsets.get(kind, 0.0) for kind in table.kind]
    share = np.array([weight for _, weight in weights])
    if not weights:
        base = np.full(count, np.nan)
    elif stranger:
        share = share / share.sum()
        timed = family == "context" and library == _LIBRARY
        belief = _PROMPT_BELIEF if timed else _BELIEF.get(family, 1.0)
        alike = {expert.device.chip for expert, _ in weights if expert.dtype == dtype}
        if family in _ANCHORED and len(alike) >= _ENOUGH_CHIPS:
            base = belief * (own - offsets) @ share + _weighted_median(offsets, share)
        else:
            base = belief * own @ share
    else:
        base = own @ (share / share.sum())
    seen = [e.seen_quantile for e, weight in weights if weight >= 1.0]
    overhead = _launch(table.op, device, library, dtype, pool)
    quantile = seen[-1] if seen else _CARRIED_QUANTILE if carry else float("nan")
    return Mixture(np.arange(count), own, offsets, base + tiled, overhead, quantile)


def seconds(overhead: Floats, structural: Floats, bound: Floats, correction: Floats) -> Floats:
    """Measured seconds (N,) of a correction; see `operator_predictor`."""
    with np.errstate(invalid="ignore"):
        device_s = np.maximum(structural * np.exp(np.clip(correction, -8, 12)), bound)
        return head(overhead, device_s)


def overheads(part: OperatorTable, latency: Floats, roofline_s: Floats) -> dict[str, float]:
    """Launch overhead by operator: the median of rows with next to no work.

    An operator with few such rows (convolutions): its quickest row, which no launch outlasts.
    Only torch's eager calls have one; the other libraries are timed inside CUDA graphs.
    """
    if not includes_launch(part.library[0]):
        return {}
    found = {}
    for name in sorted(set(part.op)):
        rows = part.op == name
        small = rows & (roofline_s < _LAUNCH_BOUND_S)
        floor = np.median(latency[small]) if small.sum() > 20 else np.min(latency[rows])
        found[str(name)] = float(min(floor, np.quantile(latency[rows], 0.3)))
    return found


def _weights(
    device: Device, library: str, dtype: str, pool: Sequence[Expert], scales: GateScales
) -> list[tuple[Expert, float]]:
    """Experts that answer for a device, with weights; the very device's own answers alone."""
    if dtype not in PRECISIONS:
        return []
    found = []
    for expert, source in _heard(library, dtype, _alike(device, library, dtype, pool)):
        away = distance(device, expert.device, scales)
        same = device.chip == expert.device.chip
        away += library_distance(library, source, dtype, scales, same_chip=same)
        if expert.dtype != dtype:
            away += scales.dtype * _dtype_distance(expert.dtype, dtype, expert.family)
        found.append((expert, float(np.exp(-away))))
    own = [pair for pair in found if pair[1] >= 1.0]
    # Boards of one chip run the same kernels of the same library at other clocks and memory.
    chip = [
        pair for pair in found if pair[0].device.chip == device.chip
        and pair[0].dtype == dtype and pair[0].library == library
    ]  # fmt: skip
    best = max((weight for _, weight in found), default=0.0)
    return own or chip or [pair for pair in found if pair[1] >= 0.02 * best]


def _alike(
    device: Device, library: str, dtype: str, pool: Sequence[Expert]
) -> Sequence[Expert]:  # fmt: skip
    """Experts whose kernels for a data type may be a device's; of one family.

    TensorRT-LLM has kernels of prompts for Hopper and those behind it, and others for products of
    8 bits: where any expert knows the very kernels of a row, the others are not heard. Where it
    decodes from 8-bit caches, what Hopper does is no hint for others (`decoding_kernels`), nor what
    others do for Hopper: 16-bit caches say more.
    """
    if not pool:
        return pool
    if pool[0].family == "context" and library == _LIBRARY:
        kernels = takes_turns(device), multiplies_narrow(dtype)
        found = [e for e in pool if (takes_turns(e.device), multiplies_narrow(e.dtype)) == kernels]
        return [e for e in found if e.library == library] or pool
    narrow = {name for name, precision in PRECISIONS.items() if precision.weight_bytes < 2}
    if pool[0].family != "generation" or dtype not in narrow:
        return pool
    found = [e for e in pool if e.dtype not in narrow or _hopper(e.device) == _hopper(device)]
    return found or pool


def _hopper(device: Device) -> bool:
    return device.kind == "cuda" and float(device.compute_capability or "nan") == HOPPER


def _heard(library: str, dtype: str, pool: Sequence[Expert]) -> list[tuple[Expert, str]]:
    """Experts to ask for rows of a library and data type, and the library that each stands for.

    Attention in another width is another kernel, and is heard only where nobody knows this one's
    (products of few data types do better with the others', docs/results/operators_history.md). Who
    asks for times inside CUDA graphs, and not of a sweep, hears in place of a device's eager calls
    of torch the sweep of the same operators, where there is one: a launch hides kernels shorter
    than itself, and what trees make of such rows is no correction (e^1.2 on an H200). Who asks for
    what a sweep times hears sweeps alone: the others may not know the operator.
    """
    if pool and pool[0].family in _BY_WIDTH:
        wide = PRECISIONS[dtype].activation_bytes
        pool = [e for e in pool if PRECISIONS[e.dtype].activation_bytes == wide] or pool
    if library.startswith(RECORDED):
        pool = [e for e in pool if e.library.startswith(RECORDED)] or pool
    if includes_launch(library) or library.startswith(RECORDED):
        return [(expert, expert.library) for expert in pool]
    eager = {(e.device.name, e.dtype): e.library for e in pool if includes_launch(e.library)}
    swept = {(e.device.name, e.dtype) for e in pool if e.library.startswith(RECORDED)}
    found = []
    for expert in pool:
        place, source = (expert.device.name, expert.dtype), expert.library
        if source.startswith(RECORDED):
            source = eager.get(place, source)
        elif includes_launch(source) and place in swept:
            continue
        found.append((expert, source))
    return found


def _by_tile(
    weights: Sequence[tuple[Expert, float]], table: OperatorTable, block: Features, device: Device
) -> list[tuple[float, Features]]:  # fmt: skip
    """Features with the tiles that experts of the nearest line of kernels take, and their shares.

    Without such experts: the features as they are.
    """
    library, dtype = table.library[0], table.dtype[0]
    known = [
        (abs(kernel_line(expert.device) - kernel_line(device)), expert.tiles, weight)
        for expert, weight in weights
        if expert.tiles is not None and expert.dtype == dtype and expert.library == library
    ]
    if not known:
        return [(1.0, block)]
    nearest = min(away for away, _, _ in known)
    chosen = [(tiles, weight) for away, tiles, weight in known if away == nearest]
    total = sum(weight for _, weight in chosen)
    return [
        (weight / total, features(table, weights[0][0].family, select(tiles, block.values)))
        for tiles, weight in chosen
    ]


def _misaligned(pool: Sequence[Expert], block: Features, device: Device, dtype: str) -> Floats:
    """What products whose operands' rows begin anywhere lose on a chip, in logarithms (N,).

    Published tables time sizes that are multiples of 8 or more; of GPT-2's vocabulary of 50257 they
    know nothing, and an H200 takes six times as long for it as for 50264. A sweep of the same chip,
    whose sizes are drawn, says by how much, and experts of published graphs take its word.
    """
    sweeps = [
        e for e in pool
        if e.device.chip == device.chip and e.dtype == dtype and e.library.startswith(RECORDED)
    ]  # fmt: skip
    lost = np.zeros(len(block.values))
    if pool[0].family != "product":
        return lost
    columns = [block.names.index(name) for name in _ALIGNMENTS]
    odd = np.flatnonzero((block.values[:, columns] < _WHOLE).any(axis=1))
    if sweeps and len(odd):
        whole = block.values[odd]
        whole[:, columns] = np.maximum(whole[:, columns], _WHOLE)
        for sweep in sweeps:
            away = sweep.trees.predict(block.values[odd]) - sweep.trees.predict(whole)
            lost[odd] += np.maximum(away, 0.0) / len(sweeps)
    return lost


def _weighted_median(values: Floats, weights: Floats) -> Floats:
    """Median of each row of ``values`` (N, E) under the weights (E,)."""
    order = np.argsort(values, axis=1)
    reached = np.cumsum(weights[order], axis=1) >= 0.5 * weights.sum()
    chosen = np.take_along_axis(order, reached.argmax(axis=1)[:, None], axis=1)
    return np.asarray(np.take_along_axis(values, chosen, axis=1)[:, 0])


def same_arithmetic(one: str, two: str) -> bool:
    """Whether two data types move the same bytes through the same kind of unit."""
    if one == two:
        return True
    a, b = PRECISIONS.get(one), PRECISIONS.get(two)
    half = ("bf16", "fp16")
    return (
        a is not None
        and b is not None
        and (a.activation_bytes, a.weight_bytes) == (b.activation_bytes, b.weight_bytes)
        and (a.compute[0] == b.compute[0] or (a.compute[0] in half and b.compute[0] in half))
        and not {one, two} & {"fp8_block", "sq"}
    )


def _dtype_distance(one: str, two: str, family: str) -> float:
    """0.1 for types of the same bytes and arithmetic, else more; most for another width."""
    if same_arithmetic(one, two):
        return 0.1
    a, b = PRECISIONS[one].activation_bytes, PRECISIONS[two].activation_bytes
    # Attention kernels of one library are alike for every cache type, GEMM kernels are not.
    base = 3.0 if family == "product" else 0.7
    return base + 3.0 * (max(a, b) > 2.0 >= min(a, b))


def _launch(
    ops: NDArray[np.object_], device: Device, library: str, dtype: str, pool: Sequence[Expert]
) -> Floats:
    """Launch overhead of each row: of the very device, else a low middle of the library's.

    It is a property of the host and the framework, not of the chip, so likeness plays no part.
    """
    if not includes_launch(library):
        return np.zeros(len(ops))
    tiers = (
        [e for e in pool if e.device.name == device.name and e.library == library],
        [e for e in pool if e.library == library],
        [e for e in pool if e.overhead_s],
    )
    by_op = {}
    for op in set(ops):
        for tier in tiers:
            values = [e.overhead_s[op] for e in tier if op in e.overhead_s]
            if values:
                break
        else:
            values = [v for e in pool for v in e.overhead_s.values()] or [0.0]
        # A busy host only ever adds, so the lower of the middle values.
        by_op[op] = float(np.quantile(values, 0.4, method="lower"))
    return np.array([by_op[op] for op in ops])
