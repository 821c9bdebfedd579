"""Bubble plans for torchtitan and Megatron-LM: flags, orders, and what neither has words for."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import foreplan
from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import parse_order
from foreplan.planner.export import export_plan
from foreplan.planner.plan import Plan

DIMS = {"hidden": 256, "heads": 4}


def made(cluster: Any = "4xh200", **fields: Any) -> Plan:
    workload: dict[str, Any] = {
        "encoders": [{"name": "vit", "dims": DIMS | {"layers": 4}, "tokens": 64}],
        "backbone": DIMS | {"layers": 8, "vocab": 100}, "sequence_length": 128, "microbatch": 2,
        "microbatches": 4, "plan": {"pp": 2, "chunks": 2, "dp": 2},
    }  # fmt: skip
    if not isinstance(cluster, str):
        cluster = foreplan.Cluster.model_validate(cluster)
    return foreplan.plan("bubbles", None, cluster, workload | fields, costs="roofline")


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
"global_batch_size 16"):  # fmt: skip
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


def test_torchtitan_is_told_what_it_would_choose_otherwise(plan: Plan, tmp_path: Path) -> None:
    """It counts embedding and head as layers, and has its own batch, unless it is told."""
    titan = export_plan(plan, "torchtitan", tmp_path).files["launch.sh"]
    for words in ("first_stage_less_layers 0", "last_stage_less_layers 0", "local_batch_size 8",
                  "seq_len 128", "schedule PipelineScheduleMulti", "nproc-per-node=4",
                  '"$(dirname "$0")/order.csv"', "shard_degree 2",
                  "replicate_degree 1"):  # fmt: skip
        assert words in titan, words
    single = made(plan={"pp": 2, "dp": 2}, sharded_optimizer=False)
    titan = export_plan(single, "torchtitan", tmp_path).files["launch.sh"]
    for words in ("schedule PipelineScheduleSingle", "shard_degree 1", "replicate_degree 2"):
        assert words in titan, words
    alone = made(plan={"dp": 4})  # no pipeline: gradients of micro-batches are accumulated
    titan = export_plan(alone, "torchtitan", tmp_path).files["launch.sh"]
    assert "local_batch_size 2 " in titan
    assert "global_batch_size 32" in titan


def test_torchtitan_is_told_what_it_computes_again_behind_all_flags(
    plan: Plan, tmp_path: Path
) -> None:
    """A subcommand there, which takes no flag of another group behind it, and no flag ``mode``."""
    script = export_plan(plan, "torchtitan", tmp_path).files["launch.sh"]
    assert script.endswith('"$@" activation-checkpoint:none\n')
    assert "--training.disable_cuda_graphs " in script  # it refuses them beside a pipeline
    assert "activation_checkpoint.mode" not in script
    full = export_plan(made(recompute="full"), "torchtitan", tmp_path).files["launch.sh"]
    assert full.endswith('"$@" activation-checkpoint:full\n')
    alone = export_plan(made(plan={"dp": 4}), "torchtitan", tmp_path).files["launch.sh"]
    assert "cuda_graphs" not in alone


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_torchtitans_own_parser_takes_the_flags(recompute: str, tmp_path: Path) -> None:
    config = pytest.importorskip("torchtitan.config", reason="torchtitan is not installed")
    pytest.importorskip("torchtitan.models.llama3.config_registry", reason="parts of it lack")
    (tmp_path / "torchrun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "torchrun").chmod(0o755)
    export_plan(made(recompute=recompute), "torchtitan", tmp_path / "out")
    shown = subprocess.run(
        ["bash", tmp_path / "out/launch.sh", "--module", "llama3", "--config", "llama3_debugmodel"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = shown.stdout.splitlines()
    read = config.ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    assert read.parallelism.pipeline_parallel_degree == 2
    assert read.parallelism.data_parallel_shard_degree == 2
    assert Path(read.parallelism.pipeline_parallel_schedule_csv).is_file()
    assert (read.activation_checkpoint is None) == (recompute == "none")


def test_unlike_stages_are_lists_of_modules_for_torchtitan(tmp_path: Path) -> None:
    wide = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 60000}
    uneven = made(backbone=wide, plan={"pp": 4}, sequence_length=1024)
    layers = [s["end"] - s["start"] for s in uneven.decision["stages"]]
    assert len(set(layers)) > 1  # the head is worth several layers
    written = export_plan(uneven, "torchtitan", tmp_path)
    assert any("module_parts.json" in line for line in written.not_expressed)
    assert "layers_per_stage" not in written.files["launch.sh"]
    parts = json.loads(written.files["module_parts.json"])
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == layers
    assert parts[0][0] == "tok_embeddings"
    assert parts[-1][-2:] == ["norm", "lm_head"]
    names = [name for part in parts for name in part]
    assert names[1:-2] == [f"layers.{k}" for k in range(8)]
    assert "Et*" in export_plan(uneven, "megatron", tmp_path).files["launch.sh"]


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_processes_are_those_of_a_host(target: str, tmp_path: Path) -> None:
    """Two hosts of two: ``--nproc-per-node`` is not all four."""
    devices = [{"name": "h200", "host": host, "count": 2} for host in ("one", "two")]
    links = [("one", "host", 4e11), ("two", "host", 4e11), ("all", "network", 5e10)]
    tiers = [
        {"group": [group], "scope": scope, "latency_s": 1e-5, "bandwidth_bytes_per_s": rate,
         "source": "stated"}
        for group, scope, rate in links
    ]  # fmt: skip
    two = made(cluster={"devices": devices, "tiers": tiers})
    text = export_plan(two, target, tmp_path).files["launch.sh"]
    assert "--nnodes=2 --nproc-per-node=2" in text
    assert "on each of one, two, in this order with PET_NODE_RANK=0, 1" in text
    devices[1]["count"] = 3
    unlike = made(cluster={"devices": devices, "tiers": tiers}, plan={"dp": 5}, microbatches=4)
    text = export_plan(unlike, target, tmp_path).files["launch.sh"]  # read back: dp 5
    assert "PET_NPROC_PER_NODE=2, 3" in text
    assert "--nproc-per-node" not in text
    turned = made(
        cluster={"devices": devices, "tiers": tiers},
        plan={"pp": 5, "device_order": (2, 3, 4, 0, 1)},
        sequence_length=1024,
        backbone={"layers": 10, "hidden": 1024, "heads": 8, "vocab": 100},
    )
    text = export_plan(turned, target, tmp_path).files["launch.sh"]
    assert "on each of two, one, in this order" in text
    assert "PET_MASTER_ADDR=two; PET_NPROC_PER_NODE=3, 2" in text


def test_units_inside_of_passes_are_told_by_half_layers(tmp_path: Path) -> None:
    """Lanes: what the plan computes beside collectives of the backbone has a place in the table."""
    lanes = made(
        "4xt4", backbone={"layers": 8, "hidden": 1024, "heads": 8, "vocab": 1000},
        encoders=[{"name": "vit", "dims": DIMS | {"layers": 4}, "tokens": 64}],
        sequence_length=1024, plan={"pp": 2, "tp": 2, "chunks": 2},
    )  # fmt: skip
    assert any(":" in order for order in lanes.decision["orders"])
    for target in ("torchtitan", "megatron"):
        files = export_plan(lanes, target, tmp_path).files  # reads back and compares
        units = list(csv.DictReader(io.StringIO(files["encoder_units.csv"])))
        inside = [unit for unit in units if int(unit["pieces"])]
        assert inside
        assert all(0 < int(unit["piece"]) < int(unit["pieces"]) for unit in inside)
        assert ":" not in files["order.csv"]
