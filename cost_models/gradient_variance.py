"""How much variance a low-precision operator adds to the gradients of a training step.

Rounding to nearest with step ``q`` leaves an error of variance ``q^2 / 12`` on a residue that is
uniform (theory). For int8 ``q`` is the largest magnitude of the row over 127; for a float with
``k`` stored mantissa bits it is ``2^(e - k)`` at exponent ``e``, number by number. Errors of two
operands are independent, so that a product ``A[m, k] B[k, n]`` with error variances ``a`` and
``b`` gets

    sum_k (sum_m a) (sum_n B^2) + (sum_m A^2) (sum_n b) + (sum_m a) (sum_n b)

in all (`product_variance`). With input ``v[R, K]``, weight ``w[N, K]`` and gradient ``g[R, N]`` of
the output, a linear's products are ``v w^T`` (forward), ``g w`` (input gradient) and ``g^T v``
(weight gradient). A convolution is treated as the same products over channels, its positions taken
as alike.

Two indicators come from these statistics:

- `propagated`: the relative error of the result, ``forward / |z|^2``, reaches the gradients of all
  operators that read it; that of the input gradient reaches those before; the weight gradient's
  stands by itself. All three are then in units of squared gradients.
- `depth_weighted`: QSync's (arXiv 2407.02327, released code), ``gamma (L - d) forward + d weight``
  with depth ``d`` of at most ``L``; squared norms, exponents number by number and rounding to
  nearest in place of the released code's slips.

Statistics are means over calibration batches at fp32, with unscaled gradients. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.datasets.training_variant import TrainingVariant
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Stored mantissa bits (IEEE 754, bfloat16).
MANTISSA_BITS = {"fp16": 10, "bf16": 7}
#: Largest int8 magnitude.
INT8_LIMIT = 127

Batch = tuple[tuple[Any, ...], Any]
Loss = Callable[[Any, Any], Any]
Omega = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Added:
    """Variance that one variant of one module adds, summed over a tensor's elements.

    Attributes:
        forward: to the result.
        input_gradient: to the gradient of the input.
        weight_gradient: to the gradient of the weight.
    """

    forward: float
    input_gradient: float
    weight_gradient: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Means over calibration batches.

    Attributes:
        added: by module, then by the variant's text.
        output: squared norm of each module's result.
        input_gradient: squared norm of the gradient of its input.
        weight_gradient: squared norm of the gradient of its weight.
    """

    added: Mapping[str, Mapping[str, Added]]
    output: Mapping[str, float]
    input_gradient: Mapping[str, float]
    weight_gradient: Mapping[str, float]


def rounding_variance(x: Tensor, dtype: str) -> Tensor:
    """``q^2 / 12`` of every number of ``x`` when it is rounded to ``dtype``.

    Args:
        x: any shape; int8 has one scale for each index of the first dimension.
        dtype: ``fp32`` (nothing), ``bf16``, ``fp16`` or ``int8``.

    Raises:
        SpecError: another dtype.
    """
    import torch

    if dtype == "fp32":
        return torch.zeros_like(x)
    if dtype == "int8":
        largest = x.abs().flatten(1).amax(1) if x.dim() > 1 else x.abs().amax()
        step = (largest / INT8_LIMIT).reshape(-1, *[1] * (x.dim() - 1))
        return (step.square() / 12).expand_as(x)
    if dtype not in MANTISSA_BITS:
        raise SpecError("dtype", got=dtype, expected="fp32, bf16, fp16 or int8")
    _, exponent = torch.frexp(x)  # x = m 2^exponent with 0.5 <= |m| < 1
    step = torch.ldexp(torch.ones_like(x), exponent - 1 - MANTISSA_BITS[dtype])
    return torch.where(x == 0, 0.0, step.square() / 12)


def product_variance(a: Tensor, a_error: Tensor, b: Tensor, b_error: Tensor) -> float:
    """Summed variance of ``a[M, K] @ b[K, N]``; see the module. Errors are variances."""
    left, left_error = a.square().sum(0), a_error.sum(0)
    right, right_error = b.square().sum(1), b_error.sum(1)
    return float((left_error * right + left * right_error + left_error * right_error).sum())


