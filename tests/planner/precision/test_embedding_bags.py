"""Bags of embeddings in a training step: priced as look-ups and sums, timed, run."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import foreplan
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.kernels.cold_operands import InTurn
from foreplan.datasets.kernels.training_runnable import training_call
from foreplan.errors import SpecError
from foreplan.planner.precision.execution.decisions import uniform_decision
from foreplan.planner.precision.execution.experiment import simulate_training, train
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.spec import PrecisionWorkload


class Ads(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(500, 64, **options)
        self.hidden = nn.Linear(64, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, ids: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor:
        found = self.words(ids) if scores is None else self.words(ids, None, scores)
        return self.out(torch.relu(self.hidden(found)))


class Task:
    name = "ads"

    def __init__(self, **options: object) -> None:
        self.options = options

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return Ads(**self.options)

    def batch(self, step: int, rank: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        random = torch.Generator().manual_seed(1000 + step * 8 + rank)
        draw = {"generator": random}
        return (torch.randint(500, (8, 12), **draw),), torch.randint(10, (8,), **draw)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)


def build(*_: object) -> Task:
    """What a package's entry point names."""
    return Task()


def test_real_ranks_train_a_bag_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "ads-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ads\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[foreplan.networks]\nads = {Path(__file__).stem}:build\n"
    )
    for place in (tmp_path, Path(__file__).parent):
        monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    work = PrecisionWorkload(network="ads", batch=8)
    decision = uniform_decision(Task(), work, ["bf16", "fp32"])
    core = DeviceName.parse("cpu:threads=1")
    run = train(work, decision, [core, core], steps=2, validation_batches=0, timeout_s=120.0)
    alone = simulate_training(work, decision, steps=2, validation_batches=0)
    assert [rank.losses for rank in run.ranks] == [rank.losses for rank in alone.ranks]
    assert run.ranks[0].losses != run.ranks[1].losses


@pytest.mark.parametrize("mode", ["mean", "max"])
def test_a_network_with_a_bag_is_planned(mode: str) -> None:
    with foreplan.register_network("ads", lambda *_: Task(mode=mode)):
        plan = foreplan.plan(
            "precision", None, "2xt4", {"network": "ads", "batch": 8}, costs="roofline"
        )
    assert set(plan.decision["workers"][0]["operators"]) == {"hidden", "out"}
    assert "embedding" in " ".join(plan.predicted.ranks[0].cause_s)
    module = foreplan.apply_precision(Task(mode=mode).module(), plan, 1)
    assert torch.isfinite(module(*Task().batch(0, 1)[0])).all()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_bag_reads_every_row_and_writes_one_a_bag(direction: str) -> None:
    node = next(o.node for o in TrainingGraph.of(Task()).operators if o.node.op == "embedding")
    from foreplan.datasets.kernels.training_programs import dependent_program

    work = dependent_program(direction, node, "fp32")
    assert work.dims == {"rows": 96, "bags": 8, "vocab": 500, "cols": 64}
    assert work.bytes == (2 if direction == "backward" else 1) * 4 * (96 + 8) * 64
    call = training_call(work, "cpu")
    assert isinstance(call, InTurn)
    call()


def test_a_capture_counts_the_rows_that_are_read() -> None:
    node = next(o.node for o in TrainingGraph.of(Task()).operators if o.node.op == "embedding")
    ids = 96 * 8
    assert node.bytes == ids + 4 * 64 * (96 + 8)
    assert node.flops == 96 * 64


def test_a_prediction_scatters_the_gradient_of_every_row() -> None:
    inputs = Task().batch(0, 0)[0]
    bag = foreplan.predict_latency(
        Ads(), "t4", inputs=inputs, phase="training", costs="roofline"
    ).steps
    dims = {s.part: s.work.dims for s in bag if s.target == "aten.embedding_bag"}
    assert dims["forward"] == {"rows": 96, "cols": 64}
    assert dims["backward"] == {"rows": 96, "vocab": 500, "cols": 64}


def test_scores_of_samples_in_bf16_meet_the_table_in_fp32() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 12)
            self.ads = Ads(mode="sum")

        def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return self.ads(ids, self.score(x))

    from foreplan.planner.precision.execution.modules import apply_variants

    torch.manual_seed(0)
    module, ids, x = Scored(), torch.randint(500, (8, 12)), torch.randn(8, 4)
    exact = module(ids, x).detach()
    apply_variants(module, {"score": "fp32/bf16/torch.linear"})
    rough = module(ids, x)
    rough.sum().backward()
    assert 0 < math.dist(rough.flatten().tolist(), exact.flatten().tolist()) < 0.1


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(SpecError, match=r"ads: words\.sparse: got True, expected False"):
        TrainingGraph.of(Task(sparse=True))
