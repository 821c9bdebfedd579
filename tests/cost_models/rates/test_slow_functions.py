"""What functions of elements cost on processors, and that nothing else pays for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.rates.chosen_kernels import chosen_kernel_s
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.slow_functions import function_s
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1e-6,
)  # fmt: skip


def mapped(kernel: str, inputs: int = 1) -> Program:
    variant = Variant("fp32", "fp32", f"torch.{kernel}")
    return program("elementwise", variant, rows=100, cols=500, inputs=inputs)


def test_a_function_costs_its_elements_beside_its_bytes() -> None:
    # 50,000 elements of 1 us / 500 each.
    assert function_s(mapped("tanh"), CORE, 1e-6) == pytest.approx(100e-6)
    assert function_s(mapped("tanh_"), CORE, 1e-6) == pytest.approx(100e-6)
    for plain in ("relu", "pow", "gelu", "backward"):
        assert function_s(mapped(plain), CORE, 1e-6) == 0.0
    # By a tensor, no power is a whole number's.
    assert function_s(mapped("pow", 2), CORE, 1e-6) == pytest.approx(1e-6 * 50_000 / 680)
    softmax = program("softmax", Variant("fp32", "fp32", "torch.softmax"), rows=11, cols=200)
    assert function_s(softmax, CORE, 1e-6) == pytest.approx(1e-6)
    tanh, relu = KnownRates.load().seconds([mapped("tanh"), mapped("relu")], CORE)
    assert tanh == pytest.approx(relu + 100e-6)


def reduced(kernel: str, rows: int, cols: int) -> Program:
    return program("reduction", Variant("fp32", "fp32", f"torch.{kernel}"), rows=rows, cols=cols)


def test_reductions_that_torch_makes_one_by_one_cost_their_values() -> None:
    assert function_s(reduced("std", 46, 500), CORE, 1e-6) == pytest.approx(100e-6)
    for quick in ("sum", "mean", "amax"):
        assert function_s(reduced(quick, 46, 500), CORE, 1e-6) == 0.0
    # Whether any of each row is; over all at once it is vectorized.
    assert function_s(reduced("any", 35, 500), CORE, 1e-6) == pytest.approx(5e-6)
    assert function_s(reduced("any", 1, 17500), CORE, 1e-6) == 0.0
    # 50 of each of 16 rows of 32,000: 800 results of 640 values each; 90 ns a result.
    topk = function_s(reduced("topk", 800, 640), CORE, 1e-6)
    assert topk == pytest.approx(1e-6 * (800 * 640 / 1200 + 800 / 11))
    # All of rows of 2: 7 ns a value at most.
    topk = function_s(reduced("topk", 1100, 1), CORE, 1e-6)
    assert topk == pytest.approx(1e-6 * (1100 / 1200 + 100 / 13))


def test_short_rows_of_sums_do_not_wait_for_each_other() -> None:
    short, long = (function_s(reduced("cumsum", 31200 // n, n), CORE, 1e-6) for n in (48, 312))
    assert long == pytest.approx(1e-6 * 31200 / 1550)
    assert short == pytest.approx(1e-6 * 31200 / 2600)


@pytest.mark.parametrize(("op", "kernel", "elements"), [
    ("dropout", "dropout", 180), ("norm", "instance_norm", 1050), ("reduction", "kl_div", 500),
    ("reduction", "binary_cross_entropy", 90), ("elementwise", "exponential_", 70),
    ("elementwise", "grid_sampler_2d_backward", 245),
])  # fmt: skip
def test_draws_norms_and_losses_cost_their_elements(op: str, kernel: str, elements: float) -> None:
    more = {"inputs": 1} if op == "elementwise" else {}
    item = program(op, Variant("fp32", "fp32", f"torch.{kernel}"), rows=70, cols=500, **more)
    assert function_s(item, CORE, 1e-6) == pytest.approx(1e-6 * 35_000 / elements)
    assert function_s(item, device_zoo.device("h200"), 1e-6) == 0.0


@pytest.mark.parametrize(("kernel", "elements"), [
    ("col2im", 1750), ("_upsample_bilinear2d_aa", 750), ("_upsample_bicubic2d_aa", 500),
])  # fmt: skip
def test_windows_cost_all_that_is_read(kernel: str, elements: float) -> None:
    found = function_s(mapped(kernel, 8), CORE, 1e-6)
    assert found == pytest.approx(1e-6 * 8 * 50_000 / elements)


@pytest.mark.parametrize(("call", "kernels"), [
    (lambda x: x.std(-1), ["std"]), (lambda x: x.topk(3)[0], ["topk"]),
    (lambda x: x.masked_fill(x > 0, 0.0), ["gt", "masked_fill"]),
    (nn.functional.mish, ["mish"]), (lambda x: x.cumsum(-1), ["cumsum"]),
    (lambda x: nn.functional.log_softmax(x, -1), ["log_softmax"]),
    (lambda x: nn.functional.gelu(x, approximate="tanh"), ["gelu_tanh"]),
    (lambda x: x.t().contiguous(), ["contiguous_transposed"]),
    (lambda x: torch.stack([x, x], -1), ["stack_zipped"]),
    (lambda x: torch.cat([x[..., None]] * 2, 2), ["cat_zipped"]),
    (lambda x: x.view(8, 8, 16, 32).permute(0, 2, 3, 1).contiguous(), ["contiguous_channels_last"]),
    (lambda x: nn.functional.pixel_shuffle(x.view(1, 32, 32, 32), 2), ["pixel_shuffle"]),
    (lambda x: x.kthvalue(3, -1)[0], ["kthvalue"]), (lambda x: x.histc(10), ["histc"]),
    (lambda x: nn.functional.interpolate(x[None, None], scale_factor=2.0), ["upsample_nearest2d"]),
    (lambda x: nn.functional.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
     ["upsample_bilinear2d"]),
    (lambda x: nn.functional.pixel_unshuffle(x.view(1, 8, 64, 64), 2), ["pixel_unshuffle"]),
    (lambda x: nn.functional.fold(x.view(1, 8, 4096), 128, 2, stride=2), ["col2im"]),
    (lambda x: nn.functional.instance_norm(x.view(1, 8, 64, 64)), ["instance_norm"]),
    (lambda x: nn.functional.binary_cross_entropy(x, x), ["binary_cross_entropy"]),
    (lambda x: nn.functional.dropout(x, 0.3), ["dropout"]),
    (lambda x: x.isfinite(), ["isfinite"]), (lambda x: x // 3.0, ["floor_divide"]),
    (lambda x: torch.multinomial(x, 1), ["multinomial"]),
    (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
     ["fake_quantize_per_tensor_affine_cachemask"]),
])  # fmt: skip
def test_a_network_asks_by_the_names_that_are_known(call: Any, kernels: list[str]) -> None:
    class Called(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return call(x)

    works = [step.work for step in lower(capture(Called(), [torch.zeros(64, 512)], eager=True))]
    assert [w.variant.kernel for w in works if isinstance(w, Program)] == [
        f"torch.{name}" for name in kernels
    ]
    assert all(isinstance(w, Program) and function_s(w, CORE, 1e-6) > 0 for w in works)


def test_parts_of_unequal_widths_take_no_turns() -> None:
    class Joined(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.cat([x[:, :1], x], 1)

    (step,) = lower(capture(Joined(), [torch.zeros(64, 512)], eager=True))
    assert isinstance(step.work, Program)
    assert "_zipped" not in step.work.variant.kernel


def test_small_images_are_enlarged_another_way() -> None:
    small, large = (
        program("elementwise", Variant("fp32", "fp32", "torch.upsample_nearest2d"), rows=6400 // n,
                cols=n, inputs=1)
        for n in (64, 80)
    )  # fmt: skip
    assert function_s(small, CORE, 1e-6) == pytest.approx(1e-6 * 6400 / 700)
    assert function_s(large, CORE, 1e-6) == pytest.approx(1e-6 * 6400 / 4000)


@pytest.mark.parametrize(("name", "elements"), [
    ("index_add", 7500), ("scatter_add", 7500), ("scatter_reduce", 6000), ("index_put", 2600),
    ("scatter", 870),
])  # fmt: skip
def test_what_is_written_by_an_index_costs_what_is_written(name: str, elements: float) -> None:
    """Ten rows to each of the result's, one of whose operands is as large as it."""
    found = function_s(mapped(name, 11), CORE, 1e-6)
    size = mapped(name).dims
    assert found == pytest.approx(1e-6 * 10 * size["rows"] * size["cols"] / elements)


