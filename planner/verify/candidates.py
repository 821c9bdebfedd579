"""`Candidate`: a decision made ready to be run, with schedule, ranks and the jobs of its processes.

The chosen decision and the alternatives come from the plan with their predictions; rivals, for a
thorough verification, are asked of the planner and priced anew.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.memory import show_bytes
from foreplan.cost_models.schedule import Schedule
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.specs import nearest, validate
from foreplan.datasets.timing.host_memory import total_bytes
from foreplan.errors import SpecError
from foreplan.planner.base import Planner, Problem
from foreplan.planner.plan import CHOSEN, Plan
from foreplan.planner.predict import Forecast
from foreplan.planner.prediction import Prediction
from foreplan.planner.verify.placement import assign_cores, check_present
from foreplan.planner.verify.rank_program import rank_programs
from foreplan.planner.verify.session import Job

#: How many rivals a thorough verification runs.
RIVALS = 8

Role = Literal["chosen", "alternative", "rival"]


@dataclass(frozen=True)
class Candidate:
    """See the module.

    Attributes:
        name: ``chosen``, or what the plan calls the alternative.
        role: why it is run.
        decision: as the planner's document.
        run: equal for decisions that run alike.
        limits_met: whether it meets the workload's limits.
        predicted: by the plan; ``None`` for a rival that could not be priced.
        schedule: what runs.
        ranks: the cluster's rank of each of its ranks.
        capacities: memory cap of each rank in bytes, ``None`` for none.
        static_bytes: what each rank at least holds, by the planner's own count.
    """

    name: str
    role: Role
    decision: dict[str, Any]
    run: str
    limits_met: bool
    predicted: Prediction | None
    schedule: Schedule
    ranks: tuple[Rank, ...]
    capacities: tuple[int | None, ...]
    static_bytes: tuple[int, ...]

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """What each rank is predicted to hold; 0 where nothing is."""
        if self.predicted is None or not self.predicted.ranks:
            return (0,) * len(self.ranks)
        found = [sum(rank.memory_bytes.values()) for rank in self.predicted.ranks]
        return tuple(found[k * len(found) // len(self.ranks)] for k in range(len(self.ranks)))

    def jobs(
        self, backend: Literal["gloo", "nccl"], mode: str, timeout_s: float
    ) -> tuple[Job, ...]:
        """One job a rank. Its cores are not said here: only its host knows which it has."""
        jobs = []
        for i, rank in enumerate(self.ranks):
            beside = [k for k, other in enumerate(self.ranks) if other.host == rank.host]
            jobs.append(
                Job(
                    kind="rank", decision=self.decision, mode=mode, rank=i, ranks=len(self.ranks),
                    devices=tuple(self.ranks[k].name for k in beside), place=beside.index(i),
                    label=rank.label,
                    # The exact way keeps weights in fp32, for which no device was chosen.
                    capacity_bytes=None if mode == "reference" else self.capacities[i],
                    backend=backend, timeout_s=timeout_s,
                )
            )  # fmt: skip
        return tuple(jobs)

    def check(self, backend: str, host: str | None) -> None:
        """Check that it can run at all, as far as this host knows.

        Args:
            backend: ``gloo`` or ``nccl``.
            host: name of this host in the cluster; every rank is here if ``None``.

        Raises:
            SpecError: a schedule that deadlocks or lacks a transfer, two ranks on one GPU, a
                device that is not here, more threads than cores, more memory than this host has.
        """
        here = [rank for rank in self.ranks if host in (None, rank.host)]
        for rank in here:
            check_present(rank.name, rank.label)
        assign_cores([rank.name for rank in here])
        self._check_memory(host)
        self.check_order(backend)
        gpus = [(rank.host, rank.name.index) for rank in self.ranks if rank.name.kind == "cuda"]
        twice = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
        if twice is not None:
            raise SpecError(
                f"candidate {self.name}", got=f"two ranks on cuda:{twice[1]} of {twice[0]}",
                expected="one rank a GPU: slices of one GPU slow each other down",
            )  # fmt: skip

    def check_order(self, backend: str) -> None:
        """Check that every rank comes to its end, wherever it runs.

        Args:
            backend: ``gloo`` or ``nccl``.

        Raises:
            SpecError: a schedule that deadlocks or lacks a transfer.
        """
        rank_programs(self.schedule, ordered=backend == "nccl")

    def _check_memory(self, host: str | None) -> None:
        """Refuse before anything is loaded: the plan's sizes are whatever its author wrote."""
        needed = sum(
            size
            for rank, size in zip(self.ranks, self.static_bytes, strict=True)
            if host in (None, rank.host) and rank.name.kind == "cpu"
        )
        total = total_bytes()
        if needed > total:
            raise SpecError(
                f"candidate {self.name}", got=f"{show_bytes(needed)} on the processors of one host",
                expected=f"at most the {show_bytes(total)} that this host has",
            )  # fmt: skip


