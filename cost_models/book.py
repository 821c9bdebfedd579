"""Builds the `CostBook` of a cluster: which sources are asked for which device, in which order.

``measured``: profiles (exact rows, then interpolation), then the shipped predictor for devices that
it was fitted to (``foreplan profile --fit``) and for devices of the zoo, then the roofline of
published or measured figures. ``predicted``: the same without profiles, where the predictor takes a
profiled GPU by its measured figures. ``predicted:FOLDER``: the same by weights of one's own
(``foreplan train``). ``roofline``: the figures alone. ``helix:FILE``: a table of whole decoder
layers, and ``predicted`` for what it has no part in. Links come from the cluster's
tiers in every case. A calibration beside a profile (``foreplan calibrate``) corrects the prices of
the choice that it was made for. What failed when a device was profiled has no price whatever the
choice: a crash is no matter of how well times are known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from foreplan.cost_models.costs import BatchSource, CostBook, CostSource, Estimate, Work
from foreplan.cost_models.memory import show_bytes
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.sources.calibration import CalibratedSource, Calibration, calibration_path
from foreplan.cost_models.sources.device_fit import DeviceFit, FittedSource, fit_beside
from foreplan.cost_models.sources.failed import FailedSource
from foreplan.cost_models.sources.in_step import InStepSource, in_step_factors
from foreplan.cost_models.sources.issuing import IssueSource
from foreplan.cost_models.sources.link_costs import LinkSource
from foreplan.cost_models.sources.tables import InterpolatedSource, MeasuredSource
from foreplan.datasets import device_zoo
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device import Device
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Program
from foreplan.errors import SpecError

CostChoice = Literal["measured", "predicted", "roofline"]
COST_CHOICES: tuple[CostChoice, ...] = get_args(CostChoice)
#: What a choice begins with that names a table of whole layers.
LAYER_TABLE = "helix:"
#: Or weights that ``foreplan train`` wrote.
OWN_WEIGHTS = "predicted:"
#: Choices that name a file, and what stands behind them.
FILE_CHOICES = MappingProxyType(
    {LAYER_TABLE: "FILE, a table of layers", OWN_WEIGHTS: "FOLDER, weights of your own"}
)


def cost_choice(text: str, where: str = "--costs") -> CostChoice:
    """Check a word of the option ``where``.

    Raises:
        SpecError: not one of `COST_CHOICES`.
    """
    for choice in COST_CHOICES:
        if choice == text:
            return choice
    raise SpecError(where, got=text, expected=f"one of {', '.join(COST_CHOICES)}")


def cost_choice_or_file(text: str, where: str = "--costs") -> str:
    """Check a word of the option ``where`` that may name a file: ``helix:FILE``, for instance.

    Raises:
        SpecError: neither one of `COST_CHOICES` nor one of `FILE_CHOICES` and a path.
    """
    if not isinstance(text, str):  # from a notebook, unseen by a type checker
        return cost_choice(text, where)
    for choice, rest in FILE_CHOICES.items():
        if text == choice:
            raise SpecError(where, got=text, expected=choice + rest)
        if text.startswith(choice):
            return text
    return cost_choice(text, where)


@dataclass(frozen=True)
class Profiles:
    """Profiles of a cluster's devices, by rank label.

    Attributes:
        by_label: the profile of each rank that has one.
        digest: hash of each profile's document, by rank label, and of each fit's.
        fits: the predictor fitted to the device, found beside the profile, by rank label.
        calibrations: corrections by a user's own measurements, found there too, by rank label.
    """

    by_label: Mapping[str, Profile] = field(default_factory=dict)
    digest: Mapping[str, str] = field(default_factory=dict)
    fits: Mapping[str, DeviceFit] = field(default_factory=dict)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: Cluster, folder: Path) -> Profiles:
        """Read the profiles that a cluster names.

        Args:
            cluster: names them relative to its own file.
            folder: of that file.

        Raises:
            SpecError: a profile or a fit that cannot be read, or that is of another device.
        """
        loaded: dict[str, Profile] = {}
        found: dict[str, Profile] = {}
        fits: dict[str, DeviceFit] = {}
        for rank in cluster.ranks():
            if rank.profile is None:
                continue
            if rank.profile not in loaded:
                loaded[rank.profile] = Profile.load(folder / rank.profile)
            profile = loaded[rank.profile]
            if str(profile.name) != str(rank.name):
                raise SpecError(
                    f"{rank.profile}: device", got=str(profile.name),
                    expected=f"{rank.name}, which the cluster says it describes",
                )  # fmt: skip
            found[rank.label] = profile
            fit = fit_beside(folder / rank.profile, profile)
            if fit is not None:
                fits[rank.label] = fit
        digests = {label: _digest(profile.to_json()) for label, profile in found.items()}
        digests |= {f"{label} fit": _digest(fit.to_json()) for label, fit in fits.items()}
        calibrations = _calibrations(cluster, folder)
        digests |= {f"{k} calibration": _digest(c.to_json()) for k, c in calibrations.items()}
        return cls(found, digests, fits, calibrations)

    def digests(self) -> dict[str, str]:
        """Hash of each profile's document, by rank label."""
        return dict(self.digest)

    def completed(self, cluster: Cluster) -> Cluster:
        """The cluster with the memory of profiled devices where no cap is given.

        Raises:
            SpecError: a cap above the memory of a profiled GPU. A processor's is its host's, which
                another host of the same profile may have more of.
        """
        sizes = {
            (rank.host, rank.name, rank.profile): self.by_label[rank.label].device.memory_bytes
            for rank in cluster.ranks()
            if rank.label in self.by_label
        }
        for entry in cluster.devices:
            most = sizes.get((entry.host, entry.name, entry.profile))
            if entry.name.kind == "cuda" and most and (entry.memory_bytes or 0) > most:
                raise SpecError(
                    f"devices: {entry.host}/{entry.name}: memory_bytes", got=entry.memory_bytes,
                    expected=f"at most {most} ({show_bytes(most)}), which its profile found",
                )  # fmt: skip
        entries = tuple(
            entry.model_copy(
                update={"memory_bytes": sizes.get((entry.host, entry.name, entry.profile))}
            )
            if entry.memory_bytes is None
            else entry
            for entry in cluster.devices
        )
        return cluster.model_copy(update={"devices": entries})

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What using these profiles takes for granted."""
        versions = {
            ", ".join(f"{k} {v}" for k, v in sorted(profile.software.items()))
            for profile in self.by_label.values()
        }
        notes = [f"devices run the software of their profiles ({v})" for v in sorted(versions)]
        failed = {
            profile.device.name: sum(row.status == "failed" for row in profile.rows)
            for profile in self.by_label.values()
        }
        notes += [
            f"{count} programs failed when {name} was profiled; plans do without them"
            for name, count in sorted(failed.items())
            if count
        ]
        notes += [
            f"{c.costs} prices of {c.device} are corrected by {c.rows} measurements of a server "
            f"({c.form}): error {c.error_before:.1%} before, {c.error_after:.1%} after, left out"
            for c in {c.device: c for c in self.calibrations.values()}.values()
        ]
        return tuple(notes)


def _calibrations(cluster: Cluster, folder: Path) -> dict[str, Calibration]:
    """What stands beside the profiles of a cluster, by rank label."""
    found: dict[str, Calibration] = {}
    for rank in cluster.ranks():
        path = None if rank.profile is None else calibration_path(folder / rank.profile)
        if path is None or not path.exists():
            continue
        found[rank.label] = Calibration.load(path)
        if found[rank.label].device != str(rank.name):
            raise SpecError(
                f"{path.name}: device", got=found[rank.label].device,
                expected=f"{rank.name}, whose profile it stands beside",
            )  # fmt: skip
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _ByZooName:
    """Asks a source that knows zoo names about rank labels."""

    def __init__(self, source: CostSource, names: Mapping[str, str]) -> None:
        self._source, self._names = source, dict(names)

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on the zoo device behind a rank label."""
        name = self._names.get(device)
        return None if name is None else self._source.estimate(work, name)

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        """Price programs on the zoo device behind a rank label."""
        name = self._names.get(device)
        if name is not None and isinstance(self._source, BatchSource):
            self._source.prepare(programs, name)


