"""Indicators that others use, as baselines: Hessian trace, weight change, and two without data.

`hessian` is HAWQ-V2's (Dong et al., NeurIPS 2020): mean trace of the loss's Hessian over a weight,
estimated with Hutchinson's random signs, times the squared error of rounding the weight.
`weight_change` is that error relative to the weight. Both look at weights alone. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.quality.gradient_variance import (
    Batch,
    Loss,
    Omega,
    Variants,
)
from foreplan.cost_models.quality.in_fp32 import in_fp32
from foreplan.cost_models.quality.rounding import rounding_variance
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: How far a precision is from fp32, where nothing else is known.
_STEPS = {
    "fp32": 0.0, "tf32": 0.5, "bf16": 1.0, "fp8": 1.5, "int8": 2.0, "int8-all": 2.5,
    "int8-tensor": 3.0,
}  # fmt: skip


def hutchinson_traces(
    module: torch.nn.Module, batches: Iterable[Batch], loss: Loss, names: Iterable[str], seed: int
) -> dict[str, float]:
    """Trace of the loss's Hessian over each module's weight, one random sign vector a batch.

    Raises:
        SpecError: no batch, or a trace that is not finite.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parts = dict(module.named_modules())
    weights: dict[str, Any] = {name: parts[name].weight for name in names}
    random = torch.Generator().manual_seed(seed)
    traces, count = dict.fromkeys(weights, 0.0), 0
    for inputs, target in batches:
        count += 1
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            value = loss(in_fp32(module(*inputs)), target)
            gradients = torch.autograd.grad(value, list(weights.values()), create_graph=True)
            signs = [
                (torch.randint(0, 2, g.shape, generator=random) * 2 - 1).to(g) for g in gradients
            ]
            inner = sum((g * s).sum() for g, s in zip(gradients, signs, strict=True))
            products = torch.autograd.grad(inner, list(weights.values()))  # type: ignore[arg-type]
        for name, sign, product in zip(weights, signs, products, strict=True):
            traces[name] += float((sign * product).sum())
    if not count or not np.isfinite(list(traces.values())).all():
        raise SpecError("Hessian traces", got=traces, expected="finite ones of at least one batch")
    return {name: value / count for name, value in traces.items()}


def hessian(module: torch.nn.Module, variants: Variants, traces: Mapping[str, float]) -> Omega:
    """Mean trace times squared rounding error; negative estimates count as 0."""
    errors, sizes = _errors(module, variants), _sizes(module, variants)
    return {
        name: {t: max(traces[name], 0.0) / sizes[name][0] * e for t, e in found.items()}
        for name, found in errors.items()
    }


def weight_change(module: torch.nn.Module, variants: Variants) -> Omega:
    """Squared rounding error over squared weight."""
    errors, sizes = _errors(module, variants), _sizes(module, variants)
    return {
        name: {t: e / sizes[name][1] if sizes[name][1] else 0.0 for t, e in found.items()}
        for name, found in errors.items()
    }


def uniform(variants: Variants) -> Omega:
    """Every module alike: 1 for bf16, 2 for int8."""
    return {
        name: {t: _STEPS[v.precision] for t, v in found.items()} for name, found in variants.items()
    }


def random_order(variants: Variants, seed: int) -> Omega:
    """Modules in random order of importance; lower precisions cost more."""
    weight = np.random.default_rng(seed).random(len(variants))
    return {
        name: {t: _STEPS[v.precision] * float(w) for t, v in found.items()}
        for (name, found), w in zip(variants.items(), weight, strict=True)
    }


def _errors(module: torch.nn.Module, variants: Variants) -> Omega:
    """Expected squared error of rounding each weight as a variant does."""
    parts = dict(module.named_modules())
    result: Omega = {}
    for name, found in variants.items():
        weight: Any = parts[name].weight
        result[name] = {
            text: float(rounding_variance(weight.detach(), v.forward, v.along).sum())
            for text, v in found.items()
        }
    return result


def _sizes(module: torch.nn.Module, variants: Variants) -> dict[str, tuple[int, float]]:
    """(elements, squared norm) of each weight."""
    parts = dict(module.named_modules())
    result: dict[str, tuple[int, float]] = {}
    for name in variants:
        weight: Any = parts[name].weight
        result[name] = weight.numel(), float(weight.detach().square().sum())
    return result
