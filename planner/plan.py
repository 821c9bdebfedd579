"""`Plan`: the document that every planner writes and every launcher reads.

Same inputs and seed give the same bytes: solve times and measurements stay outside. A plan holds
everything that a real run needs (model, cluster, workload, decision and the alternatives it was
preferred to), so it can be verified on another machine.
"""

from __future__ import annotations

import hashlib
import html
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, overload

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.memory import show_bytes
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.model import Model
from foreplan.datasets.quantity import format_seconds
from foreplan.datasets.specs import StrictModel, validate
from foreplan.datasets.storage import write_atomically
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.document import document_json, read_document
from foreplan.planner.pace import RankPace
from foreplan.planner.plan_paths import (
    folder_of,
    opened,
    with_paths,
    with_profiles,
    without_folders,
    written,
)
from foreplan.planner.planned_for import check_planned_for
from foreplan.planner.prediction import ROUNDING, Prediction, Share
from foreplan.planner.sureness import Confidence
from foreplan.planner.times import Times

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SCHEMA = "foreplan.plan/1"
#: What a plan and its run call the plan's own decision, beside the names of others.
CHOSEN = "chosen"
D = TypeVar("D", bound=StrictModel)


class Alternative(StrictModel):
    """A decision that was not chosen, kept so that it can be run beside the chosen one.

    Attributes:
        name: what it is (``even split, 8 bits``).
        decision: as the plan's.
        limits_met: whether it meets every limit of the workload; if not, it may be faster without
            being better, and it does not count for regret.
        predicted: as the plan's.
    """

    name: str
    decision: dict[str, Any]
    limits_met: bool = True
    predicted: Prediction


class Rejected(StrictModel):
    """A baseline that is not feasible, and why."""

    name: str
    reason: str


class ProvenBound(StrictModel):
    """See `foreplan.planner.base.Bound`."""

    status: str
    lower_s: Annotated[float, Field(ge=0)] | None
    gap: Annotated[float, Field(ge=-ROUNDING)] | None
    solver: str
    evaluations: Annotated[int, Field(ge=0)] = 0


class VerifyHints(StrictModel):
    """How to check the plan for real.

    Attributes:
        backend: ``gloo`` or ``nccl``.
        ranks: processes it takes.
        tolerance: largest relative error of the total that passes.
        pace: programs by which to tell the machine's speed; of ranks priced by a profile only.
    """

    backend: Literal["gloo", "nccl"]
    ranks: Annotated[int, Field(gt=0)]
    tolerance: Annotated[float, Field(gt=0)]
    pace: tuple[RankPace, ...] = ()


class WhatIf(StrictModel):
    """What relaxing one binding limit would bring; see `foreplan.planner.what_if`.

    Attributes:
        limit: field of the workload, or ``memory of t4``.
        relaxed: by which share.
        total_s: predicted total of the decision then made.
        gain: share by which the planner's objective (seconds, for most) falls; 0 where nothing
            better was found.
    """

    limit: str
    relaxed: float
    total_s: float
    gain: float


class Provenance(StrictModel):
    """Where the numbers come from.

    Attributes:
        foreplan: version that wrote the plan.
        costs: the ``--costs`` choice.
        seed: of every random choice.
        source_share: share of the predicted compute time by source of the price.
        profiles: hash of each profile that was used, by device.
        decided: what each source of costs that was asked decided, ``costs`` and those beside it:
            ``chosen``, or the name of an alternative or of a rejected decision.
        planned_for: fingerprints of what the prediction belongs to, by part of the plan, see
            `foreplan.planner.planned_for`; none in plans of early versions.
    """

    foreplan: str
    costs: str
    seed: int
    source_share: dict[str, Share] = Field(default_factory=dict)
    profiles: dict[str, str] = Field(default_factory=dict)
    decided: dict[str, str] = Field(default_factory=dict)
    # Where there is none it is not written: runs know plans of early versions by their bytes.
    planned_for: dict[str, str] = Field(default_factory=dict, exclude_if=lambda value: not value)


