"""The same steps on ranks that are real processes, through the runtime and gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bubble_cases as cases
import pytest

from foreplan.planner.base import Agreement
from foreplan.planner.bubbles.execution.reference import single_process_step
from foreplan.planner.bubbles.execution.report import compare_steps
from foreplan.planner.bubbles.execution.step_sizes import StepSizes

VIT, AUDIO = cases.encoder(), cases.encoder("audio", frozen=True)
DEEP = {"backbone": cases.BACKBONE | {"layers": 8}}

TWO: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "1f1b": ((2, [VIT]), {"encoder_ranks": [[[0], [1]]]}),
    "gpipe": ((2, [VIT]), {"encoder_ranks": [[[1, 0]]]}),
    "interleaved-1f1b": ((2, [VIT, AUDIO]), {"encoder_ranks": [[[0], [1]], [[1]]], "chunks": 2}),
    "zb-h1": ((2, [VIT]), {"encoder_ranks": [[[0], [1]]]}),
    "1f1b three-phase": ((2, [VIT]), {"encoder_ranks": [[[0], [1]]], "fill": "three-phase"}),
    "1f1b unfilled": ((2, [VIT]), {"encoder_ranks": [[[0]]]}),
}
FOUR: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "1f1b": ((4, [VIT]), {"encoder_ranks": [[[0], [1], [2], [3]]]}),
    "gpipe": ((4, [VIT, AUDIO]), {"encoder_ranks": [[[0, 1], [2, 3]], [[2], [3]]]}),
    "interleaved-1f1b": ((4, [VIT]), {"encoder_ranks": [[[0, 1], [2, 3]]], "chunks": 2}),
}


@pytest.mark.serial
@pytest.mark.parametrize(("ranks", "table"), [(2, TWO), (4, FOUR)])
def test_processes_agree_with_one_process(ranks: int, table: Any, tmp_path: Path) -> None:
    made = {}
    for name, ((count, encoders), options) in table.items():
        fields = {"microbatches": 2 * count} | DEEP
        problem = cases.problem(count, encoders, **fields)
        decision = cases.decision(problem, name.split()[0], ranks=count, **options)
        made[name] = (problem, decision, {
            "problem": [[count, encoders], fields], "decision": decision.model_dump(mode="json")
        })  # fmt: skip
    for (name, (problem, decision, _)), found in zip(
        made.items(), run(ranks, [m[2] for m in made.values()], tmp_path), strict=True
    ):
        agreed = compared(problem, decision, found)
        assert agreed.passed, (name, agreed.details)
        # Of two replicas' sums the order does not matter; of four it is gloo's.
        replicas = max(len(rows) for rows in options_rows(table[name]))
        assert agreed.exact or replicas > 2, (name, agreed.details)
        assert agreed.details["largest_gradient_difference"] < 1e-5


@pytest.mark.serial
def test_torchs_own_pipeline_gives_the_same_gradients(tmp_path: Path) -> None:
    problem = cases.problem(2, [VIT], **DEEP)
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]])
    job = {"problem": [[2, [VIT]], DEEP], "decision": decision.model_dump(mode="json")}
    jobs = [job | {"stock": "1f1b"}, job | {"stock": "gpipe"}, job]
    stock, breadth_first, ours = run(2, jobs, tmp_path)
    for found in (stock, breadth_first, ours):
        agreed = compared(problem, decision, found)
        assert agreed.passed, agreed.details
        assert agreed.details["largest_gradient_difference"] < 1e-5
        assert agreed.details["losses"] == 4


def options_rows(entry: tuple[Any, dict[str, Any]]) -> list[Any]:
    rows: list[Any] = entry[1]["encoder_ranks"]
    return rows


def compared(problem: Any, decision: Any, ranks: list[dict[str, Any]]) -> Agreement:
    merged: dict[str, Any] = {}
    for found in ranks:
        for key, value in found.items():
            assert merged.setdefault(key, value) == value, f"ranks disagree about {key}"
    return compare_steps(merged, single_process_step(StepSizes.of(problem, decision), decision))


def run(ranks: int, jobs: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank reports of each job."""
    path = folder / "jobs.json"
    path.write_text(json.dumps({"ranks": ranks, "cases": jobs}))
    here = Path(__file__).parent
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(here / "rank_process.py"), str(path)], env=environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = [json.loads((folder / f"result.{r}.json").read_text()) for r in range(ranks)]
    return [[part[k] for part in parts] for k in range(len(jobs))]
