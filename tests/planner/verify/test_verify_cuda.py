"""Real processes on GPUs: NCCL between two, gloo between a GPU and the processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foreplan.planner.plan import Plan
from foreplan.planner.verify.verify import verify

MakePlan = Callable[..., Plan]


def gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


needs_two = pytest.mark.skipif(gpus() < 2, reason="needs two GPUs, one a rank: NCCL shares none")
needs_one = pytest.mark.skipif(gpus() < 1, reason="needs a GPU")


def check(plan: Plan) -> None:
    said: list[str] = []
    run = verify(plan, rounds=3, progress=said.append)
    document = run.document
    assert document is not None
    print(document.summary)
    assert [(a.mode, a.exact) for a in document.agreement] == [("reference", True), ("fast", True)]
    assert document.chosen.failure is None
    for timeline in run.timelines["chosen"]:
        for i, action in enumerate(timeline.schedule):
            for needed in action.dependencies:
                assert timeline.start_s[i] >= timeline.end_s[needed] - 2e-5, action
    if run.timeline is not None:
        print(run.timeline.to_frame().to_string())
    for phase in document.chosen.ranks[0].phases:
        print(phase)


@needs_two
def test_two_gpus_over_nccl(make_plan: MakePlan) -> None:
    devices = [{"name": "cuda:0"}, {"name": "cuda:1"}]
    check(make_plan(devices=devices, backend="nccl", tolerance=50.0, collectives=True))


@needs_two
def test_two_slices_over_nccl(make_plan: MakePlan) -> None:
    devices = [{"name": "cuda:0/sms=32"}, {"name": "cuda:1/sms=64"}]
    plan = make_plan(
        {"cap_bytes": 1 << 30}, {"slow": {"slow": 2.0, "cap_bytes": 1 << 30}}, devices=devices,
        backend="nccl", tolerance=50.0,
    )  # fmt: skip
    check(plan)


@needs_two
def test_a_gpu_that_runs_out_of_its_cap_is_named(make_plan: MakePlan) -> None:
    devices = [{"name": "cuda:0"}, {"name": "cuda:1"}]
    plan = make_plan(
        alternatives={"big": {"die": "memory", "cap_bytes": 64 << 20}, "dies": {"die": "exit"}},
        devices=devices, backend="nccl", tolerance=50.0,
    )  # fmt: skip
    run = verify(plan, rounds=2, timeout_s=20.0)
    assert run.document is not None
    by_name = {c.name: c for c in run.document.candidates}
    assert "rank 1 (localhost/cuda:1)" in str(by_name["big"].failure)
    assert "out of memory" in str(by_name["big"].failure)
    assert "exited with code 7" in str(by_name["dies"].failure)
    assert by_name["chosen"].failure is None


@needs_one
def test_a_gpu_and_a_processor_over_gloo(make_plan: MakePlan) -> None:
    devices = [{"name": "cuda:0"}, {"name": "cpu:threads=1"}]
    check(make_plan(devices=devices, tolerance=50.0, collectives=True))
