"""One batch of calibration: tensors of every planned module, and what errors in them do.

`calibrate` runs forward and backward pass of each batch; with a seed the backward pass twice, which
gives the effect of an error anywhere on all gradients (see `gradient_variance`), and once more for
every kink. Imports torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from foreplan.cost_models.quality.bag_of_rows import BagsOfRows
from foreplan.cost_models.quality.in_fp32 import in_fp32
from foreplan.cost_models.quality.kinks import Kink, KinkRecorder, crossing
from foreplan.cost_models.quality.rounding import int8_error, rounding_variance
from foreplan.cost_models.schedule import FloatArray
from foreplan.datasets.kernels.training_variant import TrainingVariant
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from foreplan.cost_models.quality.gradient_variance import Batch, Calibration, Loss, Variants


Along = Literal["row", "tensor"]


def rounds_once(variant: TrainingVariant) -> bool:
    """Whether the gradient of the result is rounded to int8 with one scale, to nearest."""
    return variant.along == "tensor" and variant.backward == "int8"


@dataclass(slots=True)
class Call:
    """One call of a module in a calibration batch.

    Attributes:
        name: of the module.
        looked_up: it is an embedding, whose input is not rounded.
        tensors: ``v``, ``w``, ``z``, ``g`` and ``d`` of `gradient_variance`, as far as there are
            such; the first three are nodes of the graph.
        handed: the result as it was handed on.
        effects: ``S`` of each; empty where effects are not asked for.
        rounded_once: squared change of all gradients when ``g`` is rounded to int8 with one scale.
    """

    name: str
    looked_up: bool
    tensors: dict[str, Tensor]
    handed: Tensor
    effects: dict[str, Tensor] = field(default_factory=dict)
    rounded_once: float = 0.0
    _errors: dict[tuple[str, str, str], Tensor] = field(default_factory=dict)

    def errors(self, variant: TrainingVariant) -> dict[str, Tensor]:
        """Variance of the rounding of every element, by tensor that a variant rounds."""
        # Whoever hands a gradient back rounds it to the dtype of the result.
        low = variant.output if variant.returned == "fp32" else variant.returned
        dtypes = {
            "v": variant.forward,
            "w": variant.output if self.looked_up else variant.forward,
            "z": variant.output,
            "g": low,
            "d": variant.returned if rounds_once(variant) else variant.backward,
        }
        return {
            word: self._error(word, dtypes[word], variant.along)
            for word in self.tensors
            if dtypes[word] != "fp32"
        }

    def _error(self, word: str, dtype: str, along: Along) -> Tensor:
        key = (word, dtype, along)
        if key not in self._errors:
            error = rounding_variance(self.tensors[word].detach(), dtype, along)
            # Gradients are rounded to int8 stochastically, at twice the variance.
            self._errors[key] = 2 * error if key[:2] == ("d", "int8") else error
        return self._errors[key]

    def added(self, variant: TrainingVariant, *, weighted: bool) -> FloatArray:
        """What a variant adds in the forward and in the backward part."""
        errors = self.errors(variant)
        if weighted:
            effect = {
                word: float((error * self.effects[word]).sum())
                for word, error in errors.items()
                if word in self.effects
            }
            forward, backward = (sum(effect.get(w, 0.0) for w in words) for words in ("vwz", "gd"))
            return np.array([forward, backward + self.rounded_once * rounds_once(variant)])
        total = {word: float(error.sum()) for word, error in errors.items()}
        norm = {word: float(x.detach().square().sum()) for word, x in self.tensors.items()}
        v, w, g = (total.get(word, 0.0) for word in "vwg")
        if self.looked_up:  # only the result and its gradient are rounded
            return np.array([w, g])
        return np.array([norm["w"] * v + norm["v"] * w, norm["g"] * v + norm["v"] * g])


@dataclass(slots=True)
class Calibrated:
    """One batch.

    Attributes:
        calls: of planned modules, in order.
        kinks: with the curve of what jumps at them cost.
        random: source of signs.
    """

    calls: list[Call]
    kinks: list[tuple[Kink, FloatArray]] = field(default_factory=list)
    random: torch.Generator | None = None

    def jumps(self, variants: Variants) -> Iterator[tuple[str, str, float]]:
        """What jumps at kinks cost, by module and variant; one item a call and kink."""
        watched = [
            (call, word, call.tensors[word])
            for call in self.calls for word in "vwz" if word in call.tensors
        ]  # fmt: skip
        for kink, curve in self.kinks:
            if not curve.any():
                continue
            signs = _signs(kink.x, self.random)
            found = torch.autograd.grad(
                kink.x, [x for *_, x in watched], signs, retain_graph=True, allow_unused=True
            )
            reach: dict[int, dict[str, Tensor]] = {}
            for (call, word, _x), derivative in zip(watched, found, strict=True):
                # A result that is rounded right in front of the kink keeps its sign.
                if derivative is not None and not (word == "z" and call.handed is kink.input):
                    reach.setdefault(id(call), {})[word] = derivative.square()
            for call in self.calls:
                for text, variant in variants[call.name].items():
                    errors, seen = call.errors(variant), reach.get(id(call), {})
                    total = sum(
                        float((errors[w] * s).sum()) for w, s in seen.items() if w in errors
                    )
                    yield call.name, text, crossing(curve, total / kink.x.numel())


def calibrate(sample: Calibration, seed: int | None) -> Iterator[Calibrated]:
    """Run batches in training mode and watch the modules that have variants.

    Args:
        sample: module, batches and loss.
        seed: of random signs; ``None`` leaves effects and kinks out.
    """
    random = None if seed is None else torch.Generator().manual_seed(seed)
    module, training = sample.module, sample.module.training
    parts = {name: part for name, part in module.named_modules() if name in sample.variants}
    once = {n for n, rows in sample.variants.items() if any(map(rounds_once, rows.values()))}
    trained = [p for p in module.parameters() if p.requires_grad]
    frozen = [part.weight for part in parts.values() if not part.weight.requires_grad]
    module.train()
    try:
        for weight in frozen:  # rounded all the same, which the gradients of others feel
            weight.requires_grad_(True)
        for batch in sample.batches:
            yield _run(module, parts, trained, batch, sample.loss, random, once)
    except CheckpointError as error:
        raise SpecError(
            "network", got="activation checkpointing",
            expected="results that are kept: a plan's prices and memory know of none made again",
            fix="leave torch.utils.checkpoint out of it",
        ) from error  # fmt: skip
    finally:
        module.train(training)
        for weight in frozen:
            weight.requires_grad_(False)


def _run(
    module: torch.nn.Module,
    parts: Mapping[str, torch.nn.Module],
    parameters: Sequence[Tensor],
    batch: Batch,
    loss: Loss,
    random: torch.Generator | None,
    once: Collection[str],
) -> Calibrated:
    seen: list[tuple[str, Any, Tensor, Tensor, Tensor]] = []
    recorder = KinkRecorder()
    with contextlib.ExitStack() as stack:
        for name, part in parts.items():
            stack.callback(part.register_forward_pre_hook(_own_input).remove)
            hook = functools.partial(_keep, seen, name)
            stack.callback(part.register_forward_hook(hook).remove)
        # The other kernels of attention have no second derivative.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.enable_grad())
        if random is not None:
            stack.enter_context(recorder)
            stack.enter_context(BagsOfRows())
        value = loss(in_fp32(module(*batch[0])), batch[1])
        _check_loss(value)
        # Gradients of a loss that is linear in its input depend on nothing, but for this 1.
        value = value * value.new_ones(()).requires_grad_()
    floats = [x for _, _, x, *_ in seen if x.is_floating_point()]
    kinks = recorder.found
    asked = [*(out for *_, out, _ in seen), *floats, *(k.out for k in kinks), *(k.x for k in kinks)]
    found = torch.autograd.grad(
        value, [*asked, *parameters], create_graph=random is not None, allow_unused=True
    )
    gradients = iter(found)
    of_results = [next(gradients) for _ in seen]
    of_inputs = [next(gradients) if x.is_floating_point() else None for _, _, x, *_ in seen]
    jumping, jumped = [[next(gradients) for _ in kinks] for _ in range(2)]
    calls = []
    for (name, part, x, out, handed), g, d in zip(seen, of_results, of_inputs, strict=True):
        looked_up = not x.is_floating_point()
        given = {"w": part.weight, "g": g} | ({} if looked_up else {"v": x, "z": out, "d": d})
        tensors = {word: tensor for word, tensor in given.items() if tensor is not None}
        calls.append(Call(name, looked_up, tensors, handed))
        if name in once and random is not None:
            reached = [p for p in parameters if p is not part.bias]  # its sum is not rounded
            calls[-1].rounded_once = _reach(out, int8_error(g.detach()), reached)
    if random is None:
        return Calibrated(calls)
    inner: Any = sum((p * _signs(p, random)).sum() for p in gradients if p is not None)
    watched = [(call, word, x) for call in calls for word, x in call.tensors.items()]
    lists = [*(x for *_, x in watched), *(x for x in jumped if x is not None)]
    effects = _twice(inner, lists, bool(kinks))
    for (call, word, _), effect in zip(watched, effects, strict=False):
        if effect is not None:
            call.effects[word] = effect.detach().square()
    of_jumps = iter(effects[len(watched) :])
    curves = []
    for kink, g, d in zip(kinks, jumping, jumped, strict=True):
        effect = None if d is None else next(of_jumps)
        if effect is not None and g is not None:
            curves.append((kink, kink.curve(g, effect.detach().square())))
    return Calibrated(calls, curves, random)


def _check_loss(value: object) -> None:
    """Refuse what no gradient can be taken of.

    Raises:
        SpecError: it is not one number that depends on weights.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad:
        return
    got: object = type(value).__name__
    if isinstance(value, torch.Tensor):
        got = f"a tensor of {list(value.shape)}" if value.numel() != 1 else "one without a gradient"
    raise SpecError("loss of the network", got=got, expected="one number, with a gradient")


