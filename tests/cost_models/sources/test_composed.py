"""Transforms, bilinear forms and distances: what they are made of, and their prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.cost_models.two_devices import CPU, GPU
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from foreplan.cost_models.lowering.attention_parts import within_parts
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.replay import predict_latency, replay_book, replay_steps
from foreplan.cost_models.roofline import RooflineSource, launch_s
from foreplan.cost_models.sources.composed import ComposedSource
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import SpecError

FP32 = "fp32/fp32/torch."


class Of(nn.Module):
    """A function of what a linear makes of the input."""

    def __init__(self, function: Callable[..., Any], cols: int) -> None:
        super().__init__()
        self.function, self.first = function, nn.Linear(cols, cols)

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.function(self.first(x), *more)


class Plain(nn.Module):
    """A function alone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)


def steps_of(function: Callable[..., Any], *given: Tensor) -> list[Step]:
    return lower(capture(Plain(function), given, eager=True))


def one(steps: list[Step], kind: str) -> Program:
    (found,) = [step.work for step in steps if step.kind == kind]
    assert isinstance(found, Program)
    return found


REAL, COMPLEX = torch.rand(6, 4, 1000), torch.rand(6, 4, 500, 2)


@pytest.mark.parametrize(
    ("function", "given", "dims"),
    [
        (torch.fft.rfft, REAL, (24, 1000, 1, 1)),
        (torch.fft.fft, torch.view_as_complex(COMPLEX), (24, 500, 2, 1)),
        (torch.fft.irfft, torch.view_as_complex(COMPLEX), (24, 998, 1, 1)),
        (lambda x: torch.fft.rfft(x, dim=0), REAL, (4000, 6, 1, 1)),
        (torch.fft.rfft2, REAL, (6, 4000, 1, 2)),
        (torch.fft.rfft, torch.rand(2, 5000), (2, 5000, 1, 2)),
    ],
)
def test_a_transforms_dimensions(
    function: Callable[..., Any], given: Tensor, dims: tuple[int, ...]
) -> None:
    assert one(steps_of(function, given), "fft").sizes == dims


def test_a_transforms_work() -> None:
    def transform(values: int) -> Program:
        return program("fft", Variant.parse(FP32 + "fft"), rows=3, cols=1024, values=values,
                       passes=2)  # fmt: skip

    assert transform(2).flops == 3 * 5 * 1024 * 10  # 5 n log2 n
    assert transform(2).bytes == 2 * 2 * 3 * 1024 * 8  # read and written twice
    assert transform(2).flops == 2 * transform(1).flops
    # On a GPU as many maps as passes; on a processor never below its calls.
    book = replay_book(GPU, "roofline")
    plain = program(
        "elementwise", Variant.parse(FP32 + "fft"), rows=3, cols=2048, inputs=1
    )  # fmt: skip
    assert book.cost(transform(2), GPU.name).mean_s == 2 * book.cost(plain, GPU.name).mean_s
    least = replay_book(CPU, "roofline").cost(transform(1), CPU.name).mean_s
    assert least > 8 * 1e-6


def test_a_spectrogram_is_framed_windowed_and_transformed() -> None:
    def spectrogram(x: Tensor) -> Tensor:
        window = torch.hann_window(400)
        return torch.stft(x, 400, 160, window=window, return_complex=True).abs()

    steps = steps_of(spectrogram, torch.rand(2, 16000))
    assert one(steps, "fft").sizes == (2 * 101, 400, 1, 1)
    assert Counter(step.target for step in steps) == Counter(
        ["aten.hann_window", "aten.pad", "aten.mul", "aten._fft_r2c", "aten.abs"]
    )


def test_a_bilinear_form_is_so_many_products_as_torch_runs() -> None:
    module, given = nn.Bilinear(8, 5, 3), (torch.rand(7, 8), torch.rand(7, 5))
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        module(*given)
    ran = Counter(event.key for event in seen.events())
    work = one(lower(capture(module, given, eager=True)), "bilinear")
    assert work.dims == {"rows": 7, "first": 8, "second": 5, "outputs": 3}
    parts, _ = ComposedSource([], GPU)._parts(work)
    assert [count for part, count in parts if part.op == "matmul"] == [3, 3]
    assert ran["aten::bmm"] == 6
    assert sum(part.flops * count for part, count in parts if part.op == "matmul") == work.flops


