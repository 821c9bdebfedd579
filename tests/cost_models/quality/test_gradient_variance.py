"""Indicators against what rounding really does to gradients, and against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foreplan.cost_models.quality.gradient_variance import (
    Calibration,
    depth_weighted,
    first_order,
    gradient_variance,
)
from foreplan.cost_models.quality.rounding import rounding_variance
from foreplan.cost_models.quality.weight_indicators import (
    hessian,
    hutchinson_traces,
    random_order,
    uniform,
    weight_change,
)
from foreplan.datasets.kernels.training_variant import TRAINING_VARIANTS
from foreplan.errors import SpecError

TENSOR = "fp32/int8/torch.int_mm+int8@tensor"
LINEAR = {t: v for t, v in TRAINING_VARIANTS.items() if "embedding" not in t and "conv" not in t}
INT8_ALL = "fp32/int8/torch.int_mm+int8"
FP32, BF16 = "fp32/fp32/torch.linear", "fp32/bf16/torch.linear"


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(),
                         nn.Linear(24, 8))  # fmt: skip


def batches(count: int) -> list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    torch.manual_seed(1)
    return [((torch.randn(32, 16),), torch.randn(32, 8)) for _ in range(count)]


VARIANTS = dict.fromkeys(("0", "2", "4"), LINEAR)


def test_a_gradient_rounded_with_one_scale_is_followed_with_its_bias() -> None:
    """Of the last layer's output: rare classes' gradients become 0, all in the same direction."""
    torch.manual_seed(2)
    model, inputs = (
        nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 256)),
        torch.randn(64, 16),
    )
    target = torch.randint(0, 4, (64,))
    found = first_order(Calibration(
        model, [((inputs,), target)], F.cross_entropy,
        {"2": {t: TRAINING_VARIANTS[t] for t in (INT8_ALL, TENSOR)}},
    ))["2"]  # fmt: skip

    out = model(inputs)
    (gradient,) = torch.autograd.grad(F.cross_entropy(out, target), out, retain_graph=True)
    step = gradient.abs().max() / 127
    rounded = (gradient / step).round() * step
    assert (rounded == 0).float().mean() > 0.5
    parameters = [p for p in model.parameters() if p is not model[2].bias]
    exact, changed = (
        torch.cat([g.flatten() for g in torch.autograd.grad(out, parameters, x, retain_graph=True)])
        for x in (gradient, rounded)
    )
    bias = float((changed - exact).square().sum())
    assert found[TENSOR] > bias > 0.9 * found[TENSOR]
    assert found[TENSOR] > 20 * found[INT8_ALL]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
def test_rounding_variance_is_the_mean_square_error(dtype: str) -> None:
    x = torch.randn(200, 500, generator=torch.Generator().manual_seed(0))
    if dtype == "int8":
        step = x.abs().amax(-1, keepdim=True) / 127
        rounded = (x / step).round() * step
    else:
        rounded = x.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).float()
    real = float((rounded - x).square().mean())
    assert float(rounding_variance(x, dtype).mean()) == pytest.approx(real, rel=0.03)
    assert not rounding_variance(x, "fp32").any()
    assert not rounding_variance(torch.zeros(2, 3), dtype).any()


def test_unknown_dtype() -> None:
    with pytest.raises(SpecError, match="int4"):
        rounding_variance(torch.ones(2, 2), "int4")


def test_first_order_effect_of_random_errors_on_all_gradients() -> None:
    """Errors of the indicator's variance, drawn at random, perturb gradients as it says."""
    module, data = network(), batches(1)
    name, text = "2", "fp32/int8/torch.int_mm+fp32"
    omega = np.mean(
        [
            gradient_variance(Calibration(module, data, mean_square, {name: LINEAR}), seed=s)[name][
                text
            ]
            for s in range(60)
        ]
    )

    def gradients() -> torch.Tensor:
        module.zero_grad()
        mean_square(module(*data[0][0]), data[0][1]).backward()
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    exact = gradients()
    random = torch.Generator().manual_seed(2)
    part = module.get_submodule(name)
    assert isinstance(part, nn.Linear)

    def noise(x: torch.Tensor) -> torch.Tensor:
        return rounding_variance(x, "int8").sqrt() * torch.randn(x.shape, generator=random)

    weight, distances = part.weight.detach().clone(), []
    handle = part.register_forward_pre_hook(lambda _, x: (x[0] + noise(x[0].detach()),))
    for _ in range(300):
        with torch.no_grad():
            part.weight.copy_(weight + noise(weight))
        distances.append(float((gradients() - exact).square().sum()))
        with torch.no_grad():
            part.weight.copy_(weight)
    handle.remove()
    assert omega == pytest.approx(np.mean(distances), rel=0.15)


