"""`Planner`: what a new kind of planning has to say; the rest of the toolkit comes for free.

A planner names its workload and its decision, decides, and turns a decision into the one `Schedule`
that is simulated, executed, drawn and exported. From that, `foreplan.planner.api` makes the plan
document, the runtime of ``planner/verify`` runs it for real, and the registry gives it a CLI
command and a JSON Schema.

Order of calls: ``decide`` and ``baselines`` once a plan; ``schedule`` and ``memory`` once for each
decision that is priced; ``kernels`` once in each rank's process of a real run. None may change its
arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from foreplan.cost_models.costs import CostBook, Work
from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule import Action, Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.model import Model
from foreplan.datasets.specs import StrictModel
from foreplan.datasets.tier import ContentionKind
from foreplan.errors import SpecError
from foreplan.planner.kept import Kept

if TYPE_CHECKING:
    import torch

    from foreplan.planner.verify.clock import HostClock
    from foreplan.planner.verify.gloo_channels import GlooChannels


#: Actions of the schedules whose forecasts a problem keeps, a quarter of a kilobyte each.
KEPT_ACTIONS = 4_000_000

W = TypeVar("W", bound=StrictModel)
D = TypeVar("D", bound=StrictModel)


@dataclass(frozen=True)
class Problem(Generic[W]):
    """What a planner decides about.

    Attributes:
        model: the model, or ``None`` for planners that need none.
        cluster: devices and links; ``cluster.ranks()`` lists one entry a device instance.
        workload: the planner's own workload.
        costs: prices of work on the cluster's devices; empty in a rank's process.
        seed: of every random choice.
        kept: what was made of it and may be asked for again: forecasts of its latest decisions
            (``foreplan.planner.predict.Forecast.of``), and what a planner searches in.
    """

    model: Model | None
    cluster: Cluster
    workload: W
    costs: CostBook
    seed: int = 0
    kept: Kept[Any] = field(
        init=False, repr=False, compare=False, default_factory=lambda: Kept(KEPT_ACTIONS)
    )


@dataclass(frozen=True, slots=True)
class Bound:
    """What is proven about a decision.

    Attributes:
        status: ``optimal``, ``feasible`` (a limit was reached) or ``heuristic``.
        lower_s: no decision of this problem can be faster, in seconds, by the solver's law;
            ``None`` where nothing is proven.
        gap: (objective - lower) / objective, or ``None``.
        solver: what found it.
        evaluations: how much it searched.
    """

    status: str
    lower_s: float | None
    gap: float | None
    solver: str
    evaluations: int = 0

    def of_another(self, total_s: float, *, timed: bool) -> Bound:
        """What is proven about a decision that was taken instead of the solver's.

        Args:
            total_s: its simulated seconds.
            timed: whether the planner seeks seconds, as `lower_s` has them; the gap of anything
                else is not known for it.
        """
        gap = None
        # A bound above what was simulated is the law's alone: it proves nothing here.
        if timed and self.lower_s is not None and self.lower_s <= total_s and total_s > 0:
            gap = 1.0 - self.lower_s / total_s
        status = "feasible" if self.status == "optimal" else self.status
        return replace(self, gap=gap, status=status)


@dataclass(frozen=True)
class Choice(Generic[D]):
    """A planner's answer.

    Attributes:
        decision: the best found.
        bound: what is proven.
        assumptions: what the answer rests on that the user did not say.
        about: what holds of this decision alone; a plan of another decision says whose it is.
        near: close decisions that the search met, by name; they share in the plan's confidence,
            nothing else. They meet every limit but, maybe, the time limit.
    """

    decision: D
    bound: Bound
    assumptions: tuple[str, ...] = ()
    near: Mapping[str, D] = field(default_factory=dict)
    about: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TimeLimit(Generic[D]):
    """What a decision's simulated total must not exceed.

    Attributes:
        basis: seconds, or a decision: its total, at whatever prices, is the limit.
        factor: of the basis.
    """

    basis: float | D
    factor: float = 1.0


class Kernels(Protocol):
    """How one rank carries out actions; lives in the rank's process, from `Planner.kernels`.

    The runtime walks the rank's list: it calls ``run`` for every action that is not communication,
    after what the action depends on has arrived, and moves ``payload`` into the peer's ``buffer``
    for sends and receives; a collective works on ``payload`` in place. Kernels with an attribute
    ``keeps_buffers = True`` have for every receive of a run a buffer of its own, the same in every
    run; with ``keeps_collected = True`` a collective of theirs works on the same memory in every
    run. Ops in an attribute ``computes_nothing`` stand in a schedule for time alone: they are not
    run.
    """

    def reset(self) -> None:
        """Forget the last run; called before every run, outside the timed part."""
        ...

    def run(self, action: Action) -> None:
        """Do the work of an action; returns when its result may be read (CUDA: when queued)."""
        ...

    def payload(self, action: Action) -> torch.Tensor:
        """Contiguous tensor that a send or collective takes.

        It stays unchanged until the next ``run`` of the same stage and micro-batch.
        """
        ...

    def buffer(self, action: Action) -> torch.Tensor:
        """Contiguous tensor that a receive fills, shaped as the peer's payload."""
        ...

    def result(self) -> dict[str, Any]:
        """What the run computed, as JSON; only ranks that have a result need say anything."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this rank holds, by the ledger's items."""
        ...