def test_a_bilinear_forms_gradients_are_one_for_each_operand() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.form = nn.Linear(8, 8), nn.Bilinear(8, 5, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.form(self.first(x), y)
            return out

    given = torch.rand(7, 8), torch.rand(7, 5)
    steps = lower(capture(Trained(), given, eager=True), "training")
    back = [step for step in steps if step.kind == "bilinear" and step.part == "backward"]
    assert len(back) == 2  # by what the linear made and by the weight, not by the input


def test_the_host_issues_a_bilinear_form_output_by_output() -> None:
    def calls(outputs: int) -> int:
        given = torch.rand(7, 8), torch.rand(7, 5)
        steps = lower(capture(nn.Bilinear(8, 5, outputs), given, eager=True))
        return sum(step.calls for step in steps if step.kind == "bilinear")

    assert calls(20) - calls(10) == 30


def test_distances_go_by_their_powers_on_a_processor() -> None:
    def seconds(power: float, device_is_gpu: bool = False) -> float:
        device = GPU if device_is_gpu else CPU
        given = torch.rand(20, 16), torch.rand(20, 16)
        steps = steps_of(lambda x, y: torch.cdist(x, y, p=power), *given)
        return replay_steps(steps, replay_book(device, "roofline"), device).device_s

    assert seconds(3.0) > 5 * seconds(1.0)
    assert seconds(1.0) == seconds(float("inf"))
    assert seconds(3.0, device_is_gpu=True) == seconds(1.0, device_is_gpu=True)


def test_many_distances_are_one_product() -> None:
    steps = steps_of(torch.cdist, torch.rand(30, 16), torch.rand(40, 16))
    # |x|^2 + |y|^2 - 2 x y, all in one product of two more columns.
    assert one(steps, "matmul").dims == {"batch": 1, "m": 30, "n": 40, "k": 18}


def test_complex_numbers_are_two_real_ones() -> None:
    given = torch.rand(8, 8, dtype=torch.complex64), torch.rand(8, 8, dtype=torch.complex64)
    total = one(steps_of(torch.add, *given), "elementwise")
    assert (total.dims, total.variant.compute) == ({"rows": 8, "cols": 16, "inputs": 2}, "fp32")
    assert total.bytes == 3 * 8 * 8 * 8
    # Four products of real ones.
    assert one(steps_of(torch.matmul, *given), "matmul").flops == 4 * 2 * 8**3


def test_sorting_goes_over_a_row_once_for_each_halving() -> None:
    short, long = (
        one(steps_of(lambda x: x.sort()[0], torch.rand(4, cols)), "reduction")
        for cols in (64, 4096)
    )
    assert (short.dims["cols"], long.dims["cols"]) == (64 * 6, 4096 * 12)


def test_all_else_is_left_to_other_sources() -> None:
    source = ComposedSource([RooflineSource(CPU)], CPU)
    linear = program("linear", Variant.parse(FP32 + "linear"), rows=2, n=3, k=4)
    transform = program("fft", Variant.parse(FP32 + "fft"), rows=3, cols=8, values=2, passes=1)
    assert source.estimate(linear, CPU.name) is None
    assert source.estimate(transform, "another") is None
    assert source.estimate(transform, CPU.name) is not None
    blind = CPU.model_copy(update={"memory_bandwidth": None})
    assert ComposedSource([RooflineSource(blind)], blind).estimate(transform, CPU.name) is None
    # Parts that nothing prices leave the whole without a price.
    assert ComposedSource([], GPU).estimate(transform, GPU.name) is None


def test_a_price_says_that_it_comes_from_figures() -> None:
    item = program("fft", Variant.parse(FP32 + "fft"), rows=3, cols=8, values=2, passes=1)
    for costs in ("roofline", "predicted"):
        found = replay_book(CPU, costs).cost(item, CPU.name)
        assert found.source == costs
        assert found.low_s < found.mean_s < found.high_s


ROWS, IMAGES, GRID = torch.rand(4, 6, 8), torch.rand(2, 8, 8, 8), torch.rand(2, 4, 4, 2)
MODULES: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "lstm": (nn.LSTM(8, 8, bidirectional=True), (ROWS,)),
    "gru cell": (nn.GRUCell(8, 8), (ROWS[0],)),
    "spectrum": (Of(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2.0), 8), (ROWS,)),
    "distances": (Of(torch.cdist, 8), (ROWS[0], ROWS[1])),
    "bilinear": (nn.Bilinear(8, 8, 3), (ROWS, ROWS)),
    "sampled": (
        Of(lambda x, g: F.grid_sample(x, g, align_corners=False), 8), (IMAGES, GRID),
    ),
    "bicubic": (Of(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), 8), (IMAGES,)),
    "nearest": (Of(lambda x: F.interpolate(x, size=4, mode="nearest-exact"), 8), (IMAGES,)),
    "unfolded": (Of(lambda x: F.fold(F.unfold(x, 3), (8, 8), 3), 8), (IMAGES,)),
    "shuffled": (Of(lambda x: F.pixel_shuffle(x, 2), 8), (IMAGES,)),
    "einsum": (Of(lambda x, y: torch.einsum("bid,bjd->bij", x, y), 8), (ROWS, ROWS)),
    "sorted": (Of(lambda x: x.sort()[0], 8), (ROWS,)),
    "scattered": (
        Of(lambda x, i: torch.zeros(9, 8).scatter_add(0, i, x), 8),
        (ROWS[0], torch.zeros(6, 8, dtype=torch.long)),
    ),
    "attention": (nn.MultiheadAttention(8, 2, batch_first=True), (ROWS, ROWS, ROWS)),
    "transformer": (nn.Transformer(8, 2, 1, 1, 8, batch_first=True), (ROWS, ROWS)),
    "margin": (Of(F.multi_margin_loss, 8), (ROWS[0], torch.zeros(6, dtype=torch.long))),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (ROWS,)),
    "complex": (Of(lambda x: torch.view_as_real(torch.complex(x, x) ** 2), 8), (ROWS,)),
    "zeroed": (Of(lambda x: x + torch.ones_like(x).zero_(), 8), (ROWS,)),
    "logcumsumexp": (Of(lambda x: x.logcumsumexp(1), 8), (ROWS,)),
    "unpooled": (
        Of(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), (2, 2)), 8),
        (IMAGES,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("phase", ["inference", "training"])
@pytest.mark.parametrize("name", MODULES)
def test_nothing_common_is_unknown(name: str, phase: Any) -> None:
    module, given = MODULES[name]
    for device in (CPU, GPU):
        found = predict_latency(module, device, inputs=given, phase=phase, costs="roofline")
        assert 0 < found.low_s <= found.latency_s <= found.high_s
        assert "unknown" not in found.by("kind")


def test_a_square_of_complex_numbers_is_a_product() -> None:
    numbers = torch.zeros(64, 512, dtype=torch.complex64)
    square, product, power = (
        one(steps_of(function, numbers), "elementwise")
        for function in (lambda z: z**2, lambda z: z * 1.5, lambda z: z**1.7)
    )
    assert square.dims == product.dims | {"cols": 1024}
    assert square.variant.kernel == "torch.pow"
    assert power.variant.kernel == "torch.pow_of_complex"


def test_what_is_unknown_is_listed() -> None:
    found = predict_latency(
        Of(torch.linalg.svdvals, 8), GPU, inputs=(ROWS,), phase="training", costs="roofline"
    )  # fmt: skip
    assert any("unknown: aten._linalg_svd" in row["operator"] for row in found.unsupported())


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_what_is_unknown_is_priced_by_figures_alone(device: Device) -> None:
    module = nn.Sequential(nn.Linear(8, 8), Of(torch.linalg.svdvals, 8))
    found = predict_latency(module, device, inputs=(ROWS,))
    kinds, sources = found.by("kind"), found.by("source")
    assert sources["roofline"] == pytest.approx(kinds["unknown"])
    assert sources["predicted"] == pytest.approx(kinds["linear"])


def test_sizes_that_values_decide_are_named_as_the_reason() -> None:
    def loss(x: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), target, lengths, lengths)

    given = torch.rand(9, 2, 8), torch.ones(2, 4, dtype=torch.long), torch.tensor([4, 4])
    with pytest.raises(SpecError, match="sizes and checks that depend on values"):
        predict_latency(Of(loss, 8), GPU, inputs=given)


