"""What kernels of GPUs take whose functions decide, and what a prediction makes of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Phase
from foreplan.cost_models.operators.slow_kernels import slow_seconds
from foreplan.cost_models.predictor import Predictor
from foreplan.datasets import device_zoo
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Program, Variant, program

H200, T4 = device_zoo.device("h200"), device_zoo.device("t4")
FP32 = "fp32"
PREDICTOR = Predictor.load()


class Of(nn.Module):
    """A function of a parameter, or of what is given."""

    def __init__(self, function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.x = function, nn.Parameter(torch.rand(shape))

    def forward(self) -> Tensor:
        return self.function(self.x)


def predicted_s(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], phase: Phase = "inference"
) -> float:
    """Seconds of a function on an H200, or of its gradient alone."""
    graph = capture(Of(function, shape), [], eager=True, training=phase == "training")
    part = "forward" if phase == "inference" else "backward"
    works = [step.work for step in lower(graph, phase) if step.part == part]
    return sum(e.mean_s for e in PREDICTOR.predict([w for w in works if isinstance(w, Program)],
                                                   H200))  # fmt: skip


def mapped(kernel: str, rows: int, cols: int) -> Program:
    variant = Variant(FP32, FP32, f"torch.{kernel}")
    return program("elementwise", variant, rows=rows, cols=cols, inputs=1)


@given(rows=st.integers(1, 1 << 16), cols=st.integers(1, 1 << 10), more=st.integers(1, 9))
def test_more_elements_never_take_less(rows: int, cols: int, more: int) -> None:
    kernels = ("digamma", "flip", "add", "im2col")
    one, other = (
        slow_seconds([mapped(kernel, size, cols) for kernel in kernels], H200)
        for size in (rows, rows + more)
    )
    assert (one <= other).all()
    assert one[2] == 0.0  # what bytes decide
    assert (one[[0, 1, 3]] > 0.0).all()


def test_fewer_units_take_longer() -> None:
    asked = [mapped("digamma", 4096, 2048)]
    (large,), (small,) = slow_seconds(asked, H200), slow_seconds(asked, T4)
    assert small > 2 * large > 0.0


def test_no_prediction_is_below_what_its_function_takes() -> None:
    asked = [mapped(kernel, 4096, 2048) for kernel in ("digamma", "mul", "bernoulli")]
    found = [estimate.mean_s for estimate in PREDICTOR.predict(asked, H200)]
    assert (np.array(found) >= slow_seconds(asked, H200) * (1 - 1e-12)).all()
    low = [estimate.low_s for estimate in PREDICTOR.predict(asked, H200)]
    assert all(lo < mean for lo, mean in zip(low, found, strict=True))


#: Seconds on an H200 (``gpu_functions.py``, scale 5, of which no figure is): a fifth of the rows.
MEASURED = {
    "digamma": (torch.digamma, (819, 2048), 19.4e-6),
    "flip": (lambda x: x.flip(0), (6, 512, 512), 6.3e-6),
    "kthvalue": (lambda x: x.kthvalue(5, -1)[0], (819, 512), 24.6e-6),
    "linear interpolation": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"), (6, 128, 2048), 195e-6,
    ),
    "softmax of middles": (lambda x: x.softmax(1), (6, 512, 512), 340e-6),
    "scan of middles": (lambda x: x.cumsum(1), (6, 512, 512), 125e-6),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_unfitted_sizes_are_within_a_factor_of_two(name: str) -> None:
    function, shape, seconds = MEASURED[name]
    assert seconds / 2 < predicted_s(function, shape) < seconds * 2


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_gone_through_across_takes_longer(dim: int) -> None:
    shape = (32, 512, 512)
    for function in (lambda x, at: x.softmax(at), lambda x, at: x.cumsum(at)):
        along = predicted_s(lambda x, f=function: f(x, -1), shape)
        across = predicted_s(lambda x, f=function: f(x, dim), shape)
        assert dim == 0 or across > 3 * along


def test_gradients_have_their_functions_too() -> None:
    shape = (1024, 1024)
    plain = predicted_s(lambda x: x * 2.0, shape, "training")
    assert predicted_s(torch.lgamma, shape, "training") > 3 * plain
