"""What a compiled pass runs, beside the eager one, and what it costs on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from foreplan.cli import app
from foreplan.cost_models.lowering.fused_program import FUSED, fused_parts
from foreplan.cost_models.lowering.graph_programs import lower, lower_compiled, programs
from foreplan.cost_models.lowering.graph_step import Phase, Step
from foreplan.cost_models.lowering.step_store import stored_steps
from foreplan.cost_models.ranking import rank_devices
from foreplan.cost_models.replay import predict_latency
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.program import CHANNELS_LAST, Program
from foreplan.errors import SpecError


def _images(first: int = 64, last: int = 128, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(first, last, 3, padding=1, groups=groups), nn.BatchNorm2d(last), nn.ReLU(),
        nn.Conv2d(last, last, 1), nn.BatchNorm2d(last), nn.ReLU(),
    )  # fmt: skip


def _steps(
    module: nn.Module, shape: tuple[int, ...], phase: Phase
) -> tuple[list[Step], list[Step]]:
    training = phase == "training"
    graph = capture(module.train(training), (torch.zeros(shape),), eager=True, training=training)
    return lower(graph, phase), lower_compiled(graph, phase)


def _of(steps: list[Step], *ops: str) -> list[Program]:
    return [s.work for s in steps if isinstance(s.work, Program) and s.work.op in ops]


@pytest.mark.parametrize("phase", ["inference", "training"])
def test_calls_of_libraries_loss_and_update_stay(phase: Phase) -> None:
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 32))
    eager, compiled = _steps(module, (128, 64), phase)
    for ops in (("linear",), ("adamw",), ("softmax", "fill")):
        assert sorted(map(str, _of(compiled, *ops))) == sorted(map(str, _of(eager, *ops)))
    assert not _of(compiled, "norm", "norm_gradient", "activation")
    assert len(_of(compiled, FUSED)) == (1 if phase == "inference" else 3)
    parts = [step.part for step in compiled]
    order = ["forward", "loss", "backward", "optimizer"]
    assert parts == sorted(parts, key=order.index)


@pytest.mark.parametrize(
    ("module", "channels", "phase", "last"),
    [
        (_images(), 64, "inference", True),
        (_images(), 64, "training", True),
        # Groups of several channels are slower so, and training leaves them alone.
        (_images(64, 64, 8), 64, "training", False),
        # Fewer channels out than half of those in: training leaves them alone, too.
        (_images(256, 64), 256, "inference", True),
        (_images(256, 64), 256, "training", False),
        (_images(16, 16), 16, "training", False),
    ],
)  # fmt: skip
def test_images_lie_channels_last_where_the_compiler_decides_so(
    module: nn.Module, channels: int, phase: Phase, last: bool
) -> None:
    _, compiled = _steps(module, (4, channels, 16, 16), phase)
    found = _of(compiled, "conv")
    assert found
    assert {CHANNELS_LAST in work.variant.kernel for work in found} == {last}
    # The bias is added by the next kernel, and weights of several pixels are laid out anew.
    assert any("_bias" in work.variant.kernel for work in found) == (not last)
    copies = [step for step in compiled if step.kind == "copy"]
    assert len(copies) == (1 if last else 0)


def test_a_table_of_gradients_is_filled_and_added_to_as_eagerly() -> None:
    module = nn.Sequential(nn.Embedding(5000, 64), nn.GELU(), nn.Linear(64, 32))
    graph = capture(module.train(), (torch.zeros(8, 64, dtype=torch.int64),), eager=True,
                    training=True)  # fmt: skip
    eager, compiled = lower(graph, "training"), lower_compiled(graph, "training")
    of_table = [[s.work for s in steps if s.part == "backward" and s.kind == "embedding"]
                for steps in (eager, compiled)]  # fmt: skip
    assert of_table[0] == of_table[1] != []
    assert not [s for s in compiled if s.part == "forward" and s.kind == "embedding"]


@pytest.mark.parametrize(("rows", "padded"), [(4096, True), (4, False)])
def test_large_products_of_odd_widths_are_padded(rows: int, padded: bool) -> None:
    """StableLM's MLP of 5,461 features took half of its eager time on an H200."""
    module = nn.Linear(512, 1365).to(torch.bfloat16)
    graph = capture(module, (torch.zeros(rows, 512, dtype=torch.bfloat16),), eager=True)
    compiled = lower_compiled(graph)
    (product,) = _of(compiled, "linear")
    assert product.dims["n"] == (1368 if padded else 1365)
    copies = [step.work for step in compiled if step.kind == "copy"]
    assert [getattr(work, "bytes", None) for work in copies] == [2 * 1368 * 512 * 2] * padded


