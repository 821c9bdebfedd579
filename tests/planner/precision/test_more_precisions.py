"""tf32, fp8 and int8 in all products, from the profile's list to the decision, on a pretended GPU.

No GPU takes part: its prices are made up, and what is checked is which programs are asked for and
what the planner makes of their prices. The kernels themselves are tested where there is a GPU.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from foreplan.cost_models.costs import CostBook, Estimate
from foreplan.cost_models.quality.rounding import rounding_variance
from foreplan.datasets.kernels.training_programs import is_training
from foreplan.datasets.kernels.training_runnable import training_call
from foreplan.datasets.kernels.training_variant import (
    PRECISIONS,
    TRAINING_VARIANTS,
    training_variant,
    variants_of,
)
from foreplan.datasets.program import Program
from foreplan.errors import SpecError
from foreplan.planner.precision.execution.modules import apply_variants
from foreplan.planner.precision.planner import PrecisionPlanner
from foreplan.planner.precision.shapes import precision_programs
from foreplan.planner.precision.situation import Situation

ALL = ("fp32", "tf32", "bf16", "fp8", "int8", "int8-all")
#: Seconds that the pretended GPU takes for each FLOP, by dtype of the product.
PER_FLOP = {"fp32": 8e-12, "tf32": 4e-12, "bf16": 2e-12, "fp8": 1e-12, "int8": 3e-12}


class PretendedGpu:
    """Prices programs by dtype; has no kernel for ``lacking``."""

    def __init__(self, lacking: str = "") -> None:
        self.lacking = lacking

    def estimate(self, work: object, device: str) -> Estimate | None:
        if isinstance(work, Program):
            if work.variant.compute == self.lacking:
                return None
            rate = PER_FLOP.get(work.variant.compute, 8e-12)
            return Estimate.exact(1e-7 + rate * work.flops)
        return Estimate.exact(1e-6)


def on(problem, lacking=""):
    return dataclasses.replace(problem, costs=CostBook([PretendedGpu(lacking)]))


def test_a_profile_measures_every_kernel_that_a_gpu_can_have(make_problem) -> None:
    workload = make_problem("1xh100-80g", precisions=ALL).workload
    asked = precision_programs(None, workload, "cuda")
    linears = {str(p.variant) for p in asked if p.op == "linear_forward"}
    assert {"tf32/tf32/torch.linear", "fp32/fp8/torch.scaled_mm+fp8"} <= linears
    assert {"fp32/int8/torch.int_mm+int8"} <= linears
    backward = {(p.variant.storage, p.variant.compute) for p in asked if p.op == "linear_backward"}
    assert {("fp32", "tf32"), ("fp8", "bf16"), ("fp8", "fp8"), ("int8", "int8")} <= backward
    casts = {p.variant.compute for p in asked if p.op == "cast"}
    assert "fp8" in casts
    assert "tf32" not in casts, "tf32 reads fp32"
    assert all(is_training(p) or p.op == "cast" for p in asked)


def test_a_processor_is_asked_for_its_own_kernels_alone(make_problem) -> None:
    workload = make_problem("1xh100-80g", precisions=ALL).workload
    asked = precision_programs(None, workload, "cpu")
    dtypes = {p.variant.compute for p in asked}
    assert dtypes == {"fp32", "bf16", "int8"}
    for item in asked:
        if item.op == "linear_backward" and item.variant.compute == "int8":
            training_call(item, "cpu")()
            break
    else:
        pytest.fail("int8 in all products runs on processors too")


def test_the_cheapest_kernel_is_chosen_where_precision_is_free(make_problem) -> None:
    problem = on(make_problem("2xh100-80g", precisions=ALL, indicator="uniform"))
    planner = PrecisionPlanner()
    situation = Situation(problem)
    seconds = {}
    for word in ALL:
        chosen = situation.uniform(0, word)
        seconds[word] = situation.replay.run([chosen, chosen]).iteration_s
    assert min(seconds, key=seconds.__getitem__) == "fp8"
    assert seconds["tf32"] < seconds["fp32"]
    found = planner.decide(problem)
    words = {t.split("/")[1] for w in found.decision.workers for t in w.operators.values()}
    assert "fp8" in words


class Drawn:
    """Prices programs at random, alike for each operator and variant."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def estimate(self, work: object, device: str) -> Estimate | None:
        if not isinstance(work, Program):
            return Estimate.exact(1e-6)
        rng = np.random.default_rng([self.seed, *f"{work.op} {work.variant}".encode()])
        return Estimate.exact(1e-6 + work.bytes * 1e-11 * rng.lognormal(0, 1))


@pytest.mark.parametrize("seed", range(4))
def test_no_uniform_plan_that_hands_on_one_dtype_is_quicker(make_problem, seed: int) -> None:
    """Casts and operators without a choice count, too, which follow from what is handed on."""
    problem = make_problem("1xh100-80g", precisions=("fp32", "bf16", "int8"))
    situation = Situation(dataclasses.replace(problem, costs=CostBook([Drawn(seed)])))
    device = situation.devices[0]

    def seconds(choice: np.ndarray) -> float:
        forward, backward = device.seconds(choice)
        return forward + float(np.sum(backward))

    seen = 0
    for word in ("fp32", "bf16", "int8"):
        least = seconds(situation.uniform(0, word))
        for output in ("fp32", "bf16"):
            names = {}
            for i in situation.graph.adjustable:
                found = [
                    option.name for option in device.tables.options[i]
                    if training_variant(option.name).precision == word
                    and training_variant(option.name).output == output
                ]  # fmt: skip
                if len(found) == 1:
                    names[situation.graph.operators[i].module] = found[0]
            if len(names) == len(situation.graph.modules):
                seen += 1
                assert least <= seconds(device.tables.choice(names)) * (1 + 1e-12)
    assert seen


def test_a_gpu_without_the_kernel_has_no_such_choice(make_problem) -> None:
    situation = Situation(on(make_problem("2xh100-80g", precisions=ALL), lacking="fp8"))
    names = {p.name for options in situation.devices[0].tables.options for p in options}
    assert not any("/fp8/" in name for name in names)
    assert any("/tf32/" in name for name in names)


def test_a_precision_that_no_device_can_have_is_refused(make_problem) -> None:
    problem = make_problem("1xh100-80g", precisions=("fp32", "fp8"))
    cluster = problem.cluster
    entries = tuple(
        e.model_copy(update={"name": type(e.name).parse("cpu:threads=1")}) for e in cluster.devices
    )
    cluster = cluster.model_copy(update={"devices": entries})
    with pytest.raises(SpecError, match=r"precisions.*fp8.*cpu devices") as caught:
        Situation(dataclasses.replace(problem, cluster=cluster))
    assert "cuda device" in str(caught.value)


def test_a_processor_refuses_to_run_what_it_has_no_kernel_for() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    before = type(model[0])
    with pytest.raises(SpecError, match="on cpu"):
        apply_variants(model, {"0": "fp32/fp8/torch.scaled_mm+fp8"})
    assert type(model[0]) is before


def test_features_have_to_be_multiples() -> None:
    texts = variants_of("linear", n=24, k=32)
    assert not any("fp8" in text for text in texts)
    assert any("int8" in text for text in texts)
    assert {v.precision for v in TRAINING_VARIANTS.values()} == set(PRECISIONS)


def test_fp8_rounds_as_torch_does() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).exp()
    scale = x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scale).to(torch.float8_e4m3fn).float() * scale
    found = (rounded - x).square().sum() / rounding_variance(x, "fp8").sum()
    assert 0.9 < float(found) < 1.1
    assert not rounding_variance(torch.zeros(2, 8), "fp8").any()
