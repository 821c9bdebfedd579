"""`DeviceFit`: the shipped predictor, fine-tuned to one device by a few dozen timed operators.

The document holds the device's figures and the timed tasks; the law of `rate_model` is fitted to
them when the document is read, in milliseconds and always to the same numbers. It stands beside the
device's profile, as ``<profile>.fit.json``, and prices what ``--costs predicted`` asks of the
device. Another schema, law or predictor than the one it was written for is refused.

What the shipped predictor says is part of the law: of a GPU ``pretrained:ops``, of a processor
``pretrained:processors`` (`known_rates`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from foreplan.cost_models.costs import Copy, Estimate, HostLaunch, Work
from foreplan.cost_models.model_store import model_folder, read_card
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.operator_rates import family
from foreplan.cost_models.rates.profiled_alike import timed_alike
from foreplan.cost_models.rates.rate_model import RateModel, Shipped
from foreplan.cost_models.rates.rescaled_roofline import RescaledRoofline
from foreplan.cost_models.sources.failed import FailedSource
from foreplan.cost_models.sources.tables import measured
from foreplan.datasets.device import Device
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program
from foreplan.datasets.specs import StrictModel, load_document, rows_document, validate
from foreplan.datasets.storage import write_atomically
from foreplan.errors import MissingDataError, SpecError

SCHEMA: Literal["foreplan.fit/1"] = "foreplan.fit/1"
#: Name of the law and of its assumed widths; another one gives other prices of the same tasks.
Law = Literal["rates/1", "rates/2", "rates/3"]
SUFFIX = ".fit.json"

Floats = NDArray[np.float64]


class DeviceFit(StrictModel):
    """See the module."""

    model_config = ConfigDict(ignored_types=(functools.cached_property,))

    schema_: Literal["foreplan.fit/1"] = Field(default=SCHEMA, alias="schema")
    law: Law = "rates/1"
    device: Device
    """Figures that were measured with the tasks."""
    predictor: str | None = None
    """SHA-256 of the card of the shipped weights; ``None`` where they are no part of the law."""
    unseen: bool = False
    """Whether rows of this very chip are left out of them, as if nobody had measured one."""
    software: Mapping[str, str] = Field(default_factory=dict)
    tasks: Annotated[tuple[Row, ...], Field(strict=False, min_length=1)]
    """What was timed; rows that failed say what the device cannot run."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        seen = [row.program() for row in self.tasks]
        if len(set(seen)) < len(seen):
            raise ValueError("each task once")
        if not any(row.status == "ok" for row in self.tasks):
            raise ValueError("a task that ran")
        return self

    @classmethod
    def of(
        cls, device: Device, tasks: Sequence[Row], software: Mapping[str, str], *,
        unseen: bool = False,
    ) -> Self:  # fmt: skip
        """A fit to freshly timed tasks."""
        return cls(
            device=device, tasks=tuple(tasks), software=dict(software), law=_law(device.kind),
            predictor=_predictor_digest(device.kind), unseen=unseen and device.kind == "cpu",
        )  # fmt: skip

    @property
    def programs(self) -> list[Program]:
        """The tasks that ran."""
        return [row.program() for row in self.tasks if row.status == "ok"]

    @functools.cached_property
    def tried(self) -> Mapping[Program, Row]:
        """Every task, also those that failed."""
        return {row.program(): row for row in self.tasks}

    @property
    def seconds(self) -> Floats:
        """Median seconds of `programs`."""
        return np.array([row.median_s for row in self.tasks if row.status == "ok"], dtype=float)

    @functools.cached_property
    def model(self) -> RateModel:
        """The law, fitted to the tasks."""
        shipped = None if self.predictor is None else _shipped(self.device, unseen=self.unseen)
        return RateModel(self._figures, shipped).fit(self.programs, self.seconds)

    @property
    def _figures(self) -> Device:
        """The device as its tasks show it.

        A GPU's are replayed from a CUDA graph, so that none holds the launch by the host: the
        fastest bounds what every kernel takes (1.6 us on an H200 that launches in 6.9).
        """
        launch = self.device.launch_overhead_s
        if self.device.kind == "cpu" or launch is None:
            return self.device
        least = min(launch, float(self.seconds.min()))
        return self.device.model_copy(update={"launch_overhead_s": least})

    def errors(self) -> dict[str, dict[str, float]]:
        """Mean relative error by family and in all, each task predicted from the others alone.

        ``roofline`` is the device's unscaled one and ``shipped`` the shipped predictor (no task is
        used, and only where it prices all of them), ``rescaled`` see `rescaled_roofline`,
        ``fitted`` the law. Fewer than two tasks say nothing.
        """
        from foreplan.cost_models.roofline import RooflineSource

        programs, truth = self.programs, self.seconds
        if len(programs) < 2:
            return {}
        source = RooflineSource(self.device)
        bare = [source.estimate(program, self.device.name) for program in programs]
        found = {
            "roofline": np.array([np.nan if b is None else b.mean_s for b in bare]),
            "shipped": np.full(len(programs), np.nan)
            if self.predictor is None
            else _shipped(self.device, unseen=self.unseen)(programs),
            "rescaled": RescaledRoofline(self._figures).fit(programs, truth).leave_one_out(),
            "fitted": self.model.leave_one_out(),
        }
        kinds = np.array([family(program) for program in programs])
        groups = {"all": np.ones(len(kinds), dtype=bool)}
        groups |= {str(kind): kinds == kind for kind in sorted(set(kinds))}
        # A roofline that lacks a figure of the device says nothing, and not NaN.
        off = {how: np.abs(v / truth - 1) for how, v in found.items() if np.isfinite(v).all()}
        return {
            name: {"tasks": float(rows.sum())}
            | {how: float(values[rows].mean()) for how, values in off.items()}
            for name, rows in groups.items()
        }

    # -------------------------------------------------------------------------------- as a file

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a fit.

        Raises:
            SpecError: no such file, another schema, law or predictor, or a field that is wrong.
        """
        where, document = os.fspath(path), load_document(path)
        again = "fit again with 'foreplan profile --fit'"
        device = document.get("device")
        law = _law(device.get("kind") if isinstance(device, Mapping) else None)
        for key, expected in (("schema", SCHEMA), ("law", law)):
            if document.get(key) != expected:
                raise SpecError(f"{where}: {key}", got=document.get(key), expected=expected,
                                fix=again)  # fmt: skip
        found = validate(cls, document, where)
        shipped = _predictor_digest(found.device.kind)
        if found.predictor not in (None, shipped):
            raise SpecError(
                f"{where}: predictor", got=found.predictor[:12],
                expected=f"the shipped one ({shipped[:12]})", fix=again,
            )  # fmt: skip
        return found

    def to_json(self) -> str:
        """The document, one task a line; equal fits give equal bytes."""
        return rows_document(self, "tasks")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fit whole or not at all.

        Raises:
            SpecError: the path cannot be written.
        """
        write_atomically(path, self.to_json())


