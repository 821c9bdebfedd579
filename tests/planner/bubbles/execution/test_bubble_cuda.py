"""Steps on GPUs: one GPU in one process, ranks over NCCL, which share a GPU where there is one.

Shared, NCCL sends over sockets, so that nothing is said of times and of messages between GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bubble_cases as cases
import pytest
import torch

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.timing.worker_environment import worker_environment
from foreplan.planner.bubbles.execution.entry import compare_steps, reference_step
from foreplan.planner.bubbles.execution.one_process import OneProcess
from foreplan.planner.bubbles.execution.profile import layer_times, profile_step

#: Torch's threads of gradients have no context before their first kernel; it then says so.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_one = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")

#: Head widths that flash attention takes, and work enough for its kernels.
SIZES = {
    "backbone": {"layers": 4, "hidden": 256, "heads": 4, "gated": True, "vocab": 1000},
    "sequence_length": 192,
}
VIT = cases.encoder() | {
    "dims": {"layers": 4, "hidden": 128, "heads": 2}, "tokens": 64, "patch_features": 48
}  # fmt: skip


def problem_of(ranks: int, **fields: Any) -> Any:
    return cases.problem(ranks, [VIT], gpu=True, **(SIZES | fields))


@needs_one
@pytest.mark.parametrize("mode", ["reference", "fast"])
@pytest.mark.parametrize(
    ("schedule", "chunks", "recompute"),
    [("1f1b", 1, "selective"), ("1f1b", 1, "full"), ("interleaved-1f1b", 2, "selective"),
     ("zb-h1", 1, "selective")],
)  # fmt: skip
def test_one_gpu_computes_what_one_process_does(
    schedule: str, chunks: int, recompute: str, mode: str
) -> None:
    problem = problem_of(2, recompute=recompute)
    decision = cases.decision(problem, schedule, ranks=2, chunks=chunks, encoder_ranks=[[[0], [1]]])
    process = OneProcess(
        cases.schedule_of(problem, decision), cases.kernels_of(problem, decision, mode)
    )
    process.step()
    agreed = compare_steps(process.result(), reference_step(problem, decision, mode=mode))
    print(schedule, mode, agreed)
    assert agreed.passed, agreed.details


@needs_one
def test_a_profile_of_a_gpu() -> None:
    problem = problem_of(2, recompute="full")
    decision = cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]])
    kernels = cases.kernels_of(problem, decision, "fast")
    device = torch.device("cuda")
    profile = profile_step(cases.schedule_of(problem, decision), decision, kernels, device)
    print(json.dumps(profile.document()))
    assert all(timing.median_s > 0.0 for timing in profile.timings.values())
    times = layer_times(problem, decision, device, torch.bfloat16)
    print(times)
    assert times["backbone"][1].median_s > times["backbone"][0].median_s > 0.0


#: Schedule, fields of the workload, pipeline ranks, ranks of the encoder's pipelines, options.
ON_TWO = (
    ("1f1b", {}, 2, [[[0], [1]]], {}),
    ("interleaved-1f1b", {}, 2, [[[0, 1]]], {"chunks": 2}),
    ("zb-h1", {"sharded_optimizer": False}, 2, [[[1], [0]]], {}),
    ("gpipe", {"sharded_optimizer": False}, 1, [[[0]]], {"tp": 2}),
)
ON_FOUR = (
    ("1f1b", {}, 4, [[[0], [1], [2], [3]]], {}),
    ("1f1b", {}, 4, [[[0, 1], [2, 3]]], {}),
    ("1f1b", {}, 4, [[[0], [1], [2], [3]]], {"fill": "three-phase"}),
    ("1f1b", {"sharded_optimizer": False}, 2, [[[0], [1]]], {"tp": 2}),
)


def run_gpus(gpus: int, run: list[dict[str, Any]], folder: Path) -> list[list[Any]]:
    """What each rank found of each case."""
    (folder / "jobs.json").write_text(json.dumps({"ranks": gpus, "gpu": True, "cases": run}))
    script = Path(__file__).parent / "rank_process.py"
    environment = worker_environment(DeviceName.parse("cuda:0")) | {"NCCL_NVLS_ENABLE": "0"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "jobs.json")], capture_output=True, text=True,
        env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"result.{r}.json").read_text()) for r in range(gpus)]


@pytest.mark.parametrize("mode", ["reference", "fast"])
@pytest.mark.parametrize(
    ("gpus", "table"),
    [
        pytest.param(2, ON_TWO, marks=needs_one),
        pytest.param(4, ON_FOUR, marks=needs_one),
    ],
)
def test_gpus_over_nccl(gpus: int, table: Any, mode: str, tmp_path: Path) -> None:
    made: list[tuple[str, Any, Any, dict[str, Any]]] = []
    for name, fields, ranks, rows, options in table:
        problem = problem_of(gpus, **fields)
        decision = cases.decision(problem, name, ranks=ranks, encoder_ranks=rows, **options)
        case = {
            "problem": [[gpus, [VIT]], SIZES | fields | {"gpu": True}], "mode": mode,
            "decision": decision.model_dump(mode="json"),
        }  # fmt: skip
        made.append((name, problem, decision, case))
    parts = run_gpus(gpus, [case for *_, case in made], tmp_path)
    for k, (name, problem, decision, _) in enumerate(made):
        merged = {key: value for part in parts for key, value in part[k].items()}
        agreed = compare_steps(merged, reference_step(problem, decision, mode=mode))
        print(name, mode, agreed)
        assert agreed.passed, (name, agreed.details)


@needs_one
@pytest.mark.parametrize("mode", ["reference", "fast"])
@pytest.mark.parametrize("sharded", [True, False])
def test_orders_change_between_steps(mode: str, sharded: bool, tmp_path: Path) -> None:
    fields = {"microbatches": 4, "sharded_optimizer": sharded}
    problem, steps = problem_of(2, **fields), 5
    decisions = [
        cases.decision(problem, "1f1b", ranks=2, encoder_ranks=[[[0], [1]]], **order)
        for order in ({"fill": "three-phase"}, {"fill": "fine", "turn": 1}, {"shuffle": 3})
    ]
    assert len({decision.orders for decision in decisions}) == len(decisions)
    case = {
        "problem": [[2, [VIT]], SIZES | fields | {"gpu": True}], "mode": mode, "steps": steps,
        "decisions": [one.model_dump(mode="json") for one in decisions], "resets": True,
        "closes": True,
    }  # fmt: skip
    ranks = [found for (found,) in run_gpus(2, [case], tmp_path)]
    for step in range(steps):
        merged = {k: v for rank in ranks for k, v in rank["results"][step].items()}
        expected = reference_step(problem, decisions[step % len(decisions)], mode=mode)
        loss = sum(value for name, value in expected.items() if name.startswith("loss "))
        assert [rank["losses"][step] for rank in ranks] == pytest.approx([loss, loss], rel=0.01)
        if mode == "reference":  # a new order in fast mode is recorded, on gradients of zero
            agreed = compare_steps(merged, expected)
            print(step, mode, agreed)
            assert agreed.passed, (step, agreed.details)
    for rank in ranks:
        print(rank["counts"])
        groups = [count["groups"] for count in rank["counts"]]
        assert groups == groups[:1] * len(groups)