class Live(Protocol):
    """How one rank serves what comes while it runs; lives in its process, from `Planner.live`."""

    def serve(
        self, given: Mapping[str, Any], channels: Callable[[HostClock], GlooChannels],
        meet: Callable[[], None],
    ) -> dict[str, Any]:  # fmt: skip
        """Take part in a run.

        Args:
            given: what comes, as the leader wrote it.
            channels: to the other ranks, made for a clock that holds this rank's transfers.
            meet: returns when every rank is about to begin.

        Returns:
            What the rank did and when, as JSON.
        """
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this rank holds, by the ledger's items."""
        ...


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether a distributed run computed what it should.

    Attributes:
        passed: meets the planner's criterion.
        exact: equal to the reference, token for token or bit for bit.
        details: numbers behind it (share of equal tokens, largest difference).
    """

    passed: bool
    exact: bool
    details: Mapping[str, float | str] = field(default_factory=dict)


class Planner(ABC, Generic[W, D]):
    """Base of planners; stateless.

    Attributes:
        kind: word on the command line and in plans.
        workload_type: pydantic model of the workload.
        decision_type: pydantic model of the decision.
        needs_model: whether ``--model`` is required.
        modes: ways of computing in which a run is compared with `reference`.
        told: fields of a decision that tell how it came about and change nothing of a run.
        whole_layers: whether a plan's times are sums over decoder layers, so that a table of these
            (``--costs helix:FILE``) can price it.
        issues: whether real runs issue operators one by one, so that a GPU may wait for its host;
            not where they replay recorded graphs.
    """

    kind: ClassVar[str]
    workload_type: ClassVar[type[StrictModel]]
    decision_type: ClassVar[type[StrictModel]]
    needs_model: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("reference", "fast")
    told: ClassVar[frozenset[str]] = frozenset()
    whole_layers: ClassVar[bool] = False
    issues: ClassVar[bool] = False

    @abstractmethod
    def decide(self, problem: Problem[W]) -> Choice[D]:
        """Decide.

        Raises:
            InfeasibleError: no decision meets the limits; says what lacks how much.
            MissingDataError: a cost is not known.
        """

    @abstractmethod
    def baselines(self, problem: Problem[W]) -> dict[str, D | str]:
        """Decisions that others would take, by name; same kernels, same search as `decide`.

        Where a baseline has no feasible form, the reason stands in its place. A decision with an
        attribute ``limits_met = False`` is run and shown, but it cannot become the plan.
        """

    @abstractmethod
    def schedule(self, problem: Problem[W], decision: D) -> Schedule:
        """The schedule of a decision; rank ``r`` of it runs on ``schedule.devices[r]``."""

    @abstractmethod
    def memory(self, problem: Problem[W], decision: D) -> tuple[MemoryLedger, ...]:
        """A ledger a rank with its static items; actions feed the rest."""

    def preload(self) -> None:
        """Import what `kernels` and `reference` will need.

        Called once in the process that the ranks of all candidates on a device are forked from, so
        that not each of them loads it again. Must start no thread and touch no device.
        """

    @abstractmethod
    def kernels(self, problem: Problem[W], decision: D, rank: int, *, mode: str) -> Kernels:
        """What runs the decision's actions on ``rank``.

        Args:
            problem: without costs.
            decision: the decision to carry out.
            rank: of the decision's schedule.
            mode: ``fast`` as planned, or ``reference``: the same computation in the exact way that
                `reference` computes it too.
        """

    def live(self, problem: Problem[W], decision: D, rank: int, *, mode: str) -> Live:
        """What serves requests as they come on ``rank``; arguments as of `kernels`.

        Raises:
            SpecError: plans of this kind serve none.
        """
        raise SpecError("kind", got=self.kind, expected="a plan that serves requests")

    def alone(self, problem: Problem[W], decision: D, given: Mapping[str, Any]) -> dict[str, Any]:
        """What ``live`` has to compute in mode ``reference``, each request by itself.

        Raises:
            SpecError: as of `live`.
        """
        raise SpecError("kind", got=self.kind, expected="a plan that serves requests")

    def completed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a workload as a user states them, with those that follow from them.

        Called once, before the workload is validated; the plan holds what is returned.
        """
        return dict(fields)

    def given(self, workload: W) -> Mapping[Work, float]:
        """Seconds of works whose price the workload itself states; they override the cost book."""
        return {}

    def compared(self, problem: Problem[W]) -> tuple[str, ...]:
        """Modes in which a run of this problem is compared: `modes`, unless some compute alike."""
        return self.modes

    def ranks(self, problem: Problem[W], decision: D) -> tuple[int, ...]:
        """Cluster rank (index in ``cluster.ranks()``) of each rank of the schedule."""
        return tuple(range(len(problem.cluster.ranks())))

    def occupied(self, problem: Problem[W], decision: D) -> tuple[int, ...]:
        """Cluster ranks that the decision keeps busy.

        More than `ranks` where one rank of the schedule stands for several that do the same.
        """
        return self.ranks(problem, decision)

    def contends(self, problem: Problem[W]) -> ContentionKind:
        """In what the ranks of a host contend, by which the simulator lengthens their work."""
        return "memory"

    def real(self, problem: Problem[W], decision: D) -> tuple[Schedule, tuple[int, ...]]:
        """What a real run carries out, and the cluster rank of each of its processes.

        `schedule` and `ranks`, unless one rank of the schedule stands for several processes that
        work together; those of one rank then follow each other.
        """
        return self.schedule(problem, decision), self.ranks(problem, decision)

    def processes(self, problem: Problem[W], decision: D) -> int:
        """How many processes `real` takes."""
        return len(self.real(problem, decision)[1])

    def check(self, model: Model | None, cluster: Cluster, workload: W, decision: D) -> None:
        """Refuse a decision, read from a document, that is not of this model and cluster.

        By default none is. Prices are not needed for it.

        Raises:
            SpecError: a device, layer or kernel that is not there.
        """

    def metrics(self, problem: Problem[W], decision: D, timeline: Timeline) -> dict[str, float]:
        """Figures a user of this kind of plan reads first; names carry the unit."""
        return {}

    def remarks(self, problem: Problem[W], decision: D) -> tuple[str, ...]:
        """Sentences on the decision that became the plan, the solver's or another one."""
        return ()

    def objective(self, problem: Problem[W], decision: D, total_s: float) -> float:
        """What decisions that meet every limit are compared by, least first: simulated seconds.

        An array of totals may come instead of one; where that raises, they come one by one.
        """
        return total_s

    def time_limit(self, problem: Problem[W]) -> TimeLimit[D] | None:
        """The limit on a decision's total, where time is not (only) what is sought.

        Called after `decide` and `baselines` of the same problem.
        """
        return None

    def judged(self, problem: Problem[W], decision: D) -> D:
        """A decision with its ``limits_met`` as this problem's own prices have it.

        Called for what was decided at other prices, and for baselines: before any of them may
        become the plan. A limit that was missed before stays missed.

        Raises:
            MissingDataError: a work has no price here.
        """
        return decision

    def rivals(self, problem: Problem[W], decision: D, count: int) -> dict[str, D]:
        """Further decisions predicted within 10 % of the best, for a thorough verification."""
        return {}

    def reference(self, problem: Problem[W], decision: D, *, mode: str) -> dict[str, Any] | None:
        """The run's result computed in one process without communication, or ``None``."""
        return None

    def judges(self, problem: Problem[W]) -> bool:
        """Whether `reference` in mode ``quality`` says how good a decision's results are.

        It then returns figures by name, for every decision that is verified.
        """
        return False

    def agree(self, result: dict[str, Any], reference: dict[str, Any], *, mode: str) -> Agreement:
        """Compare a run's result with `reference`'s."""
        equal = result == reference
        return Agreement(equal, equal)
