"""ProgramInputs: what trees and networks are given of a program, beside its leaves.

Shape legend: N programs, M leaves, P parts, Q parts of a leaf, T terms, F entries of a leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.encoder._leaf_names import FEATURE_NAMES as LEAF_FEATURES
from foreplan.cost_models.programs.program_bound import ProgramBound
from foreplan.cost_models.programs.program_estimate import (
    LEAF_NAMES,
    PART_NAMES,
    TERM_NAMES,
    WHOLE_NAMES,
    program_estimate,
)
from foreplan.cost_models.programs.program_scale import DeviceFactors, DeviceFigures, ProgramScale
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.datasets.device import FEATURE_NAMES as DEVICE_FEATURES
from foreplan.datasets.device import Device

Floats = NDArray[np.float64]


class ProgramInputs(NamedTuple):
    """Inputs of N programs.

    Attributes:
        scale_s: weighted sum of the parts, seconds (N).
        leaf_s: share of each leaf in it; what is of the program as a whole is dealt to its leaves
            as their own parts are (M).
        bound: lower bound and launch overhead.
        summary: terms, ln of parts, shares of parts in the scale, ln of the scale
            (N, T + 2 P + 1), float32.
        leaf: vector, ln of parts, shares of parts, ln of the leaf's seconds and its share, of each
            leaf (M, F + 2 Q + 2), float32.
        device: figures on a scale of log10, NaN where unknown (N, figures), float32.
        program: number of each leaf's program (M).
        starts: first leaf of each program (N).
        cpu: whether each program ran on a CPU (N).
    """

    scale_s: Floats
    leaf_s: Floats
    bound: ProgramBound
    summary: NDArray[np.float32]
    leaf: NDArray[np.float32]
    device: NDArray[np.float32]
    program: NDArray[np.int64]
    starts: NDArray[np.int64]
    cpu: NDArray[np.bool_]

    @property
    def flat(self) -> NDArray[np.float32]:
        """A row for each leaf with what is known of its program, for trees."""
        return np.concatenate([self.leaf, self.summary[self.program], self.device[self.program]], 1)

    def of_gpus(self) -> ProgramInputs:
        """Those of programs that did not run on a CPU."""
        chosen = ~self.cpu
        leaves = chosen[self.program]
        sizes = np.bincount(self.program, minlength=len(self.cpu))[chosen]
        bound = ProgramBound(*(values[chosen] for values in self.bound))
        return ProgramInputs(
            self.scale_s[chosen], self.leaf_s[leaves], bound, self.summary[chosen],
            self.leaf[leaves], self.device[chosen], np.repeat(np.arange(len(sizes)), sizes),
            np.append(0, np.cumsum(sizes)[:-1]), self.cpu[chosen],
        )  # fmt: skip


def fit_scale(table: ProgramTable, latency_s: Floats) -> ProgramScale:
    """Fit the weights of parts on a table's rows."""
    parts = program_estimate(table).parts
    return ProgramScale.fit(
        parts,
        on_cpus(table),
        latency_s,
        _device_names(table),
        {device.name: device_figures(device) for device in table.devices},
    )


def stored_scale(
    arrays: Mapping[str, NDArray[Any]], names: Sequence[str], devices: Mapping[str, Device]
) -> ProgramScale:
    """The scale that `ProgramScale.arrays` was of.

    Args:
        arrays: from it.
        names: of the devices with factors, in their order.
        devices: by name.

    Raises:
        ValueError: weights of other parts, or factors of devices that are not described.
    """
    weights, parts = arrays["weights"], len(PART_NAMES)
    factors = arrays.get("factors", np.empty((0, parts)))
    if weights.shape != (2, parts) or factors.shape != (len(names), parts):
        raise ValueError(f"weights {weights.shape} and factors {factors.shape} of {parts} parts")
    missing = [name for name in names if name not in devices]
    if missing:
        raise ValueError(f"factors of {', '.join(missing)}, which the card does not describe")
    items = {name: devices[name] for name in names}
    return ProgramScale(
        weights,
        {
            name: DeviceFactors(device.kind == "cpu", device_figures(device), factor)
            for (name, device), factor in zip(items.items(), factors, strict=True)
        },
    )


def program_inputs(table: ProgramTable, scale: ProgramScale) -> ProgramInputs:
    """Return the inputs of a table's programs.

    Raises:
        MissingDataError: a device without peak or bandwidth.
    """
    estimate, cpu = program_estimate(table), on_cpus(table)
    figures = {device.name: device_figures(device) for device in table.devices}
    weights = scale.of_rows(cpu, _device_names(table), figures)
    parts = estimate.parts * weights
    seconds = parts.sum(1) + 1e-9
    summary = [
        estimate.terms, np.log(estimate.parts + 1e-10), parts / seconds[:, None],
        np.log(seconds)[:, None],
    ]  # fmt: skip
    first = len(WHOLE_NAMES)
    program, starts = estimate.program, table.offsets[:-1]
    weighted = estimate.leaf_parts * weights[program][:, first:]
    own = weighted.sum(1) + 1e-13
    share = own / np.add.reduceat(own, starts)[program]
    leaf_s = seconds[program] * share
    leaf = [
        table.leaves, np.log(estimate.leaf_parts + 1e-10), weighted / leaf_s[:, None],
        np.log(leaf_s)[:, None], share[:, None],
    ]  # fmt: skip
    return ProgramInputs(
        scale_s=seconds,
        leaf_s=leaf_s,
        bound=estimate.bound,
        summary=np.concatenate(summary, 1).astype(np.float32),
        leaf=np.concatenate(leaf, 1, dtype=np.float32),
        device=np.stack([figures[device.name].values for device in table.devices]).astype(
            np.float32
        )[table.device],
        program=program,
        starts=starts,
        cpu=cpu,
    )


#: Names of the columns of `ProgramInputs.flat`: of the leaf, of its program, of its device.
FLAT_NAMES: tuple[str, ...] = (
    *(f"leaf.{name}" for name in LEAF_FEATURES),
    *(f"leaf.ln.{name}" for name in LEAF_NAMES),
    *(f"leaf.share.{name}" for name in LEAF_NAMES),
    "leaf.ln_seconds", "leaf.share",
    *(f"program.{name}" for name in TERM_NAMES),
    *(f"program.ln.{name}" for name in PART_NAMES),
    *(f"program.share.{name}" for name in PART_NAMES),
    "program.ln_seconds",
    *(f"device.{name}" for name in DEVICE_FEATURES),
)  # fmt: skip
#: Entries of a device in `ProgramInputs.device`.
DEVICE_ENTRIES = len(DEVICE_FEATURES)


def _device_names(table: ProgramTable) -> NDArray[np.str_]:
    """Name of each program's device (N)."""
    return np.array([device.name for device in table.devices])[table.device]


def device_figures(device: Device) -> DeviceFigures:
    """Chip and figures of a device."""
    values = np.log10(np.maximum(device.vector().values, 1e-12))
    return DeviceFigures(device.chip, np.asarray(values))


def on_cpus(table: ProgramTable) -> NDArray[np.bool_]:
    """Whether each program ran on a CPU (N)."""
    return np.array([d.kind == "cpu" for d in table.devices], dtype=np.bool_)[table.device]