def test_parts_move_what_the_kernel_moves() -> None:
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 32))
    _, compiled = _steps(module, (128, 64), "training")
    for item in _of(compiled, FUSED):
        moved = sum(part.bytes * count for part, count in fused_parts(item))
        assert moved == pytest.approx(item.bytes, rel=0.01)


@pytest.mark.parametrize("phase", ["inference", "training"])
def test_compiled_passes_take_less_and_say_so(phase: Phase) -> None:
    module = nn.Sequential(
        nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512)
    )
    x = torch.zeros(8192, 512)
    times = {}
    for execution in ("graph", "compiled"):
        found = predict_latency(module, "h200", inputs=(x,), phase=phase, execution=execution)  # type: ignore[arg-type]
        assert found.execution == execution
        assert not found.unsupported()
        times[execution] = found.latency_s
    assert 0.3 * times["graph"] < times["compiled"] < times["graph"]


def test_a_processor_has_no_compiled_passes() -> None:
    with pytest.raises(SpecError, match="expected a GPU: what is compiled for a CPU is not priced"):
        predict_latency(nn.Linear(8, 8), "epyc_7742", inputs=(torch.zeros(1, 8),),
                        execution="compiled")  # fmt: skip


def test_gpus_that_triton_has_no_code_for_have_none() -> None:
    asked: dict[str, Any] = {"inputs": (torch.zeros(1, 8),), "execution": "compiled"}
    with pytest.raises(SpecError, match=r"got 'compiled on p100_sxm2_16gb'.*capability 7\.0"):
        predict_latency(nn.Linear(8, 8), "p100_sxm2_16gb", **asked)
    assert predict_latency(nn.Linear(8, 8), "v100-32g", **asked).latency_s > 0
    # A ranking leaves such a one out, whether or not it comes first.
    found = rank_devices("opt-125m", ["p100_sxm2_16gb", "t4"], execution="compiled")
    assert [replay.device for replay in found.replays] == ["t4"]
    assert "capability" in found.unpriced["p100_sxm2_16gb"]


def test_steps_on_disk_are_of_one_execution(tmp_path: Path) -> None:
    model = load_model("opt-125m").model_copy(update={"layers": 2})
    asked: dict[str, Any] = {"batch": 1, "tokens": 16, "phase": "inference", "folder": tmp_path}
    fresh = {c: stored_steps(model, compiled=c, **asked) for c in (False, True)}
    again = {c: stored_steps(model, compiled=c, **asked) for c in (False, True)}
    for compiled in (False, True):
        assert (fresh[compiled][1], again[compiled][1]) == (False, True)
        assert again[compiled][0] == fresh[compiled][0]
    assert programs(fresh[False][0]) != programs(fresh[True][0])


def test_the_command_line_ranks_compiled_passes() -> None:
    result = CliRunner().invoke(
        app, ["predict", "opt-125m", "-d", "h200,epyc_7742", "--execution", "compiled"]
    )
    assert result.exit_code == 0
    assert "compiled, as a CUDA graph" in result.stdout
    assert "what is compiled for a CPU is not priced" in " ".join(result.stdout.split())