def gradient_statistics(
    module: torch.nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    variants: Mapping[str, Mapping[str, TrainingVariant]],
) -> Statistics:
    """Run calibration batches and gather what every variant of every module would add.

    Args:
        module: fp32; its gradients are set to ``None`` afterwards.
        batches: (inputs, target) each.
        loss: of (output, target).
        variants: by module path, then by text.

    Raises:
        SpecError: no batch, or numbers that are not finite.
    """
    gathered = _Gathered(variants)
    parts = dict(module.named_modules())
    handles = [
        parts[name].register_forward_hook(gathered.hook(name, parts[name])) for name in variants
    ]
    training, count = module.training, 0
    module.train()
    squared: dict[str, float] = dict.fromkeys(variants, 0.0)
    try:
        for inputs, target in batches:
            module.zero_grad(set_to_none=True)
            value = loss(module(*inputs).float(), target)
            value.backward()
            count += 1
            for name in variants:
                gradient: Any = parts[name].weight.grad
                if gradient is not None:
                    squared[name] += float(gradient.square().sum())
    finally:
        for handle in handles:
            handle.remove()
        module.zero_grad(set_to_none=True)
        module.train(training)
    if not count:
        raise SpecError("calibration batches", got=0, expected="at least one")
    return gathered.means(count, squared)