class Encoder(nn.Module):
    """One of torch's own layers, which inference runs by one call."""

    def __init__(self, activation: str = "relu") -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, activation=activation, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def priced(activation: str = "relu") -> dict[str, Program]:
    """Attention and the product with an activation of a fused layer, by their names."""
    steps = lower(capture(Encoder(activation), [torch.rand(2, 12, 32)], eager=True))
    return {step.target: step.work for step in steps if isinstance(step.work, Program)}


def test_a_processor_goes_over_a_fused_layers_activation_again() -> None:
    for activation, kernel in (("relu", "torch.relu_"), ("gelu", "torch.gelu")):
        product = priced(activation)["aten._addmm_activation"]
        plain = program("linear", Variant.parse(FP32 + "linear"), rows=24, n=48, k=32)
        rest = program(
            "elementwise", Variant("fp32", "fp32", kernel), rows=24, cols=48, inputs=1
        )  # fmt: skip
        for device, parts in ((GPU, [plain]), (CPU, [plain, rest])):
            book = replay_book(device, "roofline")
            alone = sum(book.cost(part, device.name).mean_s for part in parts)
            assert book.cost(product, device.name).mean_s == pytest.approx(alone)


def test_a_fused_layers_attention_is_what_torch_runs_on_a_processor() -> None:
    attention = priced()["aten.scaled_dot_product_attention"]
    module, given = Encoder().eval(), torch.rand(2, 12, 32)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        module(given)
    calls = Counter(event.name.removeprefix("aten::") for event in seen.events())
    # Heads laid out with a bias, and put together again.
    ran = [calls["bmm"], calls["_softmax"], calls["_transform_bias_rescale_qkv"] + calls["clone"]]
    parts = Counter[str]()
    for part, count in within_parts(attention, apart=True):
        parts[part.op] += count
    assert [parts["matmul"], parts["softmax"], parts["elementwise"]] == ran == [2, 1, 2]
    products = sum(p.flops * n for p, n in within_parts(attention, apart=True) if p.op == "matmul")
    assert products == attention.flops == 2 * 2 * (2 * 4) * 12 * 12 * 8