def candidates_of(
    plan: Plan,
    planner: Planner[Any, Any],
    problem: Problem[Any],
    *,
    only: Collection[str] | None = None,
    thorough: bool = False,
    costs: CostBook | None = None,
) -> tuple[Candidate, ...]:
    """The chosen decision first, then the alternatives, then rivals.

    Args:
        plan: what is verified.
        planner: of the plan's kind.
        problem: the plan's, see `problem_of`.
        only: names of alternatives to run beside the chosen decision; all if left out.
        thorough: also run the planner's rivals.
        costs: prices of rivals; the profiles that the plan's cluster names, found from the current
            folder, if left out.

    Raises:
        SpecError: an unknown name, a decision that the planner does not accept.
        MissingDataError: rivals cannot be priced.
    """
    names = [alternative.name for alternative in plan.alternatives]
    for name in only or ():
        if name not in (CHOSEN, *names):
            guess, known = nearest(name, names), ", ".join(map(repr, names))
            raise SpecError(
                "--only", got=name, expected=f"one of {known or 'no alternatives'}",
                fix=f"did you mean {guess!r}?" if guess else None,
            )  # fmt: skip
    found = [_candidate(CHOSEN, "chosen", plan.decision, True, plan.predicted, planner, problem)]
    for other in plan.alternatives:
        if only is None or other.name in only:
            found.append(
                _candidate(
                    other.name, "alternative", other.decision, other.limits_met, other.predicted,
                    planner, problem,
                )
            )  # fmt: skip
    if thorough:
        found += _rivals(plan, planner, problem, costs, found)
    return tuple(found)


def _candidate(
    name: str,
    role: Role,
    document: dict[str, Any],
    limits_met: bool,
    predicted: Prediction | None,
    planner: Planner[Any, Any],
    problem: Problem[Any],
) -> Candidate:
    decision = validate(planner.decision_type, document, f"decision of {name}")
    schedule, members = planner.real(problem, decision)
    known = problem.cluster.ranks()
    if len(members) != schedule.ranks or any(not 0 <= m < len(known) for m in members):
        raise SpecError(
            f"decision of {name}", got=f"cluster ranks {list(members)}",
            expected=f"one of 0..{len(known) - 1} for each of {schedule.ranks} ranks",
        )  # fmt: skip
    ledgers = planner.memory(problem, decision)
    lanes = schedule.ranks // len(ledgers)  # processes that a ledger stands for
    told = {key: value for key, value in document.items() if key not in planner.told}
    return Candidate(
        name, role, document, json.dumps(told, sort_keys=True), limits_met, predicted, schedule,
        tuple(known[member] for member in members),
        tuple(ledger.capacity_bytes for ledger in ledgers for _ in range(lanes)),
        tuple(sum(ledger.items.values()) // lanes for ledger in ledgers for _ in range(lanes)),
    )  # fmt: skip


def _rivals(
    plan: Plan,
    planner: Planner[Any, Any],
    problem: Problem[Any],
    costs: CostBook | None,
    others: Sequence[Candidate],
) -> list[Candidate]:
    if costs is None:
        from foreplan.cost_models.book import Profiles, cost_book, cost_choice_or_file

        costs = cost_book(
            plan.cluster, Profiles.of(plan.cluster, Path()),
            cost_choice_or_file(plan.provenance.costs),
            given=planner.given(problem.workload), issued=planner.issues,
        )  # fmt: skip
    priced: Problem[Any] = Problem(
        problem.model, problem.cluster, problem.workload, costs, problem.seed
    )
    known = [validate(planner.decision_type, other.decision, other.name) for other in others]
    found: list[Candidate] = []
    for name, rival in planner.rivals(priced, known[0], RIVALS).items():
        decision = planner.judged(priced, rival)
        if decision not in known:
            document = decision.model_dump(mode="json")
            predicted = Forecast.of(planner, priced, decision).prediction()
            limits_met = bool(getattr(decision, "limits_met", True))
            found.append(
                _candidate(name, "rival", document, limits_met, predicted, planner, problem)
            )
    return found
