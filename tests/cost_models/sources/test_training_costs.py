"""Passes of a training step priced as the forward programs they are made of."""

from __future__ import annotations

import pytest

from foreplan.cost_models.costs import Copy, Estimate, Work
from foreplan.cost_models.lowering.graph_backward import ATTENTION_BACKWARD
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.cost_models.sources.training_costs import TrainingSource, forward_parts
from foreplan.datasets import device_zoo
from foreplan.datasets.kernels.training_programs import (
    cast_program,
    embedding_program,
    linear_program,
    loss_program,
    optimizer_program,
)
from foreplan.datasets.program import Program, Variant, program

DIRECTIONS = ("forward", "backward", "weight_gradient")
ROOFLINE = RooflineSource({"gpu": device_zoo.device("h200")})


class ByFlop:
    """A second a FLOP of a product and a byte of anything else; knows no training program."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        known = ("linear", "attention", "add", "norm", "softmax")
        if not isinstance(work, Program) or work.op not in known:
            return None
        product = work.op in ("linear", "attention")
        return Estimate.exact(work.flops if product else work.bytes)


SOURCE = TrainingSource(ByFlop(), ROOFLINE)


def seconds(work: Work) -> float:
    found = SOURCE.estimate(work, "gpu")
    assert found is not None
    return found.mean_s


def linear(direction: str, variant: str = "fp32/bf16/torch.linear") -> Program:
    return linear_program(direction, 128, 512, 256, variant)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_product_costs_what_forward_products_of_its_flop_do(direction: str) -> None:
    wanted = 2.0 * 128 * 512 * 256 * (2 if direction == "backward" else 1)
    # The gradient of the weights in bf16 is read, their sum in fp32 read and written.
    added = 0.0 if direction == "forward" else 512 * 256 * (2.0 + 4.0 + 4.0)
    assert linear(direction).flops == wanted
    assert seconds(linear(direction)) == pytest.approx(wanted + added)


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_a_look_up_fills_and_adds_a_whole_table_backwards(dtype: str, size: int) -> None:
    forward, backward = (
        seconds(embedding_program(d, 16, 1000, 64, f"fp32/{dtype}/torch.embedding"))
        for d in ("forward", "backward")
    )
    assert forward == pytest.approx(16 * 64 * 2 * size)
    assert backward == pytest.approx(forward + 1000 * 64 * (2 * size + 4 + 4))


def test_a_loss_is_a_softmax_in_fp32_and_twice_as_much_backwards() -> None:
    forward, backward = (seconds(loss_program(d, 16, 1000)) for d in ("forward", "backward"))
    assert forward == 16 * 1000 * 2 * 4
    assert backward == 2 * forward


def test_a_cast_moves_its_input_and_its_output() -> None:
    assert seconds(cast_program(2048, 1024, "bf16", "fp32")) == pytest.approx(2048 * 6)
    eight_bits = cast_program(2048, 1024, "bf16", "int8")
    assert SOURCE.estimate(eight_bits, "gpu") is None  # finds the largest number first


@pytest.mark.parametrize("kernel", ["torch.sdpa", "torch.sdpa_causal"])
def test_attention_backwards_is_three_forward_passes(kernel: str) -> None:
    forward, backward = (
        program(
            f"attention_{direction}", Variant("bf16", "bf16", kernel), batch=2, queries=64,
            keys=64, heads=4, head_dim=32,
        )
        for direction in ("forward", "backward")
    )  # fmt: skip
    assert seconds(backward) == ATTENTION_BACKWARD * seconds(forward)
    if kernel == "torch.sdpa":
        causal = forward_parts(forward)[0][0]
        assert seconds(forward) == 2 * causal.flops


def test_what_moves_memory_moves_twice_as_much_backwards() -> None:
    for op, kernel in (("norm", "torch.layer_norm"), ("elementwise", "torch.mul")):
        forward, backward = (
            seconds(program(f"{op}_{d}", Variant("bf16", "bf16", kernel), rows=64, cols=128))
            for d in ("forward", "backward")
        )
        assert backward == 2 * forward > 0


def test_eight_bits_lose_as_much_of_their_roofline_as_bf16() -> None:
    small, large = linear("forward", "fp32/int8/torch.int_mm+int8"), linear("forward")
    assert small.variant.compute == "int8"
    at_peak = [ROOFLINE.estimate(work, "gpu") for work in (small, large)]
    assert at_peak[0] is not None
    assert at_peak[1] is not None
    assert seconds(small) / seconds(large) == pytest.approx(at_peak[0].mean_s / at_peak[1].mean_s)


def test_everything_else_is_left_to_other_sources() -> None:
    plain = program("linear", Variant("bf16", "bf16", "torch.linear"), rows=4, n=4, k=4)
    others = (Copy(8), plain, optimizer_program("adamw", 64))
    assert [SOURCE.estimate(work, "gpu") for work in others] == [None] * 3


def test_the_shipped_predictor_prices_passes_of_a_gpu() -> None:
    source = TrainingSource(PredictedSource(), ROOFLINE)
    for direction in DIRECTIONS:
        work = linear_program(direction, 4096, 4096, 4096, "fp32/bf16/torch.linear")
        found, at_peak = source.estimate(work, "h200"), ROOFLINE.estimate(work, "gpu")
        assert found is not None
        assert at_peak is not None
        assert found.source == "predicted"
        many = TrainingSource(PredictedSource(), ROOFLINE)
        many.prepare(
            [work, linear_program(direction, 64, 64, 64, "fp32/int8/torch.int_mm+bf16")], "h200"
        )
        assert many.estimate(work, "h200") == found
        assert 0.3 < found.mean_s / at_peak.mean_s < 1.5