def test_a_fused_layers_attention_is_one_kernel_of_a_gpu() -> None:
    attention = priced()["aten.scaled_dot_product_attention"]
    shape = [torch.rand(2, 4, 12, 8)] * 3
    plain = one(steps_of(F.scaled_dot_product_attention, *shape), "attention")
    assert within_parts(attention, apart=False) == [(plain, 1)]
    book = replay_book(GPU, "roofline")
    assert book.cost(attention, GPU.name) == book.cost(plain, GPU.name)


def test_a_softmax_under_a_mask_goes_by_its_elements_on_a_processor() -> None:
    padding = torch.zeros(2, 12, dtype=torch.bool)
    layer = Encoder().layer
    given = {"src": torch.rand(2, 12, 32), "src_key_padding_mask": padding}
    work = one(lower(capture(layer, given, eager=True)), "softmax")
    plain = program("softmax", Variant.parse(FP32 + "softmax"), rows=96, cols=12)
    book = replay_book(CPU, "roofline")
    # Measured at 2.5 to 3.7 ns an element, of 0.9 us a call.
    elements = (book.cost(work, CPU.name).mean_s - launch_s(CPU)) / (96 * 12) / launch_s(CPU)
    assert 2.5 / 900 < elements < 3.7 / 900
    assert book.cost(plain, CPU.name).mean_s < book.cost(work, CPU.name).mean_s
