"""Prices of a layer's experts: predicted from their products, by roofline, and from a profile."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.rates.operator_rates import rate_terms
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.sources._interpolation import Interpolation
from foreplan.cost_models.sources.expert_parts import expert_parts
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.datasets import device_zoo
from foreplan.datasets.dtypes import weight_bytes
from foreplan.datasets.experts import touched_experts
from foreplan.datasets.program import Program, Variant, program

KERNELS = ("bf16/bf16/torch.linear", "int8/bf16/torch.dequant_linear",
           "int4/bf16/foreplan.fragment_linear")  # fmt: skip
MIXTRAL = {"experts": 8, "active": 2, "ffn": 14336, "hidden": 4096}
QWEN3 = {"experts": 128, "active": 8, "ffn": 768, "hidden": 2048}
PREDICTED = PredictedSource()


def experts(rows: int, kernel: str = KERNELS[0], **dims: int) -> Program:
    return program("experts", Variant.parse(kernel), rows=rows, **(dims or MIXTRAL))


@given(st.integers(1, 5000), st.integers(1, 160), st.data())
def test_parts_do_the_work_of_the_whole(rows: int, count: int, data: st.DataObject) -> None:
    active = data.draw(st.integers(1, count))
    whole = experts(rows, experts=count, active=active, ffn=64, hidden=128)
    parts = expert_parts(whole)
    assert parts is not None
    products = [(part, share) for part, share in parts if part.op == "linear"]
    assert sum(part.flops * share for part, share in products) == pytest.approx(whole.flops)
    # Weights once for each expert that is touched.
    touched = touched_experts(rows, count, active)
    read = sum(weight_bytes(p.dims["n"], p.dims["k"], "bf16") * share for p, share in products)
    assert read == pytest.approx(2 * 3 * 64 * 128 * touched)


def test_biases_and_a_clamped_activation_cost_more() -> None:
    dims = {"rows": 16, "experts": 32, "active": 4, "ffn": 2880, "hidden": 2880}
    # One launch clamps and activates on the former.
    for device, least_s in (("h200", 2e-6), ("v100_sxm2_32gb", 5e-6), ("mi300x", 5e-6)):
        plain, biased = (
            PREDICTED.estimate(program(op, Variant.parse(KERNELS[0]), **dims), device)
            for op in ("experts", "biased_experts")
        )
        assert plain is not None
        assert biased is not None
        assert plain.mean_s + least_s < biased.mean_s < 1.2 * plain.mean_s


def test_what_is_no_mixture_has_no_parts() -> None:
    linear = program("linear", Variant.parse(KERNELS[0]), rows=4, n=8, k=8)
    assert expert_parts(linear) is None


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dims", [MIXTRAL, QWEN3])
@pytest.mark.parametrize("device", ["h200", "a100_sxm_80gb", "l4"])
def test_more_rows_never_cost_less(device: str, dims: dict[str, int], kernel: str) -> None:
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 512, 2048, 8192)
    works = [experts(rows, kernel, **dims) for rows in sizes]
    roofline = RooflineSource(device_zoo.device(device))
    for source in (PREDICTED, roofline):
        times = [found.mean_s for w in works if (found := source.estimate(w, device)) is not None]
        assert len(times) == len(sizes)
        # A learned price may dip by a little between neighbours.
        assert all(later > 0.98 * before for before, later in itertools.pairwise(times))
        # One row reads two of eight experts (eight of 128), many rows read all.
        assert times[sizes.index(64)] > 2 * times[0]


@pytest.mark.parametrize("dims", [MIXTRAL, QWEN3])
def test_few_rows_cost_the_weights_they_touch(dims: dict[str, int]) -> None:
    """Within a factor of the time that the touched weights take at the published bandwidth."""
    device = device_zoo.device("h200")
    assert device.memory_bandwidth is not None
    for rows in (4, 16, 64):
        found = PREDICTED.estimate(experts(rows, **dims), "h200")
        assert found is not None
        assert found.source == "predicted"
        each = 2 * 3 * dims["ffn"] * dims["hidden"]
        touched = touched_experts(rows, dims["experts"], dims["active"])
        least = touched * each / device.memory_bandwidth
        assert least < found.mean_s < 2.5 * least


@settings(max_examples=20)
@given(st.integers(1, 500))
def test_one_row_more_is_a_small_step(rows: int) -> None:
    here, there = (PREDICTED.estimate(experts(r, **QWEN3), "h200") for r in (rows, rows + 1))
    assert here is not None
    assert there is not None
    # Touched experts and their rows both grow by less than the rows do.
    assert there.mean_s / here.mean_s < 1.05 * (rows + 1) / rows


def test_router_and_gate_are_predicted_too() -> None:
    route = program("router", Variant.parse("bf16/bf16/torch.topk"), rows=8, experts=128, active=8,
                    hidden=2048)  # fmt: skip
    gate = program("shared_gate", Variant.parse("bf16/bf16/torch.sigmoid_mul"), rows=8, cols=2048)
    for work in (route, gate):
        found = PREDICTED.estimate(work, "h200")
        assert found is not None
        assert found.source == "predicted"
        assert 1e-6 < found.mean_s < 1e-4


def test_a_precision_that_nobody_measured_is_not_predicted() -> None:
    assert PREDICTED.estimate(experts(4, "int3/bf16/torch.dequant_linear"), "h200") is None


def test_profiles_are_interpolated_by_what_is_touched() -> None:
    """A device whose time is a launch, a constant a touched expert and its weights."""

    def truth(rows: int) -> float:
        touched = touched_experts(rows, 16, 2)
        return 5e-6 + touched * (2e-6 + 3e-11 * 64 * 128) + 1e-12 * 6 * rows * 2 * 64 * 128

    names = {"experts": 16, "active": 2, "ffn": 64, "hidden": 128}
    dims = [{"rows": rows, **names} for rows in (1, 4, 32, 256)]
    fit = Interpolation("experts", dims, [truth(d["rows"]) for d in dims], [0.01] * 4)
    for rows in (2, 3, 8, 16, 64, 128):
        found = fit.predict({"rows": rows, **names})
        assert math.log(found.seconds / truth(rows)) == pytest.approx(0, abs=0.05)


def test_unpacked_weights_are_those_of_touched_experts() -> None:
    device = device_zoo.device("h200")
    few, all_of_them = (
        rate_terms([experts(rows, KERNELS[1], **QWEN3)], device)[0, 3] for rows in (1, 10_000)
    )
    assert all_of_them == pytest.approx(16 * few)


@pytest.mark.parametrize(
    ("rows", "kernel", "measured_s"),
    [
        (8, "int4/bf16/torch.dequant_linear", 21.1e-3),
        (1024, "int8/bf16/torch.dequant_linear", 16.2e-3),
    ],
)
def test_experts_that_a_host_calls_take_its_time(rows: int, kernel: str, measured_s: float) -> None:
    """64 of 768 features, of which a row takes 8, on an H200; docs/results/h200.md."""
    dims = {"rows": rows, "experts": 64, "active": 8, "ffn": 768, "hidden": 2048}
    found = PREDICTED.estimate(program("experts", Variant.parse(kernel), **dims), "h200")
    assert found is not None
    assert found.mean_s == pytest.approx(measured_s, rel=0.2)


@pytest.mark.parametrize(("rows", "measured_s"), [(8, 21.3e-6), (256, 27.9e-6), (2048, 32.2e-6)])
def test_a_router_picks_the_largest_scores(rows: int, measured_s: float) -> None:
    """On an H200, replayed from a graph; docs/results/h200.md."""
    kernel = Variant.parse("bf16/bf16/torch.topk")
    item = program("router", kernel, rows=rows, experts=64, active=8, hidden=2048)
    h200 = PredictedSource(devices={"d": device_zoo.device("h200")}, switch_s={"d": 0.65e-6})
    found = h200.estimate(item, "d")
    assert found is not None
    assert found.mean_s == pytest.approx(measured_s, rel=0.15)
