"""`Calibration`: three factors that correct a device's prices by times of a user's own server.

A pass that was measured to take ``y`` runs programs of prices ``t``; with ``w`` the share of
arithmetic in a program's time (peak rates, `foreplan.cost_models.roofline.compute_share`)::

    y = compute * sum w t + memory * sum (1 - w) t + launch_s * programs

``compute`` and ``memory`` are how much slower than its price arithmetic and memory traffic are on
the server (clocks, another kernel library), ``launch_s`` what each program costs besides (the
server's own overhead). Prefill is mostly the first, decode mostly the others.

Fitted by least squares on relative errors, drawn to 1, 1, 0 by a weak ridge. Which factors are free
(none, one scale, two, all three) is chosen by leaving a workload out; the error that is reported
leaves a workload out of that choice as well. Where that is not below the error of the prices as
they are, they stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from foreplan.cost_models.costs import CostSource, Estimate, Work, first_answers
from foreplan.cost_models.roofline import compute_share
from foreplan.datasets.device import Device
from foreplan.datasets.kernels.training_programs import is_training
from foreplan.datasets.program import Program
from foreplan.datasets.specs import StrictModel, load_document, validate
from foreplan.datasets.storage import write_atomically
from foreplan.errors import SpecError

SCHEMA: Literal["foreplan.calibration/1"] = "foreplan.calibration/1"
SUFFIX = ".calibration.json"
#: Fewest measurements of a device.
LEAST_ROWS = 3
#: Pull of each factor towards "as priced", in relative errors of one measurement.
RIDGE = 0.02

FloatArray = npt.NDArray[np.float64]
#: Free factors of each candidate: which of (compute, memory, launch) move, and which move together.
_FORMS: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = (
    ("as priced", ()),
    ("one scale", ((0, 1),)),
    ("compute and memory", ((0,), (1,))),
    ("compute, memory and launch", ((0,), (1,), (2,))),
)
_IDENTITY = np.array([1.0, 1.0, 0.0])

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0)]


class Calibration(StrictModel):
    """Factors of one device, and what they are worth.

    Attributes:
        schema_: format and version of the document.
        device: the device's name.
        costs: the source of costs that the factors correct.
        form: which factors were free.
        compute, memory: on the share of arithmetic and of memory traffic of a price.
        launch_s: added to every program, seconds.
        rows: measurements.
        error_before: mean relative error of the prices as they are.
        error_after: the same with factors fitted without the workload that is predicted.
        measured_digest: SHA-256 of the file of measurements.
    """

    schema_: Literal["foreplan.calibration/1"] = Field(default=SCHEMA, alias="schema")
    device: str
    costs: Literal["measured", "predicted", "roofline"]
    form: str
    compute: Positive
    memory: Positive
    launch_s: Share
    rows: Annotated[int, Field(ge=1)]
    error_before: Share
    error_after: Share
    measured_digest: str

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a calibration.

        Raises:
            SpecError: no such file, another schema, or a field that is wrong.
        """
        return validate(cls, load_document(path), os.fspath(path))

    def to_json(self) -> str:
        """The document."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document whole or not at all.

        Raises:
            SpecError: the path cannot be written.
        """
        write_atomically(path, self.to_json())


def calibration_path(profile: str | os.PathLike[str]) -> Path:
    """Where the calibration of a device stands whose profile is ``profile``."""
    return Path(profile).with_suffix("").with_name(Path(profile).stem + SUFFIX)


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """A pass of a user's server, taken apart by today's prices.

    Attributes:
        workload: what passes of one workload share; they are left out together.
        compute_s: priced seconds of arithmetic.
        memory_s: priced seconds of memory traffic.
        programs: how many programs it runs.
        latency_s: what was measured.
    """

    workload: str
    compute_s: float
    memory_s: float
    programs: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Factors:
    """What `fit_factors` found; see `Calibration`."""

    form: str
    compute: float
    memory: float
    launch_s: float
    error_before: float
    error_after: float