class _Gathered:
    """Sums over batches, filled by hooks."""

    def __init__(self, variants: Mapping[str, Mapping[str, TrainingVariant]]) -> None:
        self.variants = variants
        self.sums = {
            name: {text: np.zeros(3) for text in found} for name, found in variants.items()
        }
        self.norms = {name: np.zeros(2) for name in variants}

    def hook(self, name: str, part: torch.nn.Module) -> Callable[..., None]:
        """A forward hook that follows a module's result to its gradient."""

        def forward(_: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            x = inputs[0].detach()

            def backward(g: Tensor) -> None:
                self._add(name, part, x, out.detach(), g.detach())

            if out.requires_grad:
                out.register_hook(backward)

        return forward

    def _add(self, name: str, part: torch.nn.Module, x: Tensor, out: Tensor, g: Tensor) -> None:
        products = _products(part, x, g)
        gx = products.input_gradient()
        self.norms[name] += [float(out.square().sum()), float(gx.square().sum())]
        for text, variant in self.variants[name].items():
            added = products.added(variant)
            added[0] += float(rounding_variance(_rows(out), variant.output).sum())
            added[1] += float(rounding_variance(_rows(gx), variant.backward).sum())
            self.sums[name][text] += added

    def means(self, count: int, squared: Mapping[str, float]) -> Statistics:
        """Statistics of ``count`` batches."""
        for name, found in self.sums.items():
            values = [*self.norms[name], squared[name], *np.ravel(list(found.values()))]
            if not np.isfinite(values).all():
                raise SpecError(
                    f"calibration of {name}", got="numbers that are not finite",
                    expected="finite activations and gradients",
                    fix="check the data and the weights, or lower the loss scale",
                )  # fmt: skip
        return Statistics(
            added={
                name: {
                    text: Added(*(float(value) for value in sums / count))
                    for text, sums in found.items()
                }
                for name, found in self.sums.items()
            },
            output={name: float(norms[0]) / count for name, norms in self.norms.items()},
            input_gradient={name: float(norms[1]) / count for name, norms in self.norms.items()},
            weight_gradient={name: value / count for name, value in squared.items()},
        )


@dataclass(frozen=True, slots=True)
class _Products:
    """A linear's three products; also a convolution's, with channels for features.

    Attributes:
        v: ``[R, K]`` input; w: ``[N, K]`` weight; g: ``[R, N]`` gradient of the result.
        reach: how many results one number of the input takes part in (a convolution's kernel).
        gradient: gradient of the input.
    """

    v: Tensor
    w: Tensor
    g: Tensor
    gradient: Tensor
    reach: float = 1.0
    looked_up: bool = False

    def input_gradient(self) -> Tensor:
        return self.gradient

    def added(self, variant: TrainingVariant) -> Any:
        """Variances of forward, input gradient and weight gradient, without rounded results."""
        # A gradient is rounded to the result's dtype by whoever hands it back.
        low = variant.output if variant.backward == "fp32" else variant.backward
        g_error = rounding_variance(self.g, low)
        if self.looked_up:
            return np.array([0.0, 0.0, float(g_error.sum())])
        v_error = rounding_variance(self.v, variant.forward)
        w_error = rounding_variance(self.w, variant.forward)
        return np.array(
            [
                self.reach * product_variance(self.v, v_error, self.w.t(), w_error.t()),
                self.reach * product_variance(self.g, g_error, self.w, w_error),
                product_variance(self.g.t(), g_error.t(), self.v, v_error),
            ]
        )


def _products(part: torch.nn.Module, x: Tensor, g: Tensor) -> _Products:
    import torch

    weight: Any = part.weight
    w: Tensor = weight.detach()
    if isinstance(part, torch.nn.Embedding):
        rows = g.reshape(-1, g.shape[-1])
        return _Products(rows, rows, rows, torch.zeros_like(rows), looked_up=True)
    if isinstance(part, torch.nn.Conv2d):
        gx = torch.nn.grad.conv2d_input(
            x.shape,
            w,
            g,
            part.stride,
            part.padding,
            part.dilation,
            part.groups,  # type: ignore[arg-type]
        )
        # Positions are rows. A number of the input meets every tap that the stride leaves, and
        # only the filters of its group.
        v = x.transpose(1, -1).reshape(-1, w.shape[1])
        wide = w.transpose(1, -1).reshape(-1, w.shape[1])
        rows = g.transpose(1, -1).reshape(-1, g.shape[1])
        reach = 1.0 / (float(np.prod(part.stride)) * part.groups)
        return _Convolved(v, wide, rows, gx, reach, taps=w.shape[2] * w.shape[3])
    return _Products(_rows(x), w, _rows(g), _rows(g) @ w)


@dataclass(frozen=True, slots=True)
class _Convolved(_Products):
    """Products of a convolution, positions taken as alike.

    Attributes:
        taps: positions of the kernel.
    """

    taps: int = 1

    def added(self, variant: TrainingVariant) -> Any:
        """As for a linear, from mean squares over positions."""
        low = variant.output if variant.backward == "fp32" else variant.backward
        v_error, g_error = (
            rounding_variance(self.v, variant.forward), rounding_variance(self.g, low)
        )  # fmt: skip
        w_error = rounding_variance(self.w, variant.forward)
        forward = self.reach * product_variance(self.v, v_error, self.w.t(), w_error.t())
        weight = float(self.w.square().sum()), float(w_error.sum())
        squares = float(self.g.square().sum()), float(g_error.sum())
        back = (squares[1] * weight[0] + (squares[0] + squares[1]) * weight[1]) / self.g.shape[1]
        per_row = 1.0 / self.v.shape[0]  # positions times groups
        values = float(self.v.square().sum()), float(v_error.sum())
        mixed = squares[1] * values[0] + (squares[0] + squares[1]) * values[1]
        return np.array([forward, back, self.taps * per_row * mixed])


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def propagated(
    statistics: Statistics, after: Mapping[str, Sequence[str]], gamma: float = 1.0
) -> Omega:
    """Variance added to all weight gradients; see the module.

    Args:
        statistics: of calibration batches.
        after: modules that read a module's result, directly or not.
        gamma: weight of the forward part.

    Returns:
        Squared gradient units, by module and variant.
    """
    squares = statistics.weight_gradient
    omega: Omega = {}
    for name, found in statistics.added.items():
        later = sum(squares[other] for other in after[name] if other in squares)
        earlier = sum(squares[other] for other in squares if name in after[other])
        omega[name] = {
            text: gamma * later * _ratio(added.forward, statistics.output[name])
            + earlier * _ratio(added.input_gradient, statistics.input_gradient[name])
            + added.weight_gradient
            for text, added in found.items()
        }
    return omega


def depth_weighted(statistics: Statistics, depth: Mapping[str, int], gamma: float = 1.0) -> Omega:
    """QSync's indicator, mended; see the module.

    Args:
        statistics: of calibration batches.
        depth: of each module.
        gamma: weight of the forward part.
    """
    most = max(depth.values(), default=0)
    return {
        name: {
            text: gamma * (most - depth[name]) * added.forward + depth[name] * added.weight_gradient
            for text, added in found.items()
        }
        for name, found in statistics.added.items()
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