class Plan(StrictModel):
    """A decision with what it rests on; the same inputs and seed give the same bytes.

    Attributes:
        schema_: format and version of the document.
        kind: the planner.
        model, cluster, workload: what was planned for.
        decision: the planner's decision.
        predicted: what the simulator says about it.
        times: the simulated timeline, ``None`` for very long schedules.
        alternatives: decisions it was preferred to.
        rejected: baselines and rivals that do not fit or cannot be priced, with the reason.
        confidence: how sure the choice is.
        what_if: what relaxing each binding limit would bring; ``None`` where it was not asked for.
        bound: what is proven.
        verify: how to check it.
        assumptions: what the plan rests on that the user did not say.
        provenance: where the numbers come from.
    """

    schema_: Literal["foreplan.plan/1"] = Field(default="foreplan.plan/1", alias="schema")
    kind: str
    model: Model | None
    cluster: Cluster
    workload: dict[str, Any]
    decision: dict[str, Any]
    predicted: Prediction
    times: Times | None = None
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    confidence: Confidence
    what_if: tuple[WhatIf, ...] | None = None
    bound: ProvenBound
    verify: VerifyHints
    assumptions: tuple[str, ...] = ()
    provenance: Provenance
    # Of the document, of a plan of an early version with profiles.
    _folder: str = PrivateAttr(default=".")

    @field_validator("alternatives")
    @classmethod
    def _told_apart(cls, value: tuple[Alternative, ...]) -> tuple[Alternative, ...]:
        # A verification knows its runs by these names.
        names = [CHOSEN, *(alternative.name for alternative in value)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"a name of its own for each: {twice!r} is taken")
        return value

    @field_validator("bound")
    @classmethod
    def _below_the_plan(cls, value: ProvenBound, info: ValidationInfo) -> ProvenBound:
        predicted = info.data.get("predicted")
        if predicted is None or value.lower_s is None:
            return value
        if value.lower_s > predicted.total_s * (1 + ROUNDING):
            raise ValueError(f"a lower_s of at most the plan's total_s = {predicted.total_s}")
        return value

    def __repr__(self) -> str:
        """One line, as a notebook's last line or ``print`` shows it; `to_json` is the whole."""
        of = "" if self.model is None else f" of {self.model.name}"
        ranks = len(self.predicted.ranks)
        return (
            f"<Plan: {self.kind}{of} on {ranks} rank{'s' * (ranks > 1)}, "
            f"{format_seconds(self.predicted.total_s)} predicted>"
        )

    __str__ = __repr__

    def to_json(self, folder: str | os.PathLike[str] | None = None) -> str:
        """The document, keys in the fields' order, with a final newline.

        Args:
            folder: that the document is for, and its relative paths start from; the current one if
                left out.
        """
        return document_json(self if folder is None else self.written_for(folder))

    def written_for(self, folder: str | os.PathLike[str]) -> Plan:
        """The plan with paths as a document in ``folder`` has them."""
        if not self.provenance.planned_for:  # an early version's: its other paths are the user's
            return with_profiles(self, written(folder))
        return with_paths(self, written(folder))

    def read_from(self, folder: str | os.PathLike[str]) -> Plan:
        """The plan of a document in ``folder``, with paths from the current folder."""
        if self.provenance.planned_for:
            return with_paths(self, opened(folder))
        found = with_profiles(self, opened(folder))
        if found != self:
            found._folder = os.path.realpath(folder)
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document; never half of it. Its paths then start from its own folder.

        Raises:
            SpecError: the path cannot be written.
        """
        write_atomically(path, self.to_json(folder_of(path)))

    @property
    def digest(self) -> str:
        """SHA-256 of the document wherever its files lie; what a verification refers to."""
        early = not self.provenance.planned_for  # runs of these know the document's own bytes
        here = self.written_for(self._folder) if early else without_folders(self)
        return hashlib.sha256(here.to_json().encode()).hexdigest()

    def to_frame(self) -> pd.DataFrame:
        """One row a rank: device, where its time goes in seconds, memory in bytes."""
        import pandas as pd

        return pd.DataFrame(
            {
                "device": rank.device,
                "compute_s": rank.compute_s,
                "communication_s": rank.communication_s,
                "bubble_s": rank.bubble_s,
                "memory_bytes": sum(rank.memory_bytes.values()),
                "capacity_bytes": rank.capacity_bytes,
            }
            for rank in self.predicted.ranks
        )

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the simulated timeline.

        Raises:
            SpecError: the plan keeps no times (a very long schedule).
        """
        from foreplan.planner.registry import planner
        from foreplan.planner.verify.session import problem_of

        if self.times is None:
            raise SpecError("plan.times", got=None, expected="a plan that keeps its timeline")
        chosen = planner(self.kind)
        schedule = chosen.schedule(problem_of(self, chosen), decision_of(self))
        return self.times.timeline(schedule, "simulated").plot(axes)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{r}</td><td>{html.escape(p.device)}</td><td>{format_seconds(p.compute_s)}</td>"
            f"<td>{format_seconds(p.bubble_s)}</td>"
            f"<td>{show_bytes(sum(p.memory_bytes.values()))}</td></tr>"
            for r, p in enumerate(self.predicted.ranks)
        )
        sure = self.confidence
        best = f", the best in {sure.probability_best:.0%} of draws" if sure.draws else ""
        return (
            f"<p><b>{html.escape(self.kind)}</b> plan: {format_seconds(self.predicted.total_s)} "
            f"predicted{best}</p><table><tr><th>rank</th><th>device</th><th>compute</th><th>bubble</th>"
            f"<th>memory</th></tr>{rows}</table>"
        )


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan and check it, its workload and its decisions.

    Relative paths of the document start from its own folder; those of the plan start from the
    current one, as the caller's own do. In plans of early versions, which keep no fingerprints,
    that holds for profiles alone, and other paths are left as they are.

    Raises:
        SpecError: no such file, a truncated or hand-edited document, one whose model, cluster,
            workload or decision was edited after the prediction, another schema version, a kind
            that is not installed, a decision that its planner does not accept, or whose devices,
            layers or kernels are not those of the plan's cluster and model, or whose run takes
            another number of processes than the plan says.
    """
    from foreplan.planner.registry import planner

    if not isinstance(path, (str, os.PathLike)):  # from a notebook, unseen by a type checker
        raise SpecError("load_plan: path", got=type(path).__name__, expected="a file")
    where = Path(path).name
    document = read_document(path, SCHEMA, "plan")
    try:
        plan = validate(Plan, document, where)
        chosen = planner(plan.kind)
        workload = validate(chosen.workload_type, plan.workload, f"{where}: workload")
        decision = validate(chosen.decision_type, plan.decision, f"{where}: decision")
        for i, alternative in enumerate(plan.alternatives):
            at = f"{where}: alternatives[{i}].decision"
            validate(chosen.decision_type, alternative.decision, at)
        chosen.check(plan.model, plan.cluster, workload, decision)
        problem = Problem(plan.model, plan.cluster, workload, CostBook(()), plan.provenance.seed)
        processes = chosen.processes(problem, decision)
        if plan.verify.ranks != processes:
            raise SpecError(
                f"{where}: verify.ranks", got=plan.verify.ranks,
                expected=f"{processes}, the processes of a run of the decision",
            )  # fmt: skip
    except SpecError as error:
        if not error.where.startswith(where):  # of a check that does not know the file
            error = SpecError(
                f"{where}: {error.where}", got=error.got, expected=error.expected, fix=error.fix
            )
        raise _of_another_version(error, document) from error
    check_planned_for(plan, where)
    return plan.read_from(folder_of(path))


def _of_another_version(error: SpecError, document: dict[str, Any]) -> SpecError:
    """The error, with both versions where another one than this wrote the document.

    A schema's fields are added to between versions: what is wrong here may be right there.
    """
    from foreplan import __version__

    provenance = document.get("provenance")
    wrote = provenance.get("foreplan") if isinstance(provenance, dict) else None
    if not isinstance(wrote, str) or wrote == __version__:
        return error
    versions = f"foreplan {wrote[:20]} wrote the plan, this is {__version__}: plan again, or use it"
    fix = versions if error.fix is None else f"{error.fix}; {versions}"
    return SpecError(error.where, got=error.got, expected=error.expected, fix=fix)


@overload
def decision_of(plan: Plan) -> Any: ...


@overload
def decision_of(plan: Plan, wanted: type[D]) -> D: ...


def decision_of(plan: Plan, wanted: type[Any] | None = None) -> Any:
    """The plan's decision as its planner's type.

    Args:
        plan: a plan.
        wanted: the decision's type, such as `ServingDecision`; type checkers then know it.

    Raises:
        SpecError: the planner does not accept it, or the plan is of another kind.
    """
    from foreplan.planner.registry import planner

    if not isinstance(plan, Plan):
        raise SpecError("plan", got=plan, expected="a Plan", fix="open a file by load_plan(path)")
    chosen = planner(plan.kind)
    if wanted is not None and not isinstance(wanted, type):
        raise SpecError("decision_of: wanted", got=wanted, expected="a type of decision")
    if wanted is not None and not issubclass(chosen.decision_type, wanted):
        raise SpecError("plan.kind", got=plan.kind, expected=f"a plan with a {wanted.__name__}")
    return validate(chosen.decision_type, plan.decision, "plan: decision")