def fit_factors(passes: Sequence[MeasuredPass]) -> Factors:
    """Fit factors to passes of one device.

    Raises:
        SpecError: fewer than `LEAST_ROWS`, or times that are not above 0.
    """
    if len(passes) < LEAST_ROWS:
        raise SpecError("measurements", got=len(passes), expected=f"at least {LEAST_ROWS} a device")
    terms = np.array([[p.compute_s, p.memory_s, p.programs] for p in passes])
    seconds = np.array([p.latency_s for p in passes])
    if not ((seconds > 0) & np.isfinite(seconds) & (terms[:, :2].sum(axis=1) > 0)).all():
        raise SpecError("measurements", got=float(seconds.min()), expected="times above 0")
    names = sorted({p.workload for p in passes})
    fold = np.array([names.index(p.workload) for p in passes])
    scaled = terms / seconds[:, None]
    before = float(np.abs(scaled @ _IDENTITY - 1).mean())
    after, form = before, 0
    if len(names) >= LEAST_ROWS:
        errors = []
        for k in range(len(names)):
            others = fold != k
            chosen = _choose(scaled, fold, others)
            errors.append(_errors(scaled[~others], _fit(scaled[others], chosen)))
        found = float(np.concatenate(errors).mean())
        if found < before:
            after, form = found, _choose(scaled, fold, np.ones(len(fold), dtype=bool))
    compute, memory, launch_s = (float(f) for f in _fit(scaled, form))
    return Factors(_FORMS[form][0], compute, memory, launch_s, before, after if form else before)


def _choose(scaled: FloatArray, fold: npt.NDArray[np.int64], among: npt.NDArray[np.bool_]) -> int:
    """The form with the least error when each workload of some rows is left out in turn."""
    rows, folds = scaled[among], fold[among]
    scores = []
    for form in range(len(_FORMS)):
        errors = [
            _errors(rows[folds == k], _fit(rows[folds != k], form))
            for k in np.unique(folds)
            if (folds != k).any()
        ]
        scores.append(float(np.concatenate(errors).mean()) if errors else np.inf)
    return int(np.argmin(scores))


def _fit(scaled: FloatArray, form: int) -> FloatArray:
    """Factors of a form; rows are divided by what was measured, so that they should sum to 1."""
    from scipy.optimize import lsq_linear  # type: ignore[import-untyped]

    free = _FORMS[form][1]
    if not free or not len(scaled):
        return _IDENTITY
    columns = np.stack([scaled[:, list(group)].sum(axis=1) for group in free], axis=1)
    start = np.array([_IDENTITY[group[0]] for group in free])
    fixed = [i for i in range(3) if not any(i in group for group in free)]
    rest = 1.0 - scaled[:, fixed] @ _IDENTITY[fixed]
    # The pull is on what a factor changes of a mean measurement, so that units do not matter.
    pull = RIDGE * np.diag(np.maximum(columns.mean(axis=0), 1e-12))
    found = lsq_linear(
        np.concatenate((columns, pull)), np.concatenate((rest, pull @ start)),
        bounds=(np.where(start > 0, 1e-3, 0.0), np.inf),
    ).x  # fmt: skip
    factors = _IDENTITY.copy()
    for group, value in zip(free, found, strict=True):
        factors[list(group)] = value
    return factors


def _errors(scaled: FloatArray, factors: FloatArray) -> FloatArray:
    errors: FloatArray = np.abs(scaled @ factors - 1)
    return errors


class CalibratedSource:
    """Other sources, asked in their order, with the programs of some devices corrected.

    Programs of training steps and everything that is no program keep their price.

    Args:
        sources: asked in order.
        calibrations: by rank label.
        figures: each device's figures, by rank label.
    """

    def __init__(
        self, sources: Sequence[CostSource], calibrations: Mapping[str, Calibration],
        figures: Mapping[str, Device],
    ) -> None:  # fmt: skip
        self.sources = tuple(sources)
        self._calibrations = dict(calibrations)
        self._figures = dict(figures)

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device``, corrected where it is a calibrated device's program."""
        for source in self.sources:
            found = source.estimate(work, device)
            if found is not None:
                return self._corrected(found, work, device)
        return None

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Let the sources price programs at once."""
        first_answers(self.sources, programs, device)

    def _corrected(self, found: Estimate, work: Work, device: str) -> Estimate:
        calibration = self._calibrations.get(device)
        if calibration is None or not isinstance(work, Program) or is_training(work):
            return found
        share = compute_share(work, self._figures[device])
        factor = share * calibration.compute + (1 - share) * calibration.memory
        low, mean, high = (
            t * factor + calibration.launch_s for t in (found.low_s, found.mean_s, found.high_s)
        )
        return Estimate(mean, low, high, found.source)
