"""What ``foreplan verify`` does: run, write the documents, show tables, choose the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.cost_models.book import Profiles, cost_book, cost_choice_or_file
from foreplan.cost_models.costs import CostBook
from foreplan.datasets.storage import (
    exclusive,
    refuse_overwriting,
    refuse_twice,
    refuse_unwritable,
    write_atomically,
)
from foreplan.errors import VerificationError
from foreplan.planner.plan import CHOSEN, Plan, load_plan
from foreplan.planner.plan_paths import folder_of
from foreplan.planner.registry import planner
from foreplan.planner.report.files import timelines, write_report
from foreplan.planner.report.sketch_tables import sketch_tables
from foreplan.planner.report.tables import verification_tables
from foreplan.planner.report.trace import render_trace
from foreplan.planner.steps import told_steps
from foreplan.planner.verify.paths import check_paths
from foreplan.planner.verify.session import problem_of
from foreplan.planner.verify.verify import VerificationRun, verify

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def verify_command(
    path: Path,
    output: Path,
    *,
    tolerance: float | None,
    rounds: int,
    thorough: bool,
    only: Collection[str] | None,
    trace: Path | None,
    report: Path | None,
    rdzv_endpoint: str | None,
    host: str | None,
    dry_run: bool,
    trust_paths: bool,
    as_json: bool,
    console: Console,
    show: Callable[[RenderableType], None],
) -> int:
    """Verify the plan in a file.

    Args:
        path: the plan.
        output: where the verification goes.
        tolerance: largest error of the total that passes; the plan's own if ``None``.
        rounds: timed runs of each decision.
        thorough: also run random decisions predicted to be close.
        only: names of alternatives to run beside the chosen plan; all if ``None``.
        trace: where the Chrome trace goes, if anywhere.
        report: where the HTML report goes, if anywhere.
        rdzv_endpoint: ``HOST:PORT`` where several hosts meet.
        host: which host of the cluster this one is.
        dry_run: say what would run, and start nothing.
        trust_paths: read profiles, texts and tables outside of the plan's folder too.
        as_json: print the document on stdout, and nothing else there.
        console: hears progress.
        show: prints the tables.

    Returns:
        The exit code: 0, or 5 where the run is outside the tolerance or computes something else.

    Raises:
        ForeplanError: as `foreplan.planner.verify.verify.verify`; another process verifies into the
            same output; the plan names files outside of its folder.
    """
    for file in (output, trace, report):
        if file is not None:
            refuse_overwriting(file, path)
    refuse_twice(output, trace, report)
    plan = load_plan(path)
    # What would fail after the run is refused before it.
    for file in (trace, report):
        if file is not None:
            refuse_unwritable(file)
    if not trust_paths:
        check_paths(plan, folder_of(path), profiles=thorough)
    # Hosts that meet may share a folder; and a path that cannot be written is found before the run.
    shared = rdzv_endpoint is not None or dry_run
    alone = contextlib.nullcontext() if shared else exclusive(output, file=True)
    with alone, told_steps(console) as say:
        run = verify(
            plan, rounds=rounds, thorough=thorough, tolerance=tolerance, only=only,
            rdzv_endpoint=rdzv_endpoint, host=host, dry_run=dry_run, progress=say,
            costs=_costs(plan) if thorough else None,
            folder=folder_of(path), trust_paths=True,  # as checked above, with the costs
        )  # fmt: skip
        if run.document is not None:
            run.document.save(output)
    if run.document is None:
        _show_sketch(run, rounds, as_json, show)
        return 0
    written = [output]
    if trace is not None:
        predicted, measured = timelines(plan, run.document)
        write_atomically(trace, render_trace(predicted, measured))
        written.append(trace)
    if report is not None:
        written += write_report(plan, report, verification=run.document)
    if as_json:
        print(run.document.to_json(), end="")
    else:
        show(verification_tables(run.document, plan))
        console.print("wrote " + ", ".join(str(file) for file in written))
    return 0 if run.document.passed else VerificationError.exit_code


def _costs(plan: Plan) -> CostBook:
    """The cost book that the plan was made with."""
    chosen = planner(plan.kind)
    given = chosen.given(problem_of(plan, chosen).workload)
    profiles = Profiles.of(plan.cluster, Path())
    return cost_book(
        plan.cluster, profiles, cost_choice_or_file(plan.provenance.costs), given=given,
        issued=chosen.issues,
    )  # fmt: skip


def _show_sketch(
    run: VerificationRun, rounds: int, as_json: bool, show: Callable[[RenderableType], None]
) -> None:
    found = sketch(run, rounds)
    if as_json:
        print(json.dumps(found))
    else:
        show(sketch_tables(found))


def sketch(run: VerificationRun, rounds: int) -> dict[str, Any]:
    """What a dry run would have started, as JSON.

    Candidates stay loaded side by side, so that their memory adds up; each runs once to warm up
    and then ``rounds`` times. Starting, loading and the comparison with one process come on top.
    Of a chosen decision that can run from this host, alternatives that cannot are not in the sums.
    """
    processes = [
        dataclasses.asdict(dataclasses.replace(p, environment=dict(p.environment)))
        for p in run.processes
    ]
    candidates: dict[str, dict[str, Any]] = {}
    for process in run.processes:
        seconds = None if process.predicted_s is None else process.predicted_s * (rounds + 1)
        one = candidates.setdefault(
            process.candidate,
            {
                "name": process.candidate, "processes": 0, "memory_bytes": 0,
                "expected_s": seconds, "refused": run.refused.get(process.candidate),
            },
        )  # fmt: skip
        one["processes"] += 1
        one["memory_bytes"] += process.memory_bytes
    counted = [
        one for one in candidates.values() if CHOSEN in run.refused or one["refused"] is None
    ]
    return {
        "rounds": rounds,
        "expected_s": sum(one["expected_s"] or 0.0 for one in counted),
        "memory_bytes": sum(one["memory_bytes"] for one in counted),
        "candidates": list(candidates.values()),
        "processes": processes,
    }
