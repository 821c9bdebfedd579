"""What a profile for serving measures covers what plans price, of devices that share layers too."""

from __future__ import annotations

from typing import Literal

import pytest

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.tensor_parallel import shard_model
from foreplan.datasets.models.attention_window import distinct_kinds
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.program import Program
from foreplan.errors import SpecError
from foreplan.planner.serving.pipeline import stage_kernels
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches, Pricing
from foreplan.planner.serving.shapes import serving_programs
from foreplan.planner.serving.spec import ServingWorkload, StageDecision

MODELS = ["tiny-llama-random", "tiny-moe-random", "opt-125m", "qwen3-0.6b"]
KERNELS = {
    "attention": "bf16/bf16/torch.sdpa", "head": "bf16/bf16/torch.linear",
    "linear/16": "bf16/bf16/torch.linear", "linear/8": "int8/bf16/torch.int8pack_mm",
}  # fmt: skip


def workload(degree: int | Literal["auto"] = 1) -> ServingWorkload:
    return ServingWorkload(
        batch=4, prompt_tokens=16, new_tokens=6, bits=(16, 8), tensor_parallel=degree
    )


def priced(name: str, degree: int) -> set[Program]:
    """What the passes of one of ``degree`` devices run, at the least and the largest batch."""
    model = load_model(name)
    table = {f"{p}/{op}": k for p in (PREFILL, DECODE) for op, k in KERNELS.items()}
    stage = StageDecision(rank=0, device="a", start=0, end=1, bits=(16,), kernels=table)
    price, kernels = Pricing(model, workload(), CostBook(()), degree), stage_kernels(stage)
    found: set[Program] = set()
    for size in (1, 4):
        sizes = MicroBatches(size, size)
        for phase, context in ((PREFILL, None), (DECODE, 17), (DECODE, 21)):
            parts = [price.embedding(phase, sizes), price.head(kernels, phase, sizes)]
            for bits in (16, 8):
                parts += [
                    price.layer(kernels, bits, phase, sizes, context, kind)
                    for kind in distinct_kinds(model, 22)
                ]
            found.update(program for part in parts for program, _ in part)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("degree", [1, 2])
def test_every_program_of_a_pass_is_measured(name: str, degree: int) -> None:
    measured = serving_programs(load_model(name), workload(degree), "cpu")
    assert len(measured) == len(set(measured))
    assert priced(name, degree) <= set(measured)
    if degree > 1:  # nobody holds a whole layer then
        assert not priced(name, 1) <= set(measured)


@pytest.mark.parametrize("name", MODELS)
def test_a_free_choice_measures_every_degree_of_the_devices_there_are(name: str) -> None:
    model = load_model(name)
    alone, two = (set(serving_programs(model, workload("auto"), "cpu", devices=n)) for n in (1, 2))
    assert alone == set(serving_programs(model, workload(), "cpu"))
    assert two == alone | set(serving_programs(model, workload(2), "cpu"))
    assert two > alone


def test_a_degree_that_cannot_be_is_refused() -> None:
    model = load_model("tiny-llama-random")
    with pytest.raises(SpecError, match="a degree that tiny-llama-random can be split by"):
        serving_programs(model, workload(3), "cpu")
    assert shard_model(model, 2).heads == model.heads // 2