def test_rounding_a_frozen_layer_is_felt_by_those_that_are_trained() -> None:
    """Its weight's part is what random errors of that weight do to the others' gradients."""
    data = batches(1)
    model = network()
    model[2].requires_grad_(False)
    found = first_order(Calibration(model, data, mean_square, VARIANTS), seed=0)
    assert all(found[name][INT8_ALL] > 0 for name in VARIANTS)
    assert not model[2].weight.requires_grad
    # Fewer gradients are summed over than where it is trained as well, and none is made up.
    whole = first_order(Calibration(network(), data, mean_square, VARIANTS), seed=0)
    assert found["0"][INT8_ALL] < whole["0"][INT8_ALL]


def test_a_loss_that_is_linear_has_effects_too() -> None:
    """The gradient of a sum is a constant, whose rounding still reaches the weights'."""
    seen = gradient_variance(
        Calibration(network(), batches(1), lambda out, _: (out * torch.pi).sum(), VARIANTS), seed=0
    )
    assert all(seen[name][INT8_ALL] > 0 for name in VARIANTS)


def test_full_precision_adds_nothing_and_fewer_bits_add_more() -> None:
    omega = gradient_variance(Calibration(network(), batches(2), mean_square, VARIANTS))
    for rows in omega.values():
        assert rows[FP32] == 0.0
        assert rows[BF16] > 0.0
        assert rows["fp32/int8/torch.int_mm+fp32"] > 0.0
    assert omega == gradient_variance(Calibration(network(), batches(2), mean_square, VARIANTS))


def test_gradients_are_left_alone() -> None:
    module = network().eval()
    gradient_variance(Calibration(module, batches(1), mean_square, VARIANTS))
    assert not module.training
    assert all(p.grad is None for p in module.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_not_finite_statistics_name_the_module() -> None:
    module = network()
    with torch.no_grad():
        module.get_submodule("2").weight[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(SpecError, match="calibration of"):
        gradient_variance(Calibration(module, batches(1), mean_square, VARIANTS))
    with pytest.raises(SpecError, match="at least one"):
        gradient_variance(Calibration(network(), [], mean_square, VARIANTS))


def test_depth_weighted_is_the_published_formula_mended() -> None:
    """One linear of known norms; depth 0 leaves the forward part, the last depth the backward."""
    torch.manual_seed(0)
    module, data = nn.Sequential(nn.Linear(16, 8)), batches(1)
    (x,), target = data[0]
    weight = module[0].weight.detach()
    out = module(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(mean_square(out, target), out)
    v, w, e = (rounding_variance(t, "bf16").sum() for t in (x, weight, g))
    squares = [t.square().sum() for t in (x, weight, g)]
    forward = squares[1] * v + squares[0] * w
    backward = squares[2] * v + squares[0] * e
    variants = {"0": {BF16: TRAINING_VARIANTS[BF16]}}
    first = depth_weighted(
        Calibration(module, data, mean_square, variants), {"0": 0, "other": 3}, gamma=2.0
    )
    assert first["0"][BF16] == pytest.approx(float(2.0 * 3 * forward), rel=1e-5)
    last = depth_weighted(Calibration(module, data, mean_square, variants), {"0": 3})
    assert last["0"][BF16] == pytest.approx(float(3 * backward), rel=1e-5)


def test_hutchinson_finds_the_trace_of_a_quadratic() -> None:
    """Loss mean (x w - t)^2: the Hessian's trace is 2 sum x^2 / samples for each output."""
    module, data = nn.Sequential(nn.Linear(16, 1, bias=False)), batches(1)
    x = data[0][0][0]
    target = torch.zeros(32, 1)
    traces = [
        hutchinson_traces(module, [((x,), target)], mean_square, ["0"], seed)["0"]
        for seed in range(100)
    ]
    assert np.mean(traces) == pytest.approx(float(2 * x.square().sum() / 32), rel=0.1)


def test_indicators_of_weights() -> None:
    module = network()
    traces = {"0": 3.0, "2": -1.0, "4": 2.0}
    second = hessian(module, VARIANTS, traces)
    assert second["2"][BF16] == 0.0
    assert second["0"]["fp32/int8/torch.int_mm+bf16"] > second["0"][BF16] > 0.0
    assert second["0"][FP32] == 0.0
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4.0)
    scaled = weight_change(module, VARIANTS)
    assert scaled["0"] == pytest.approx(weight_change(network(), VARIANTS)["0"])
    assert uniform(VARIANTS)["0"][BF16] == 1.0
    assert random_order(VARIANTS, 3) == random_order(VARIANTS, 3) != random_order(VARIANTS, 4)
