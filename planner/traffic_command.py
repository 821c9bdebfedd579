"""What ``foreplan simulate traffic`` does: replay requests on a plan of servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreplan.cost_models.book import Profiles, cost_book, cost_choice_or_file
from foreplan.cost_models.timeline import Timeline, chrome_trace
from foreplan.errors import SpecError
from foreplan.planner.base import Problem
from foreplan.planner.plan import decision_of, load_plan
from foreplan.planner.plan_paths import folder_of
from foreplan.planner.registry import planner
from foreplan.planner.serving.replica_spec import ReplicasDecision
from foreplan.planner.serving.spec import ServingDecision
from foreplan.planner.serving.traffic import load_traffic
from foreplan.planner.serving.traffic_replay import check_rate, largest_rate, replay
from foreplan.planner.verify.session import problem_of


@dataclass(frozen=True)
class TrafficResult:
    """Figures of a replay.

    Attributes:
        figures: percentiles in seconds, throughput, share of the cache in use.
        batches: most requests that each replica holds at once, its plan's batch.
        longest: tokens of prompt and answer that the plan's launch files allow a request.
        too_long: requests of more, which servers started by them refuse.
        largest_rate_per_s: requests a second that the plan serves when some always wait.
        timeline: simulated; ranks are the stages, replica by replica.
    """

    figures: dict[str, float]
    batches: tuple[int, ...]
    longest: int
    too_long: int
    largest_rate_per_s: float
    timeline: Timeline

    def trace(self) -> str:
        """Chrome trace, JSON text; of many requests it takes as long as their replay."""
        return chrome_trace([("traffic", self.timeline)])

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            **self.figures, "batches": list(self.batches), "longest_planned": self.longest,
            "longer_than_planned": self.too_long, "largest_rate_per_s": self.largest_rate_per_s,
            "simulated": True,
        }  # fmt: skip


def simulate_traffic(
    path: Path, traffic: Path, *, rate_per_s: float | None = None, folder: Path | None = None
) -> TrafficResult:
    """Replay requests on a plan.

    Args:
        path: of the plan.
        traffic: description or trace, see `load_traffic`.
        rate_per_s: arrivals a second instead of the file's.
        folder: that the plan's profile paths start from; the plan's own if left out.

    Raises:
        SpecError: a file that is wrong, a plan of another kind, a request too long for it.
        InfeasibleError: requests come faster than the plan can serve them; says how fast it can.
        MissingDataError: a pass has no price.
    """
    if folder is not None and not folder.is_dir():
        raise SpecError("--profiles", got=str(folder), expected="a folder")
    plan = load_plan(path)
    decision = decision_of(plan)
    if isinstance(decision, ReplicasDecision):
        replicas: list[tuple[ServingDecision, int]] = [(r, r.batch) for r in decision.replicas]
    elif isinstance(decision, ServingDecision):
        replicas = [(decision, int(plan.workload["batch"]))]
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
    most = largest_rate(problem, replicas, requests)
    check_rate(requests, most)
    found = replay(problem, replicas, requests)
    longest = int(plan.workload["prompt_tokens"]) + int(plan.workload["new_tokens"])
    too_long = sum(r.prompt_tokens + r.new_tokens > longest for r in requests)
    return TrafficResult(
        found.figures(), tuple(batch for _, batch in replicas), longest, too_long, most,
        found.timeline,
    )  # fmt: skip
