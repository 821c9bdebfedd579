"""What errors across kinks do to gradients: against drawn errors and real low precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foreplan.cost_models.quality.gradient_variance import (
    Calibration,
    first_order,
    gradient_variance,
)
from foreplan.cost_models.quality.kinks import KinkRecorder, crossing
from foreplan.datasets.kernels.training_variant import TRAINING_VARIANTS

BF16 = "fp32/bf16/torch.linear"
LINEAR = {BF16: TRAINING_VARIANTS[BF16]}


def recorded(run: nn.Module, x: torch.Tensor) -> KinkRecorder:
    recorder = KinkRecorder()
    with recorder:
        run(x.requires_grad_())
    return recorder


@pytest.mark.parametrize(
    "run",
    [
        nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(0.25), nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=2, padding=1),
    ],
)  # fmt: skip
def test_expected_jumps_are_those_of_drawn_errors(run: nn.Module) -> None:
    """Mean squared change of the input's gradient, for a unit effect, over normal errors."""
    random = torch.Generator().manual_seed(0)
    x, deviation = torch.randn(4, 3, 12, 12, generator=random), 0.05

    def gradient(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        leaf = given.clone().requires_grad_()
        (found,) = torch.autograd.grad((run(leaf * 1) * weight).sum(), leaf)
        return found

    (kink,) = recorded(nn.Sequential(nn.Identity(), run), x.clone() * 1).found
    weight = torch.randn(kink.out.shape, generator=random)
    curve = kink.curve(weight, torch.ones_like(x))
    exact = gradient(x, weight)
    drawn = np.mean(
        [
            float((gradient(x + deviation * torch.randn(x.shape, generator=random), weight)
                   - exact).square().sum())
            for _ in range(40)
        ]
    )  # fmt: skip
    assert crossing(curve, deviation**2) == pytest.approx(drawn, rel=0.15)
    assert crossing(curve, 0.0) == 0.0


def test_functions_without_kinks_and_inputs_without_gradients_are_left_alone() -> None:
    assert not recorded(nn.Sequential(nn.GELU(), nn.Tanh(), nn.AvgPool2d(2)),
                        torch.randn(2, 1, 4, 4)).found  # fmt: skip
    with KinkRecorder() as recorder:
        values, places = F.max_pool2d(torch.randn(1, 1, 4, 4, requires_grad=True), 2,
                                      return_indices=True)  # fmt: skip
        F.relu(torch.randn(3))
    assert values.shape == places.shape == (1, 1, 2, 2)
    assert len(recorder.found) == 1


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight)  # type: ignore[arg-type]
    return nn.Sequential(*layers, nn.Linear(64, 8))


def test_kinks_are_most_of_what_rounding_does_to_a_perceptron() -> None:
    """Really rounded to bf16, one linear at a time; first order misses a factor of ten."""
    module, random = perceptron(), torch.Generator().manual_seed(1)
    data = [
        ((torch.randn(64, 64, generator=random),), torch.randint(0, 8, (64,), generator=random))
        for _ in range(12)
    ]
    names = ("2", "4", "6", "8")
    variants = dict.fromkeys(names, LINEAR)
    whole = gradient_variance(Calibration(module, data[:4], F.cross_entropy, variants))
    smooth = first_order(Calibration(module, data[:4], F.cross_entropy, variants))
    for name in names:
        measured = np.mean([_perturbed(module, name, batch) for batch in data[4:]])
        assert 0.4 < whole[name][BF16] / measured < 2.5
        if name != "8":  # no kink comes after it
            assert smooth[name][BF16] < 0.1 * measured
    assert smooth["8"] == whole["8"]


def _perturbed(
    module: nn.Module, name: str, batch: tuple[tuple[torch.Tensor], torch.Tensor]
) -> float:
    def gradients() -> torch.Tensor:
        module.zero_grad()
        torch.autograd.backward(F.cross_entropy(module(*batch[0]), batch[1]))
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    def low(part: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        assert isinstance(part, nn.Linear)
        words = (x.bfloat16() for x in (inputs[0], part.weight, part.bias))
        return F.linear(*words).float()

    exact = gradients()
    handle = module.get_submodule(name).register_forward_hook(low)
    distance = float((gradients() - exact).square().sum())
    handle.remove()
    return distance


class Residual(nn.Module):
    """Two linears in a row beside a way past them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.last = (nn.Linear(32, 32) for _ in range(3))
        with torch.no_grad():
            self.branch.weight.mul_(0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        out: torch.Tensor = self.last(x + self.branch(x))
        return out


def test_errors_of_a_branch_do_not_count_on_the_way_past_it() -> None:
    """A sum gives one gradient to both terms; rounding it for one leaves the other as it was."""
    module, random = Residual(), torch.Generator().manual_seed(1)
    batch = ((torch.randn(64, 32, generator=random),), torch.randn(64, 32, generator=random))
    text = "fp32/int8/torch.int_mm+bf16"
    variants = {"branch": {text: TRAINING_VARIANTS[text]}}
    sample = Calibration(module, [batch], F.mse_loss, variants)
    omega = np.mean([gradient_variance(sample, seed=s)["branch"][text] for s in range(20)])
    from foreplan.planner.precision.execution.modules import apply_variants, remove_precision

    def gradients() -> torch.Tensor:
        module.zero_grad()
        torch.autograd.backward(F.mse_loss(module(*batch[0]), batch[1]))
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    exact = gradients()
    apply_variants(module, {"branch": text})
    measured = float((gradients() - exact).square().sum())
    remove_precision(module)
    assert omega == pytest.approx(measured, rel=0.4)
