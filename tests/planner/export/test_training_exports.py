"""Bubble plans for torchtitan and Megatron-LM: flags, orders, and what neither has words for."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

import foreplan
from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import parse_order
from foreplan.planner.export import export_plan
from foreplan.planner.plan import Plan

DIMS = {"hidden": 256, "heads": 4}


def made(**fields: Any) -> Plan:
    workload: dict[str, Any] = {
        "encoders": [{"name": "vit", "dims": DIMS | {"layers": 4}, "tokens": 64}],
        "backbone": DIMS | {"layers": 8, "vocab": 100}, "sequence_length": 128, "microbatch": 2,
        "microbatches": 4, "plan": {"pp": 2, "chunks": 2, "dp": 2},
    }  # fmt: skip
    return foreplan.plan("bubbles", None, "4xh200", workload | fields, costs="roofline")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return made()


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_orders_and_units_are_the_plans(plan: Plan, target: str, tmp_path: Path) -> None:
    written = export_plan(plan, target, tmp_path)  # reads back and compares
    assert any("encoder" in line for line in written.not_expressed)
    rows = list(csv.reader(io.StringIO(written.files["order.csv"])))
    for row, order in zip(rows, plan.decision["orders"], strict=True):
        assert row == [step.word for step in parse_order(order) if step.encoder < 0]
    units = list(csv.reader(io.StringIO(written.files["encoder_units.csv"])))[1:]
    inserted = sum(step.encoder >= 0 for o in plan.decision["orders"] for step in parse_order(o))
    assert len(units) == inserted > 0


def test_flags_say_the_layout(plan: Plan, tmp_path: Path) -> None:
    titan = export_plan(plan, "torchtitan", tmp_path).files["launch.sh"]
    for words in ("pipeline_parallel_degree 2", "pipeline_parallel_layers_per_stage 2",
                  "pipeline_parallel_schedule_csv order.csv", "global_batch_size 16"):  # fmt: skip
        assert words in titan
    megatron = export_plan(plan, "megatron", tmp_path).files["launch.sh"]
    assert "--pipeline-model-parallel-layout 'Et*2|t*2|t*2|t*2L'" in megatron
    assert "--nproc-per-node=4" in megatron
    assert "--use-distributed-optimizer" in megatron
    assert "--recompute-granularity selective" in megatron


def test_the_order_is_one_that_torch_takes(plan: Plan, tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _validate_schedule

    rows = csv.reader(io.StringIO(export_plan(plan, "torchtitan", tmp_path).files["order.csv"]))
    from torch.distributed.pipelining.schedules import _Action

    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    _validate_schedule(actions, 2, 4, 4)
    assert _PipelineScheduleRuntime is not None


def test_what_a_target_cannot_say_is_refused(tmp_path: Path) -> None:
    serving = foreplan.plan(
        "serving", "llama-3.2-1b", "a100-80g,2xl4",
        {"batch": 8, "prompt_tokens": 128, "new_tokens": 16}, costs="roofline",
    )  # fmt: skip
    for target in ("torchtitan", "megatron"):
        with pytest.raises(SpecError, match=r"plan\.kind: got 'serving', expected bubbles"):
            export_plan(serving, target, tmp_path)
    uneven = made(backbone=DIMS | {"layers": 4, "vocab": 60000}, plan={"pp": 2})
    if len({s["end"] - s["start"] for s in uneven.decision["stages"]}) > 1:
        with pytest.raises(SpecError, match="as many in every stage"):
            export_plan(uneven, "torchtitan", tmp_path)
        assert "Et*" in export_plan(uneven, "megatron", tmp_path).files["launch.sh"]