def cost_book(
    cluster: Cluster,
    profiles: Profiles,
    choice: str,
    *,
    given: Mapping[Work, float] | None = None,
    issued: bool = False,
    profiling: str = "foreplan profile",
) -> CostBook:
    """The cost book of a cluster; devices are asked for by rank label.

    Args:
        cluster: devices and links.
        profiles: what was measured on them.
        choice: one of `COST_CHOICES`, or of `FILE_CHOICES` and a path.
        given: prices that override every source.
        issued: operators are issued one by one, as `foreplan.planner.base.Planner.issues`.
        profiling: the command that would measure what has no price.

    Raises:
        SpecError: a table or weights that cannot be read, or a table of none of the devices.
    """
    predictor = None
    if choice.startswith(OWN_WEIGHTS):
        from foreplan.cost_models.predictor import Predictor

        choice, predictor = "predicted", Predictor.load(choice.removeprefix(OWN_WEIGHTS))
    sources: list[CostSource] = [
        FailedSource({label: profile.rows for label, profile in profiles.by_label.items()})
    ]
    zoo = {rank.label: rank.name.zoo for rank in cluster.ranks() if rank.name.zoo}
    if choice.startswith(LAYER_TABLE):
        from foreplan.cost_models.sources.layer_table import LayerTableSource
        from foreplan.datasets.importers import read_operators

        path = choice.removeprefix(LAYER_TABLE)
        layers = LayerTableSource(read_operators(path, "helix"))
        if not set(layers.devices) & {device_zoo.canonical(name) for name in zoo.values()}:
            raise SpecError(
                f"{path}: devices", got=list(layers.devices),
                expected="one of the cluster's: " + ", ".join(sorted(set(zoo.values()))),
            )  # fmt: skip
        sources.append(_ByZooName(layers, zoo))
    timed: list[CostSource] = []
    if choice == "measured":
        timed += [MeasuredSource(profiles.by_label), InterpolatedSource(profiles.by_label)]
    if choice != "roofline" and profiles.fits:
        timed.append(FittedSource(profiles.fits))
    in_step = in_step_factors(cluster, issued=issued)
    plain = all(factor.says_nothing for factor in in_step.values())
    sources += timed if plain else [InStepSource(timed, in_step)]
    sources.append(LinkSource(cluster))
    figures = _figures(cluster, profiles)
    reads = {k: p.read_bandwidth for k, p in profiles.by_label.items() if p.read_bandwidth}
    switch_s = {k: p.switch_s for k, p in profiles.by_label.items() if p.switch_s}
    roofline = RooflineSource(figures, read_bandwidth=reads, switch_s=switch_s)
    gpus = {k: p.device for k, p in profiles.by_label.items() if p.device.kind != "cpu"}
    if (choice != "roofline" and zoo) or (choice == "predicted" and gpus):
        # Loads predictors, which a plan from profiles does without.
        from foreplan.cost_models.sources.predicted import PredictedSource
        from foreplan.cost_models.sources.training_costs import TrainingSource

        if zoo:
            asked = PredictedSource(predictor)
            boards = {label: name for label, name in zoo.items() if figures[label].kind != "cpu"}
            training = TrainingSource(_ByZooName(asked, boards), roofline)
            sources += [_ByZooName(asked, zoo), training]
        if choice == "predicted" and gpus:
            forward = PredictedSource(
                predictor, devices=gpus, read_bandwidth=reads, switch_s=switch_s
            )
            sources += [forward, TrainingSource(forward, roofline)]
    sources.append(roofline)
    corrections = {k: c for k, c in profiles.calibrations.items() if c.costs == choice}
    if corrections:
        sources = [CalibratedSource(sources, corrections, figures)]
    if issued and choice != "roofline":
        tasks = {label: fit.tried.values() for label, fit in profiles.fits.items()}
        rows = {label: profile.rows for label, profile in profiles.by_label.items()}
        sources.append(IssueSource(rows if choice == "measured" else tasks))
    return CostBook(sources, given=given, profiling=profiling)


def _figures(cluster: Cluster, profiles: Profiles) -> dict[str, Device]:
    """Published figures of zoo devices, measured figures of profiled ones."""
    found: dict[str, Device] = {}
    for rank in cluster.ranks():
        if rank.label in profiles.by_label:
            found[rank.label] = profiles.by_label[rank.label].device
        elif rank.name.zoo is not None:
            found[rank.label] = device_zoo.device(rank.name.zoo)
    return found