def fit_path(profile: str | os.PathLike[str]) -> Path:
    """Where the fit of a device stands whose profile is ``profile``."""
    return Path(profile).with_suffix("").with_name(Path(profile).stem + SUFFIX)


def fit_beside(path: str | os.PathLike[str], profile: Profile) -> DeviceFit | None:
    """The fit of a profiled device, ``None`` where nobody fitted one.

    Args:
        path: of the profile.
        profile: as read from there.

    Raises:
        SpecError: a fit that cannot be read, or that is of another device or software.
    """
    beside = fit_path(path)
    if not beside.exists():
        return None
    fit = DeviceFit.load(beside)
    of = (fit.device.name, fit.device.chip, tuple(fit.device.isa), dict(fit.software))
    device = profile.device
    wanted = (device.name, device.chip, tuple(device.isa), dict(profile.software))
    for what, got, expected in zip(("name", "chip", "isa", "software"), of, wanted, strict=True):
        if got != expected:
            raise SpecError(f"{beside.name}: {what}", got=got,
                            expected=f"{expected}, as its profile has",
                            fix="fit again with 'foreplan profile --fit'")  # fmt: skip
    return fit


class FittedSource:
    """Prices work on devices with a `DeviceFit` (source ``predicted``).

    Programs by the law, except the tasks themselves: those cost what was timed (source
    ``measured``). A copy inside the device by its measured bandwidth and a host launch by its
    measured overhead. ``None`` for others; tasks that failed are refused as by `FailedSource`.

    Args:
        fits: by rank label.
    """

    def __init__(self, fits: Mapping[str, DeviceFit]) -> None:
        self.fits = dict(fits)
        # Kept by fit: books that share the source, and ranks that share a fit, ask the law once.
        self._forecasts: dict[tuple[Program, int], Estimate] = {}
        self._failed = FailedSource({label: fit.tasks for label, fit in self.fits.items()})

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device`` in seconds, or ``None``.

        Raises:
            FailedProgramError: see `FailedSource`.
        """
        fit = self.fits.get(device)
        if fit is None:
            return None
        self._failed.estimate(work, device)
        if isinstance(work, Program):
            row = fit.tried.get(work)
            if row is not None:
                return measured(row)
            if (work, id(fit)) not in self._forecasts:
                self._forecast([work], fit)
            return self._forecasts[work, id(fit)]
        launch, bandwidth = fit.device.launch_overhead_s, fit.device.memory_bandwidth
        if isinstance(work, HostLaunch) and launch is not None:
            return Estimate.exact(work.calls * launch, "predicted")
        if isinstance(work, Copy) and work.kind == "device" and launch and bandwidth:
            return Estimate.exact(launch + 2 * work.bytes / bandwidth, "predicted")
        return None

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Ask the law of many programs at once: a millisecond for one, and little more for fifty.

        Those that failed are passed over; `estimate` refuses them.
        """
        fit = self.fits.get(device)
        if fit is None:
            return
        new = [
            work for work in dict.fromkeys(programs)
            if work not in fit.tried and (work, id(fit)) not in self._forecasts
        ]  # fmt: skip
        if new:
            # A figure that the device lacks is said to whoever asks for a price.
            with contextlib.suppress(MissingDataError):
                self._forecast(new, fit)

    def _forecast(self, programs: Sequence[Program], fit: DeviceFit) -> None:
        found = fit.model.forecast([timed_alike(work) for work in programs])
        for work, mean, low, high in zip(programs, *(v.tolist() for v in found), strict=True):
            self._forecasts[work, id(fit)] = Estimate(mean, low, high, "predicted")


