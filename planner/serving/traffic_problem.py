"""`TrafficProblem`: a plan of servers with its prices, and the requests that come to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from foreplan.cost_models.book import Profiles, cost_book, cost_choice_or_file
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.plan import Plan, decision_of, load_plan
from foreplan.planner.plan_paths import folder_of
from foreplan.planner.registry import planner
from foreplan.planner.serving.replica_spec import ReplicasDecision
from foreplan.planner.serving.spec import ServingDecision
from foreplan.planner.serving.traffic import Request, load_traffic
from foreplan.planner.verify.session import problem_of


@dataclass(frozen=True)
class TrafficProblem:
    """See the module.

    Attributes:
        plan: of the servers.
        problem: the plan's, with its costs.
        replicas: each with the most requests that it holds at once.
        requests: by arrival.
    """

    plan: Plan
    problem: Problem[Any]
    replicas: tuple[tuple[ServingDecision, int], ...]
    requests: tuple[Request, ...]

    @classmethod
    def load(
        cls, path: Path, traffic: Path, *, rate_per_s: float | None = None,
        folder: Path | None = None,
    ) -> Self:  # fmt: skip
        """Read both.

        Args:
            path: of the plan.
            traffic: description or trace, see `load_traffic`.
            rate_per_s: arrivals a second instead of the file's.
            folder: that the plan's profile paths start from; the plan's own if left out.

        Raises:
            SpecError: a file that is wrong, a plan of another kind.
        """
        if folder is not None and not folder.is_dir():
            raise SpecError("--profiles", got=str(folder), expected="a folder")
        plan = load_plan(path)
        decision = decision_of(plan)
        if isinstance(decision, ReplicasDecision):
            replicas: tuple[tuple[ServingDecision, int], ...] = tuple(
                (replica, replica.batch) for replica in decision.replicas
            )
        elif isinstance(decision, ServingDecision):
            replicas = ((decision, int(plan.workload["batch"])),)
        else:
            raise SpecError(f"{path.name}: kind", got=plan.kind, expected="serving or replicas")
        requests = load_traffic(traffic, rate_per_s=rate_per_s)
        bare = problem_of(plan, planner(plan.kind))
        cluster = plan.cluster
        if folder is not None:  # as in the document, but from there
            cluster = cluster.rebase(Path(), folder_of(path))
        try:
            profiles = Profiles.of(cluster, folder or Path())
        except SpecError as error:
            if folder is not None or Path(error.where).exists():
                raise
            raise SpecError(
                error.where, got=error.got, expected=error.expected,
                fix="name the folder that profile paths start from: --profiles DIR",
            ) from error  # fmt: skip
        costs = cost_book(plan.cluster, profiles, cost_choice_or_file(plan.provenance.costs))
        problem: Problem[Any] = Problem(bare.model, bare.cluster, bare.workload, costs, bare.seed)
        return cls(plan, problem, replicas, requests)

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer that the plan is for."""
        return int(self.plan.workload["prompt_tokens"]) + int(self.plan.workload["new_tokens"])

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate of arrivals; ``None`` of requests that come at once."""
        span = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return (len(self.requests) - 1) / span if span > 0 else None
