"""Writes what a plan and its run look like: the HTML report and the Chrome trace."""

from __future__ import annotations

import os
from pathlib import Path

from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.storage import (
    refuse_overwriting,
    refuse_twice,
    refuse_unwritable,
    write_atomically,
)
from foreplan.errors import SpecError
from foreplan.planner.plan import Plan, decision_of, load_plan
from foreplan.planner.registry import planner
from foreplan.planner.report.html import render_report
from foreplan.planner.report.trace import render_trace
from foreplan.planner.verify.session import problem_of
from foreplan.planner.verify.verification import Verification, load_verification


def write_report(
    plan: Plan | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    verification: Verification | str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Write the report, and the trace if asked for.

    Args:
        plan: a plan or its file.
        output: HTML file.
        verification: a real run of this plan, or its file.
        trace: Chrome trace file, predicted and measured side by side.

    Returns:
        The files written.

    Raises:
        SpecError: a file is wrong, cannot be written or is one that is read, or the verification is
            of another plan.
    """
    for path in (output, *([] if trace is None else [trace])):
        refuse_overwriting(path, plan, verification)
        refuse_unwritable(path)
    refuse_twice(output, trace)
    loaded = plan if isinstance(plan, Plan) else load_plan(plan)
    run = verification
    if run is not None and not isinstance(run, Verification):
        run = load_verification(run)
    if run is not None and run.plan_digest != loaded.digest:
        raise SpecError(
            "verification", got=run.plan_digest[:12],
            expected=f"a run of this plan ({loaded.digest[:12]})", fix="verify the plan again",
        )  # fmt: skip
    predicted, measured = timelines(loaded, run)
    write_atomically(output, render_report(loaded, run, predicted, measured))
    written = [Path(output)]
    if trace is not None:
        write_atomically(trace, render_trace(predicted, measured))
        written.append(Path(trace))
    return written


def timelines(
    plan: Plan, verification: Verification | None
) -> tuple[Timeline | None, Timeline | None]:
    """Predicted and measured timeline of a plan, as far as they were kept.

    The measured one has every process of the run, of which a rank of the plan may be several.
    """
    if plan.times is None:
        return None, None
    chosen, decision = planner(plan.kind), decision_of(plan)
    problem = problem_of(plan, chosen)
    predicted = plan.times.timeline(chosen.schedule(problem, decision), "simulated")
    if verification is None or verification.times is None:
        return predicted, None
    schedule, _ = chosen.real(problem, decision)
    return predicted, verification.times.timeline(schedule, "measured")