def test_cores_share_elements_and_gpus_have_none() -> None:
    many = CORE.model_copy(update={"units": 4})
    assert function_s(mapped("sin"), many, 1e-6) == pytest.approx(
        function_s(mapped("sin"), CORE, 1e-6) / 4
    )
    assert function_s(mapped("sin"), device_zoo.device("h200"), 1e-6) == 0.0


@pytest.mark.parametrize(("layer", "kernel"), [
    (nn.GELU(), "torch.gelu_backward"), (nn.SiLU(), "torch.silu_backward"),
    (nn.ReLU(), "torch.backward"), (nn.Tanh(), "torch.backward"),
])  # fmt: skip
def test_a_gradient_says_which_function_it_takes_again(layer: nn.Module, kernel: str) -> None:
    network = nn.Sequential(nn.Linear(8, 8), layer)
    steps = lower(capture(network, [torch.zeros(4, 8)], eager=True), "training")
    maps = [step.work for step in steps if step.part == "backward" and step.kind == "activation"]
    assert [work.variant.kernel for work in maps if isinstance(work, Program)] == [kernel]


def test_the_gradient_of_a_gelu_is_dearer_than_the_gelu() -> None:
    forward, back = KnownRates.load().seconds([mapped("gelu"), mapped("gelu_backward", 2)], CORE)
    assert back == pytest.approx(2 * forward)