def _law(kind: object) -> Law:
    """The law of a kind of device.

    GPUs' of version 1 held the launch by the host, processors' of it knew of no other processor.
    """
    return "rates/3" if kind == "cpu" else "rates/2"


def _shipped(device: Device, *, unseen: bool) -> Shipped:
    """The shipped predictor's seconds on a device, NaN also below a GPU's launch by the host.

    What is shorter than its launch was hidden behind it when most of the tables were measured
    (`launch_head`), so that such prices are guesses: 6 us for kernels of 1.4 on an H200.
    """
    if device.kind == "cpu":
        known = _processors()
        return (known.without({device.chip}) if unseen else known).on(device)
    from foreplan.cost_models.predictor import Predictor

    predictor, hidden = Predictor.load(), device.launch_overhead_s or 0.0

    def seconds(programs: Sequence[Program]) -> Floats:
        found = predictor.supported(programs, device)
        known = np.array([np.nan if estimate is None else estimate.mean_s for estimate in found])
        return np.where(known > hidden, known, np.nan)

    return seconds


@functools.cache
def _processors() -> KnownRates:
    """Read once a process (0.2 s): every fit of a processor asks for it."""
    return KnownRates.load()


@functools.cache
def _predictor_digest(kind: str) -> str:
    name = "pretrained:processors" if kind == "cpu" else "pretrained:ops"
    card = json.dumps(read_card(model_folder(name)), sort_keys=True)
    return hashlib.sha256(card.encode()).hexdigest()
