"""Errors of each variant against fp32, what it saves, and whether gradients are biased."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foreplan.datasets.kernels.quantise import quantise
from foreplan.datasets.kernels.training_linear import linear
from foreplan.datasets.kernels.training_recipe import MORE_VARIANTS, recipe
from foreplan.datasets.kernels.training_variant import TRAINING_VARIANTS
from foreplan.errors import SpecError

FP32 = "fp32/fp32/torch.linear"
BF16 = "fp32/bf16/torch.linear"
INT8 = "fp32/int8/torch.int_mm+bf16"
INT8_ALL = "fp32/int8/torch.int_mm+int8"
INT8_TENSOR = "fp32/int8/torch.int_mm+int8@tensor"
#: Relative error (Frobenius) of output, input gradient and weight gradient on normal data. bf16:
#: 2^-9 / sqrt(3) an operand and result. int8: a step of absmax / 127 (63 without VNNI) where absmax
#: is about 3.2 deviations, both operands: 0.0103 (0.015); stochastic rounding sqrt(2) times more.
ON_CPU = {
    BF16: (0.004, 0.004, 0.004),
    INT8: (0.02, 0.02, 0.025),
    "fp32/int8/torch.int_mm+fp32": (0.02, 0.02, 0.025),
    INT8_ALL: (0.02, 0.045, 0.045),
    INT8_TENSOR: (0.03, 0.05, 0.05),
    "fp32/int8/torch.int_mm+bf16@tensor": (0.03, 0.03, 0.035),
    # A step of absmax / 7, and of absmax / 3.
    **{
        f"fp32/int8/torch.int_mm+{back}@bits{bits}": (most, high, high)
        for bits, most in ((4, 0.22), (3, 0.5))
        for back, high in (("fp32", most), ("bf16", most), ("int8", 2 * most))
    },
}
ON_CUDA = {
    **ON_CPU,
    "fp32/tf32/torch.linear": (0.001, 0.001, 0.001),
    "fp32/fp16/torch.linear": (0.001, 0.001, 0.001),
    "fp32/fp8/torch.scaled_mm+bf16": (0.06, 0.06, 0.06),
    "fp32/fp8/torch.scaled_mm+fp8": (0.06, 0.06, 0.06),
    "fp32/fp8/torch.scaled_mm+fp8@tensor": (0.06, 0.06, 0.06),
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def operands(rows: int, k: int, n: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    sizes = (rows, k), (n, k), (n,), (rows, n)
    x, w, b, g = (torch.randn(size, generator=random).to(device) for size in sizes)
    return x.requires_grad_(), w.mul_(0.05).requires_grad_(), b.requires_grad_(), g


def results(text: str, x: Tensor, w: Tensor, b: Tensor, g: Tensor, seed: int = 0) -> list[Tensor]:
    y = linear(x, w, b, recipe(text), seed)
    # On this thread: cuBLAS warns where it is the first to use a GPU on autograd's own.
    with torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(y, (x, w, b), g.to(y.dtype))
    return [y.detach(), *gradients]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def check(text: str, limits: tuple[float, float, float], device: str) -> None:
    inputs = operands(96, 128, 64, device=device)
    expected, found = results(FP32, *inputs), results(text, *inputs)
    errors = [error(a, b) for a, b in zip(found, expected, strict=True)]
    for name, got, most in zip(("y", "gx", "gw"), errors, limits, strict=False):
        assert got < most, (name, errors)
        assert got > most / 1000, "too good: nothing was rounded"
    assert found[0].dtype is {"fp32": torch.float32, "bf16": torch.bfloat16,
                              "fp16": torch.float16}[recipe(text).output]  # fmt: skip
    assert found[2].dtype is found[3].dtype is torch.float32
    assert errors[3] < 0.01


@pytest.mark.parametrize("text", ON_CPU)
def test_errors_on_cpu_are_those_of_the_rounding(text: str) -> None:
    check(text, ON_CPU[text], "cpu")


@needs_gpu
@pytest.mark.parametrize("text", ON_CUDA)
def test_errors_on_a_gpu_are_those_of_the_rounding(text: str) -> None:
    check(text, ON_CUDA[text], "cuda")


def test_every_linear_variant_is_checked() -> None:
    named = {text for text in TRAINING_VARIANTS if "conv" not in text and "embed" not in text}
    more = {text for text, found in MORE_VARIANTS.items() if found.operator == "linear"}
    assert (named | more) - {FP32} == set(ON_CUDA)
    assert all("cpu" in recipe(text).kinds for text in ON_CPU)
    assert not any("cpu" in recipe(text).kinds for text in set(ON_CUDA) - set(ON_CPU))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FP32, 4 * (96 * 128 + 64 * 128)),
        (BF16, 2 * (96 * 128 + 64 * 128)),
        (INT8, 96 * 128 + 64 * 128 + 4 * (96 + 64)),
    ],
)
def test_saves_what_the_plan_promises(text: str, expected: int) -> None:
    x, w, b, _ = operands(96, 128, 64)
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(x, w, b, recipe(text))
    assert sum(held.values()) == expected


def test_the_8_bit_backward_pass_is_unbiased() -> None:
    """The mean over many seeds comes as much closer to what is estimated as chance lets it."""
    *inputs, g = operands(32, 64, 48)
    g = g.bfloat16().float()  # what either variant is given
    expected = results("fp32/int8/torch.int_mm+fp32", *inputs, g)
    runs = [results(INT8_ALL, *inputs, g, seed=2 * seed) for seed in range(100)]
    # 0.1 of a single error by the law of large numbers; the input's gradient is rounded to bf16.
    for place, share in ((1, 0.25), (2, 0.13)):
        single = error(runs[0][place], expected[place])
        mean = error(torch.stack([run[place].float() for run in runs]).mean(0), expected[place])
        assert mean < share * single, (single, mean)


def test_stochastic_rounding_repeats_with_its_seed() -> None:
    inputs = operands(32, 64, 48)
    first, again, other = (results(INT8_ALL, *inputs, seed=s)[1] for s in (4, 4, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("text", ON_CPU)
def test_batches_of_any_shape(text: str) -> None:
    x, w, b, g = operands(12, 16, 8)
    flat = results(text, x, w, b, g)
    y = linear(x.view(2, 3, 2, 16), w, b, recipe(text))
    gx, gw = torch.autograd.grad(y, (x, w), g.view(2, 3, 2, 8).to(y.dtype))
    assert torch.equal(y.detach().view(12, 8), flat[0])
    assert torch.equal(gx, flat[1])
    assert torch.equal(gw, flat[2])


@pytest.mark.parametrize("text", ON_CPU)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_few_rows(text: str, rows: int) -> None:
    inputs = operands(rows, 64, 40)
    for found, expected in zip(results(text, *inputs), results(FP32, *inputs), strict=True):
        assert error(found, expected) < (0.06 if "@bits" not in text else 1.4)


def test_nan_and_infinity_reach_the_result() -> None:
    for bad in (float("nan"), float("inf")):
        x, w, b, g = operands(8, 16, 8)
        x = x.detach().clone()
        x[3, 5] = bad
        y = linear(x, w, b, recipe(INT8))
        assert not torch.isfinite(y[3]).any()
        assert torch.isfinite(y[[0, 1, 2, 4, 5, 6, 7]]).all()
        x, _, _, _ = operands(8, 16, 8)
        g[2, 3] = bad
        gx, gw, _ = torch.autograd.grad(linear(x, w, b, recipe(INT8_ALL)), (x, w, b), g.bfloat16())
        assert not torch.isfinite(gx[2]).any()
        assert not torch.isfinite(gw).all()


def test_zeros_stay_zeros() -> None:
    _, w, _, _ = operands(8, 16, 8)
    zero = torch.zeros(8, 16)
    assert torch.equal(linear(zero, w, None, recipe(INT8)), torch.zeros(8, 8, dtype=torch.bfloat16))


def test_no_gradient_is_computed_that_nobody_needs() -> None:
    x, w, b, g = operands(8, 16, 8)
    y = linear(x.detach(), w, b.detach(), recipe(BF16))
    y.backward(g.bfloat16())
    assert w.grad is not None
    assert b.grad is None


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 40), seed=st.integers(0, 99),
    along=st.sampled_from(["row", "column", "tensor"]), noisy=st.booleans(),
)  # fmt: skip
def test_a_quantised_value_is_within_its_step(
    rows: int, columns: int, seed: int, along: str, noisy: bool
) -> None:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=random) * 10 ** (seed % 7 - 3)
    factor = None
    if along != "row":
        factor = torch.rand(rows, 1, generator=random)
    made = quantise(x, "int8", along, factor=factor, seed=seed if noisy else None)  # type: ignore[arg-type]
    expected = x if factor is None else x * factor
    apart = (made.dequantised() - expected).abs()
    share = 1.0 if noisy else 0.5
    assert bool((apart <= made.scale * share * 1.001 + 1e-30).all())
    assert int(made.values.abs().max()) <= 127


def test_what_no_device_has_is_refused() -> None:
    x, w, _, _ = operands(8, 16, 16)
    with pytest.raises(SpecError, match=r"fp8.*got 'cpu', expected one of cuda"):
        linear(x, w, None, recipe("fp32/fp8/torch.scaled_mm+fp8"))
    with pytest.raises(SpecError, match="training variant"):
        recipe("fp32/int4/magic")


@pytest.mark.parametrize("along", ["row", "column"])
def test_several_threads_compute_what_one_does(along: str) -> None:
    x = torch.randn(700, 800, generator=torch.Generator().manual_seed(0))
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            made.append(quantise(x, "int8", along, seed=5))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[0].values, made[1].values)
    assert torch.equal(made[0].scale, made[1].scale)
