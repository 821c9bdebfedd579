"""How much variance a low-precision operator adds to the gradients of a training step.

Rounding to nearest with step ``q`` leaves an error of variance ``q^2 / 12`` on a residue that is
uniform (theory). For int8 ``q`` is the largest magnitude of the row over 127; for a float with
``k`` stored mantissa bits it is ``2^(e - k)`` at exponent ``e``, number by number.

A variant rounds its input ``v``, its weight ``w``, its result ``z``, the gradient ``g`` of the
result and the gradient ``d`` of the input. `gradient_variance` is what these errors do to ``G``,
the gradients of all parameters, in first order: with random signs ``u`` (Hutchinson's estimator),
``E_u (d(u.G) / dx_i)^2 = sum_p (dG_p / dx_i)^2``, so that one double backward pass gives the effect
of an error anywhere on all gradients:

    omega = gamma (Var(v).S_v + Var(w).S_w + Var(z).S_z) + Var(g).S_g + Var(d).S_d
    S_x   = (d(u.G) / dx)^2, element by element

An input's and a weight's error act on the forward product and on the backward products at once,
which ``S`` takes into account; so it does that one weight's error meets every row. A look-up's
result is rounded row by row of the table: an error of ``w``. First order leaves out that an error
can move a number across a kink (relu) or change which one is largest (max pooling).

`depth_weighted` is QSync's indicator (arXiv 2407.02327, released code), which puts depth in place
of the effect, at depth ``d`` of at most ``L``:

    omega = gamma (L - d) (|w|^2 Var(v) + |v|^2 Var(w)) + d (|g|^2 Var(v) + |v|^2 Var(g))

with sums over elements; squared norms, exponents number by number and rounding to nearest stand in
place of the code's slips. Both are means over calibration batches at fp32, of unscaled gradients.
Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
Variants = Mapping[str, Mapping[str, TrainingVariant]]


def rounding_variance(x: Tensor, dtype: str) -> Tensor:
    """``q^2 / 12`` of every number of ``x`` when it is rounded to ``dtype``.

    Args:
        x: any shape; int8 has one scale for each row ``x[..., :]``.
        dtype: ``fp32`` (nothing), ``bf16``, ``fp16`` or ``int8``.

    Raises:
        SpecError: another dtype.
    """
    import torch

    if dtype == "fp32":
        return torch.zeros_like(x)
    if dtype == "int8":
        step = x.abs().amax(-1, keepdim=True) / INT8_LIMIT
        return (step.square() / 12).expand_as(x)
    if dtype not in MANTISSA_BITS:
        raise SpecError("dtype", got=dtype, expected="fp32, bf16, fp16 or int8")
    _, exponent = torch.frexp(x)  # x = m 2^exponent with 0.5 <= |m| < 1
    step = torch.ldexp(torch.ones_like(x), exponent - 1 - MANTISSA_BITS[dtype])
    return torch.where(x == 0, 0.0, step.square() / 12)


def gradient_variance(
    module: torch.nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    variants: Variants,
    *,
    gamma: float = 1.0,
    seed: int = 0,
) -> Omega:
    """First-order variance that each variant of each module adds to all gradients.

    Args:
        module: fp32.
        batches: (inputs, target) each.
        loss: of (output, target).
        variants: by module path, then by text.
        gamma: weight of the forward part; 1 = the derivation's.
        seed: of the random signs.

    Returns:
        Squared gradient units, by module and variant.

    Raises:
        SpecError: no batch, or numbers that are not finite.
    """
    found = _means(module, batches, loss, variants, seed)
    return {
        name: {text: gamma * forward + backward for text, (forward, backward) in rows.items()}
        for name, rows in found.items()
    }


def depth_weighted(
    module: torch.nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    variants: Variants,
    depth: Mapping[str, int],
    *,
    gamma: float = 1.0,
) -> Omega:
    """QSync's indicator, mended; arguments as of `gradient_variance`.

    Args:
        module: fp32.
        batches: (inputs, target) each.
        loss: of (output, target).
        variants: by module path, then by text.
        depth: of each module.
        gamma: weight of the forward part.

    Raises:
        SpecError: no batch, or numbers that are not finite.
    """
    found = _means(module, batches, loss, variants, None)
    most = max(depth.values(), default=0)
    return {
        name: {
            text: gamma * (most - depth[name]) * forward + depth[name] * backward
            for text, (forward, backward) in rows.items()
        }
        for name, rows in found.items()
    }


# Calibration --------------------------------------------------------------------------------------


def _means(
    module: torch.nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    variants: Variants,
    seed: int | None,
) -> dict[str, dict[str, tuple[float, float]]]:
    """(forward, backward) means over batches; by effect on all gradients where a seed is given."""
    import torch

    random = None if seed is None else torch.Generator().manual_seed(seed)
    parts = {name: part for name, part in module.named_modules() if name in variants}
    sums = {name: {text: np.zeros(2) for text in rows} for name, rows in variants.items()}
    count, training = 0, module.training
    module.train()
    try:
        for batch in batches:
            count += 1
            for call in _calls(module, parts, batch, loss, random):
                for text, variant in variants[call.name].items():
                    sums[call.name][text] += call.added(variant, weighted=random is not None)
    finally:
        module.train(training)
    if not count:
        raise SpecError("calibration batches", got=0, expected="at least one")
    for name, rows in sums.items():
        if not np.isfinite(list(rows.values())).all():
            raise SpecError(
                f"calibration of {name}", got="numbers that are not finite",
                expected="finite activations and gradients",
                fix="check the data and the weights",
            )  # fmt: skip
    return {
        name: {t: (float(a[0]) / count, float(a[1]) / count) for t, a in rows.items()}
        for name, rows in sums.items()
    }


@dataclass(slots=True)
class _Call:
    """One call of a module in a calibration batch: its tensors and the effects of errors in them.

    Attributes:
        name: of the module.
        looked_up: it is an embedding, whose input is not rounded.
        tensors: ``v``, ``w``, ``z``, ``g`` and ``d``, as far as there are such.
        effects: ``S`` of each; empty where effects are not asked for.
    """

    name: str
    looked_up: bool
    tensors: dict[str, Tensor]
    effects: dict[str, Tensor]

    def added(self, variant: TrainingVariant, *, weighted: bool) -> Any:
        """What a variant adds in the forward and in the backward part."""
        # Whoever hands a gradient back rounds it to the dtype of the result.
        low = variant.output if variant.backward == "fp32" else variant.backward
        dtypes = {
            "v": variant.forward,
            "w": variant.output if self.looked_up else variant.forward,
            "z": variant.output,
            "g": low,
            "d": variant.backward,
        }
        errors = {
            word: rounding_variance(tensor, dtypes[word])
            for word, tensor in self.tensors.items()
            if dtypes[word] != "fp32"
        }
        if weighted:
            effect = {
                word: float((error * self.effects[word]).sum())
                for word, error in errors.items()
                if word in self.effects
            }
            forward = sum(effect.get(word, 0.0) for word in "vwz")
            return np.array([forward, sum(effect.get(word, 0.0) for word in "gd")])
        total = {word: float(error.sum()) for word, error in errors.items()}
        norm = {word: float(tensor.square().sum()) for word, tensor in self.tensors.items()}
        v, w, g = (total.get(word, 0.0) for word in "vwg")
        if self.looked_up:  # only the result and its gradient are rounded
            return np.array([w, g])
        return np.array([norm["w"] * v + norm["v"] * w, norm["g"] * v + norm["v"] * g])


def _calls(
    module: torch.nn.Module,
    parts: Mapping[str, torch.nn.Module],
    batch: Batch,
    loss: Loss,
    random: torch.Generator | None,
) -> list[_Call]:
    """Forward and backward pass of one batch, the latter twice where effects are asked for."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    seen: list[tuple[str, Any, Tensor, Tensor]] = []

    def own_input(part: Any, inputs: tuple[Tensor, ...]) -> Any:
        # A node of its own, so that effects by way of other readers of the tensor stay apart.
        x = inputs[0]
        if not x.is_floating_point():
            return None
        return (x.view_as(x) if x.requires_grad else x.detach().requires_grad_(), *inputs[1:])

    def keep(name: str) -> Callable[..., None]:
        def hook(part: Any, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            seen.append((name, part, inputs[0], out))

        return hook

    handles = [part.register_forward_pre_hook(own_input) for part in parts.values()]
    handles += [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    try:
        # The other kernels of attention have no second derivative.
        with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            value = loss(module(*batch[0]).float(), batch[1])
            parameters = [p for p in module.parameters() if p.requires_grad]
            asked: list[Any] = [out for *_, out in seen]
            asked += [x for _, _, x, _ in seen if x.is_floating_point()]
            found = torch.autograd.grad(
                value, [*asked, *parameters], create_graph=random is not None, allow_unused=True
            )
            inner: Any = 0.0
            if random is not None:
                for gradient in found[len(asked) :]:
                    if gradient is not None:
                        signs = torch.randint(0, 2, gradient.shape, generator=random) * 2 - 1
                        inner = inner + (gradient * signs.to(gradient)).sum()
    finally:
        for handle in handles:
            handle.remove()
    backward = iter(found[len(seen) : len(asked)])
    calls: list[_Call] = []
    watched: list[tuple[_Call, str, Any]] = []
    for (name, part, x, out), g in zip(seen, found, strict=False):
        looked_up = not x.is_floating_point()
        tensors: dict[str, Any] = {"w": part.weight, "g": g}
        if not looked_up:
            tensors |= {"v": x, "z": out, "d": next(backward)}
        call = _Call(name, looked_up, {}, {})
        for word, tensor in tensors.items():
            if tensor is not None:
                call.tensors[word] = tensor.detach()
                watched.append((call, word, tensor))
        calls.append(call)
    if random is not None:
        effects = torch.autograd.grad(inner, [t for *_, t in watched], allow_unused=True)
        for (call, word, _), effect in zip(watched, effects, strict=True):
            if effect is not None:
                call.effects[word] = effect.detach().square()
    return calls
