"""Serving plans beyond a sliding window: priced by the keys that layers see, no others changed."""

from __future__ import annotations

from typing import Any

import pytest

import foreplan
from foreplan.cost_models.costs import CostBook
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError
from foreplan.planner.serving.pricing import DECODE, PREFILL, MicroBatches, Pricing, StageKernels
from foreplan.planner.serving.shapes import serving_programs
from foreplan.planner.serving.spec import ServingWorkload

WINDOW = 64
KERNELS = StageKernels(
    {
        f"{phase}/{op}": Variant.parse(f"bf16/bf16/torch.{kernel}")
        for phase in (PREFILL, DECODE)
        for op, kernel in (("attention", "sdpa"), ("linear/16", "linear"), ("head", "linear"))
    }
)


def sliding(**changes: Any) -> Model:
    small = {"layers": 4, "sliding_window": WINDOW, "window_layers": (0, 2)}
    return load_model("tiny-llama-random").model_copy(update=small | changes)


def workload(prompt: int, new: int = 8, **fields: Any) -> ServingWorkload:
    return ServingWorkload(batch=2, prompt_tokens=prompt, new_tokens=new, bits=(16,), **fields)


def test_layers_see_their_windows() -> None:
    price, sizes = Pricing(sliding(), workload(100), CostBook(())), MicroBatches(2, 2)
    for phase, keys, pieces in (
        (PREFILL, None, {(64, 64): 2, (36, 100): 2, (100, 100): 2}),
        (DECODE, 105, {(1, 64): 2, (1, 105): 2}),
    ):
        parts = price.layers(KERNELS, 0, (16,) * 4, phase, sizes, keys)
        attention = {
            (p.dims["queries"], p.dims["keys"]): n for p, n in parts if p.op == "attention"
        }
        assert attention == pieces


def test_every_piece_is_measured() -> None:
    model, asked = sliding(), workload(100)
    measured = set(serving_programs(model, asked, "cpu"))
    price = Pricing(model, asked, CostBook(()))
    for batch in (1, 2):
        for phase, keys in ((PREFILL, None), (DECODE, 101), (DECODE, 107)):
            parts = price.layers(KERNELS, 0, (16,) * 4, phase, MicroBatches(batch, batch), keys)
            assert {item for item, _ in parts} <= measured


def test_up_to_the_window_nothing_changes() -> None:
    """And one token more is another plan, also where the window is full behind the prompt."""
    plain = sliding(sliding_window=None, window_layers=())
    within, beyond = workload(WINDOW - 8), workload(WINDOW)
    sizes = MicroBatches(2, 2)
    for asked, same in ((within, True), (beyond, False)):
        ours, theirs = (Pricing(m, asked, CostBook(())) for m in (sliding(), plain))
        steps = [(PREFILL, None), (DECODE, asked.prompt_tokens + 7)]
        parts = [
            [p.layers(KERNELS, 0, (16,) * 4, phase, sizes, keys) for phase, keys in steps]
            for p in (ours, theirs)
        ]
        assert (parts[0] == parts[1]) == same


@pytest.mark.parametrize("name", ["gemma-3-1b", "mistral-7b-v0.1"])
def test_a_plan_beyond_the_window(name: str) -> None:
    model, cluster = load_model(name), parse_devices("2xl4")
    asked = workload(6000, 16, prefill_microbatch=1, decode_microbatch=1)
    whole = model.model_copy(update={"sliding_window": None, "window_layers": ()})
    plan, full = (
        foreplan.plan("serving", m, cluster, asked, costs="roofline") for m in (model, whole)
    )
    assert plan.predicted.total_s < full.predicted.total_s
    # What is kept is kept for every token.
    kept = [sum(r.memory_bytes["kv_cache"] for r in p.predicted.ranks) for p in (plan, full)]
    assert kept[0] == kept[1]
    with pytest.raises(SpecError, match="can attend to"):
        foreplan.plan("serving", model, cluster, workload(model.max_positions), costs="roofline")