def test_doubles_and_channels_that_lie_last_have_times_of_their_own() -> None:
    doubles = program("elementwise", Variant("fp64", "fp64", "torch.tanh"), rows=100, cols=50,
                      inputs=1)  # fmt: skip
    assert function_s(doubles, CORE, 1e-6) == pytest.approx(1.9e-6 * 5000 / 500)
    last = mapped("upsample_bilinear2d_channels_last")
    assert function_s(last, CORE, 1e-6) == pytest.approx(1e-6 * 50_000 / 8000)
    back = mapped("upsample_bilinear2d_backward_channels_last")
    assert function_s(back, CORE, 1e-6) == pytest.approx(1e-6 * 50_000 / 3500)


class Drawn(nn.Module):
    """A function of one tensor."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: torch.Tensor) -> Any:
        return self.of(x)


@pytest.mark.parametrize(
    ("of", "kind", "in_a_call"),
    [
        (torch.special.bessel_j0, "elementwise", 485),
        (torch.special.i0e, "elementwise", 55),
        (torch.special.gammainc, "elementwise", 31),
        (torch.heaviside, "elementwise", 257),
        (torch.poisson, "elementwise", 58),
        (lambda x: torch.empty_like(x).cauchy_(), "elementwise", 52),
        (lambda x: torch.empty_like(x).geometric_(0.3), "elementwise", 91),
        (lambda x: torch.empty_like(x).log_normal_(), "elementwise", 41),
        (lambda x: torch.mode(x, -1)[0], "reduction", 30),
        (lambda x: torch.nanmedian(x, -1)[0], "reduction", 93),
    ],
)
def test_functions_that_torch_computes_one_by_one_have_a_figure(
    of: Any, kind: str, in_a_call: int
) -> None:
    two = of in (torch.heaviside, torch.special.gammainc)
    module = Drawn((lambda x: of(x, x)) if two else of)
    steps = lower(capture(module, {"x": torch.rand(60, 90)}, eager=True), phase="inference")
    works = [step.work for step in steps if isinstance(step.work, Program)]
    slow = [work for work in works if function_s(work, CORE, 1e-6)]
    assert [work.op for work in slow] == [kind]
    assert function_s(slow[0], CORE, 1e-6) == pytest.approx(1e-6 * 60 * 90 / in_a_call)


@pytest.mark.parametrize("training", [True, False])
def test_slopes_take_their_time_where_they_are_drawn(training: bool) -> None:
    module = Drawn(lambda x: nn.functional.rrelu(x, training=training))
    steps = lower(capture(module, {"x": torch.rand(60, 90)}, eager=True), phase="inference")
    work = next(step.work for step in steps if isinstance(step.work, Program))
    drawn = 1e-6 * 60 * 90 / 181 if training else 0.0
    assert chosen_kernel_s(work, CORE, 1e-6) == pytest.approx(drawn)
    assert function_s(work, CORE, 1e-6) == 0.0
