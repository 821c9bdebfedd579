"""What ``foreplan simulate traffic`` and ``foreplan verify --traffic`` do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.cost_models.timeline import Timeline, chrome_trace
from foreplan.datasets.storage import (
    exclusive,
    refuse_overwriting,
    refuse_twice,
    refuse_unwritable,
    write_atomically,
)
from foreplan.errors import VerificationError
from foreplan.planner.plan import load_plan
from foreplan.planner.plan_paths import folder_of
from foreplan.planner.serving.traffic_problem import TrafficProblem
from foreplan.planner.serving.traffic_replay import check_rate, largest_rate, replay
from foreplan.planner.steps import told_steps
from foreplan.planner.traffic_run import serve_traffic
from foreplan.planner.verify.paths import check_paths

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


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
    asked = TrafficProblem.load(path, traffic, rate_per_s=rate_per_s, folder=folder)
    problem, replicas, requests = asked.problem, asked.replicas, asked.requests
    most = largest_rate(problem, replicas, requests)
    check_rate(requests, most)
    found = replay(problem, replicas, requests)
    longest = asked.longest
    too_long = sum(r.prompt_tokens + r.new_tokens > longest for r in requests)
    return TrafficResult(
        found.figures(), tuple(batch for _, batch in replicas), longest, too_long, most,
        found.timeline,
    )  # fmt: skip


def verify_traffic(
    path: Path,
    traffic: Path,
    output: Path,
    *,
    rate_per_s: float | None,
    tolerance: float | None,
    rounds: int,
    trace: Path | None,
    trust_paths: bool,
    as_json: bool,
    console: Console,
    show: Callable[[RenderableType], None],
) -> int:
    """Serve requests by a plan's processes for real, and compare with the simulation.

    Args:
        path: the plan.
        traffic: description or trace, see `load_traffic`.
        output: where the document goes.
        rate_per_s: arrivals a second instead of the file's.
        tolerance: largest error that passes; the plan's own if ``None``.
        rounds: runs of the same requests.
        trace: where the Chrome trace goes, if anywhere: the simulation and the first round.
        trust_paths: read profiles outside of the plan's folder too.
        as_json: print the document on stdout, and nothing else there.
        console: hears progress.
        show: prints the tables.

    Returns:
        The exit code: 0, or 5 where the run is outside the tolerance or tokens are others.

    Raises:
        ForeplanError: as `foreplan.planner.traffic_run.serve_traffic`; the plan names files outside
            of its folder.
    """
    from foreplan.planner.report.traffic_tables import served_tables

    for file in (output, trace):
        if file is not None:
            refuse_overwriting(file, path, traffic)
    refuse_twice(output, trace)
    if trace is not None:
        refuse_unwritable(trace)
    if not trust_paths:
        check_paths(load_plan(path), folder_of(path), profiles=True)
    asked = TrafficProblem.load(path, traffic, rate_per_s=rate_per_s)
    with exclusive(output, file=True), told_steps(console) as say:
        run = serve_traffic(
            asked, rounds=rounds, tolerance=tolerance, folder=folder_of(path), say=say
        )
        run.document.save(output)
    written = [output]
    if trace is not None:
        lines = [("simulated", run.simulated), ("measured", run.measured[0])]
        write_atomically(trace, chrome_trace(lines))
        written.append(trace)
    if as_json:
        print(run.document.to_json(), end="")
    else:
        show(served_tables(run.document))
        console.print("wrote " + ", ".join(str(file) for file in written))
    return 0 if run.document.passed else VerificationError.exit_code