def _twice(inner: Tensor, of: Sequence[Tensor], again: bool) -> Sequence[Tensor | None]:
    """Derivatives of what is a derivative already.

    Raises:
        SpecError: an operator has no second one.
    """
    try:
        return torch.autograd.grad(inner, of, allow_unused=True, retain_graph=again)
    except RuntimeError as error:  # NotImplementedError is one, too
        if "derivative for" not in str(error):
            raise
        raise SpecError(
            "workload.indicator", got=f"an operator without second derivative: {error}",
            expected="an indicator that needs none", fix="indicator=depth_weighted, for instance",
        ) from error  # fmt: skip


def _reach(out: Tensor, error: Tensor, parameters: Sequence[Tensor]) -> float:
    """Squared change of the gradients of parameters when ``error`` is added to that of ``out``.

    Exact, because a backward pass is linear in the gradient; so errors of one sign add up.
    """
    found = torch.autograd.grad(out, parameters, error, retain_graph=True, allow_unused=True)
    return sum(float(x.square().sum()) for x in found if x is not None)


def _own_input(part: Any, inputs: tuple[Tensor, ...]) -> Any:
    # A node of its own, so that effects by way of other readers of the tensor stay apart.
    x = inputs[0]
    if not x.is_floating_point():
        return None
    return (x.view_as(x) if x.requires_grad else x.detach().requires_grad_(), *inputs[1:])


def _keep(seen: list[Any], name: str, part: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    # Likewise: a sum hands one and the same gradient to all of its terms.
    handed = out.view_as(out)
    seen.append((name, part, inputs[0], out, handed))
    return handed


def _signs(like: Tensor, random: torch.Generator | None) -> Tensor:
    return (torch.randint(0, 2, like.shape, generator=random) * 2 - 1).to(like)
