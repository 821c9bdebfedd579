"""How much variance a low-precision operator adds to the gradients of a training step.

A variant rounds its input ``v``, its weight ``w``, its result ``z``, the gradient ``g`` of the
result and the gradient ``d`` of the input, each with an error of a
variance that `rounding_variance` knows. `gradient_variance` is what these errors do to ``G``,
the gradients of all parameters, in first order: with random signs ``u`` (Hutchinson's estimator),
``E_u (d(u.G) / dx_i)^2 = sum_p (dG_p / dx_i)^2``, so that one double backward pass gives the effect
of an error anywhere on all gradients:

    omega = gamma (Var(v).S_v + Var(w).S_w + Var(z).S_z) + Var(g).S_g + Var(d).S_d
    S_x   = (d(u.G) / dx)^2, element by element

An input's and a weight's error act on the forward product and on the backward products at once,
which ``S`` takes into account; so it does that one weight's error meets every row. A look-up's
result is rounded row by row of the table: an error of ``w``.

First order leaves out that an error can carry a number across a kink (of a ReLU, of max pooling),
where the gradient jumps. `kinks.py` adds what such jumps do, from the variance ``s^2`` that the
same errors have at each kink ``k`` downstream, found with random signs ``r`` likewise::

    omega += gamma sum_k F_k(s_k)      s_k^2 = mean_j sum_i Var(x_i) (dz_kj / dx_i)^2

This is the larger part in networks with ReLU; `first_order` is without it.

A ``g`` that is rounded to int8 with one scale, to nearest, is biased: what is small beside the
largest number becomes 0. Its error is known, and a backward pass is linear in ``g``, so that one of
the error alone gives what it does to ``G``, in place of ``Var(d).S_d``.

`depth_weighted` is QSync's indicator (arXiv 2407.02327, released code), which puts depth in place
of the effect, at depth ``d`` of at most ``L``:

    omega = gamma (L - d) (|w|^2 Var(v) + |v|^2 Var(w)) + d (|g|^2 Var(v) + |v|^2 Var(g))

with sums over elements; squared norms, exponents number by number and rounding to nearest stand in
place of the code's slips. All are means over calibration batches at fp32, of unscaled gradients.
Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.schedule import FloatArray
from foreplan.datasets.kernels.training_variant import TrainingVariant
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

Batch = tuple[tuple[Any, ...], Any]
Loss = Callable[[Any, Any], Any]
Variants = Mapping[str, Mapping[str, TrainingVariant]]
Omega = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What statistics are taken from.

    Attributes:
        module: fp32; its gradients and buffers' hooks are left alone.
        batches: (inputs, target) each.
        loss: of (output, target).
        variants: by module path, then by text.
    """

    module: torch.nn.Module
    batches: Iterable[Batch]
    loss: Loss
    variants: Variants


def gradient_variance(sample: Calibration, *, gamma: float = 1.0, seed: int = 0) -> Omega:
    """Variance that each variant of each module adds to all gradients, jumps at kinks included.

    Args:
        sample: what to take statistics from.
        gamma: weight of the forward part; 1 = the derivation's.
        seed: of the random signs.

    Returns:
        Squared gradient units, by module and variant.

    Raises:
        SpecError: no batch, or numbers that are not finite.
    """
    return _weighted(_means(sample, seed), lambda _: np.array([gamma, 1.0, gamma]))


def first_order(sample: Calibration, *, gamma: float = 1.0, seed: int = 0) -> Omega:
    """`gradient_variance` without jumps at kinks."""
    return _weighted(_means(sample, seed), lambda _: np.array([gamma, 1.0, 0.0]))


def depth_weighted(sample: Calibration, depth: Mapping[str, int], *, gamma: float = 1.0) -> Omega:
    """QSync's indicator, mended, from the depth of each module; else as `gradient_variance`."""
    most = max(depth.values(), default=0)
    return _weighted(
        _means(sample, None),
        lambda name: np.array([gamma * (most - depth[name]), depth[name], 0.0]),
    )


def _weighted(
    means: Mapping[str, Mapping[str, FloatArray]], weights: Callable[[str], FloatArray]
) -> Omega:
    return {
        name: {text: float(parts @ weights(name)) for text, parts in rows.items()}
        for name, rows in means.items()
    }


def _means(sample: Calibration, seed: int | None) -> dict[str, dict[str, FloatArray]]:
    """(forward, backward, kinks) means over batches; by effect on all gradients given a seed."""
    from foreplan.cost_models.quality.gradient_effects import calibrate

    variants = sample.variants
    sums = {name: {text: np.zeros(3) for text in rows} for name, rows in variants.items()}
    count = 0
    for seen in calibrate(sample, seed):
        count += 1
        for call in seen.calls:
            for text, variant in variants[call.name].items():
                sums[call.name][text][:2] += call.added(variant, weighted=seed is not None)
        for name, text, jumps in seen.jumps(variants):
            sums[name][text][2] += jumps
    if not count:
        raise SpecError("calibration batches", got=0, expected="at least one")
    for name, rows in sums.items():
        if not np.isfinite(list(rows.values())).all():
            raise SpecError(
                f"calibration of {name}", got="numbers that are not finite",
                expected="finite activations and gradients",
                fix="check the data and the weights",
            )  # fmt: skip
    return {name: {t: a / count for t, a in rows.items()} for name, rows in sums.items()}
