"""Quality indicators of a trained decoder: what each layer at each number of bits costs (omega).

One contract: every function returns ``[layers, len(bits)]``, at least 0, 16 bits lossless. Only
ranks and sums within one indicator mean anything, except for `measured_kl` and `fisher`, which are
in nats a token.

- `measured_kl`: divergence of the model's predictions when one layer alone is lowered; measured.
  `cache_kl` is the same of all KV caches in 8 bits together, one number.
- `fisher`: the same to second order, ``KL ~ E[(g . dW)^2] / 2`` with ``g`` the gradient of the log
  probability of tokens drawn from the model itself (the Fisher information; Martens, JMLR 2020):
  one backward pass serves all layers and bits.
- `output_error`: squared error of each linear's output on calibration inputs, relative to the
  output (what GPTQ minimises layer by layer; Frantar et al., ICLR 2023).
- `variance_bound`: LLM-PQ's (Zhao et al., PPoPP 2024), ``sum D S(b)^2 G(X)`` with
  ``G = Var[X] / 4`` for rounding to nearest; the step ``S`` is the layout's own.
- `hessian`: HAWQ-V2's (Dong et al., NeurIPS 2020), mean Hessian trace times squared rounding
  error.
- `depth`, `random_order`: without data.

Of a mixture of experts, `measured_kl` and `fisher` alone: both see what the router sends where.
Weights alone: `foreplan.cost_models.quality.sensitivity`. Imports torch where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foreplan.datasets.models.model_limits import refuse_experts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foreplan.cost_models.quality.quantised_decoder import QuantisedDecoder

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Say = Callable[[str], None]

#: Windows of one forward pass.
BATCH = 4
#: What can be asked of a mixture of experts.
WITH_EXPERTS = "use measured_kl, fisher or weights"


def measured_kl(
    decoder: QuantisedDecoder,
    ids: IntArray,
    bits: Sequence[int],
    say: Say = lambda text: None,
) -> FloatArray:
    """Divergence KL(16 bits || one layer lowered), nats a token.

    Args:
        decoder: every layer is at 16 bits afterwards.
        ids: ``[windows, tokens]``.
        bits: numbers of bits.
        say: hears a line of progress a layer.
    """
    exact = list(_log_probabilities(decoder, ids, (16,) * decoder.model.layers))
    found = np.zeros((decoder.model.layers, len(bits)))
    for layer in range(decoder.model.layers):
        for column, count in enumerate(bits):
            if count < 16:
                lowered = [count if i == layer else 16 for i in range(decoder.model.layers)]
                found[layer, column] = _divergence(exact, decoder, ids, lowered)
        say(f"layer {layer + 1} of {decoder.model.layers}")
    decoder.set_bits((16,) * decoder.model.layers)
    return found


def cache_kl(decoder: QuantisedDecoder, ids: IntArray) -> float:
    """Divergence KL(16 bits || keys and values of every layer in 8 bits), nats a token; measured.

    Args:
        decoder: every layer's weights are at 16 bits, during this and afterwards.
        ids: ``[windows, tokens]``.

    Raises:
        SpecError: a family whose attention cannot be replaced.
    """
    whole = (16,) * decoder.model.layers
    exact = list(_log_probabilities(decoder, ids, whole))
    with decoder.rounded_cache():
        return _divergence(exact, decoder, ids, whole)


def plan_quality(
    decoder: QuantisedDecoder, ids: IntArray, plans: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """KL from 16 bits and cross-entropy, both in nats a token, of whole plans.

    Args:
        decoder: every layer is at 16 bits afterwards.
        ids: ``[windows, tokens + 1]``; the last token is only predicted.
        plans: bits of every layer.
    """
    inputs, targets = ids[:, :-1], list(_batches(ids[:, 1:]))
    whole = (16,) * decoder.model.layers
    exact = list(_log_probabilities(decoder, inputs, whole))
    found = []
    for plan in plans:
        kl = loss = 0.0
        passes = _log_probabilities(decoder, inputs, plan)
        for ours, theirs, target in zip(passes, exact, targets, strict=True):
            kl += _kl(theirs, ours)
            loss -= float(ours.gather(-1, target[..., None].to(ours.device)).double().sum())
        found.append((kl / inputs.size, loss / inputs.size))
    decoder.set_bits(whole)
    return found


def random_plans(layers: int, bits: Sequence[int], count: int, seed: int) -> list[tuple[int, ...]]:
    """Mixed plans; each has shares of its own of 16 bits and of each number, so that sums vary."""
    random = np.random.default_rng(seed)
    odds = random.dirichlet(np.full(len(bits) + 1, 0.7), count)
    return [tuple(int(b) for b in random.choice((16, *bits), layers, p=p)) for p in odds]


def fisher(
    decoder: QuantisedDecoder, ids: IntArray, bits: Sequence[int], *, draws: int = 64, seed: int = 0
) -> FloatArray:
    """Second-order divergence, nats a token; ``draws`` backward passes of a window each."""
    import torch

    changes = _changes(decoder, bits)
    random = torch.Generator().manual_seed(seed)
    squares = np.zeros((decoder.model.layers, len(bits)))
    parameters = {name: decoder.module.get_parameter(name) for name in _names(decoder)}
    tokens = torch.from_numpy(ids)
    for draw in range(draws):
        window = tokens[draw % len(tokens)][None]
        with torch.enable_grad():
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            log_p = decoder.logits(window).float().log_softmax(-1)
            # Drawn on the host, so that every device draws the same.
            chosen = torch.multinomial(log_p[0].detach().exp().cpu(), 1, generator=random)
            score = log_p[0].gather(-1, chosen.to(log_p.device)).sum()
            gradients = torch.autograd.grad(score, list(parameters.values()))
        found = dict(zip(parameters, gradients, strict=True))
        for (layer, column), change in changes.items():
            slope = sum(float((found[name] * delta).sum()) for name, delta in change.items())
            squares[layer, column] += slope * slope
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    per_token: FloatArray = squares / (2 * draws * ids.shape[1])
    return per_token


def output_error(decoder: QuantisedDecoder, ids: IntArray, bits: Sequence[int]) -> FloatArray:
    """Squared output error over squared output, summed over a layer's linears."""
    moments = _moments(decoder, ids)
    found = np.zeros((decoder.model.layers, len(bits)))
    for layer in range(decoder.model.layers):
        exact = dict(decoder.stored(layer, 16))
        for column, count in enumerate(bits):
            for name, weight in decoder.stored(layer, count) if count < 16 else ():
                second = moments[layer, name].second
                change = weight - exact[name]
                power = float(((exact[name] @ second) * exact[name]).sum())
                found[layer, column] += float(((change @ second) * change).sum()) / power
    return found


def variance_bound(decoder: QuantisedDecoder, ids: IntArray, bits: Sequence[int]) -> FloatArray:
    """LLM-PQ's bound on the variance that rounding adds to a layer's outputs."""
    moments = _moments(decoder, ids)
    found = np.zeros((decoder.model.layers, len(bits)))
    for layer in range(decoder.model.layers):
        for column, count in enumerate(bits):
            for linear in decoder.linears(layer) if count < 16 else ():
                square = decoder.squared_step(layer, linear.name, count)
                found[layer, column] += linear.k * square * moments[layer, linear.name].variance / 4
    return found


def hessian(
    decoder: QuantisedDecoder, ids: IntArray, bits: Sequence[int], *, seed: int = 0
) -> FloatArray:
    """Mean trace of the loss's Hessian over each weight times the squared rounding error.

    Args:
        decoder: as it is.
        ids: ``[windows, tokens + 1]``; one random sign vector a window.
        bits: numbers of bits.
        seed: of the signs.
    """
    import torch
    from torch.nn import functional as F

    refuse_experts(decoder.model, f"traces are of whole linears; {WITH_EXPERTS}")
    from foreplan.cost_models.quality.weight_indicators import hutchinson_traces

    tokens = torch.from_numpy(ids)
    batches: Any = [((row[None, :-1],), row[None, 1:]) for row in tokens]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten().to(output.device))

    wrapped = _logits_module(decoder)
    names = _names(decoder)
    with torch.enable_grad():
        for name in names:
            decoder.module.get_parameter(name).requires_grad_(True)
        places = {f"decoder.{name.removesuffix('.weight')}": name for name in names}
        traces = hutchinson_traces(wrapped, batches, loss, places, seed)
    for name in names:
        decoder.module.get_parameter(name).requires_grad_(False)
    mean = {
        places[place]: max(trace, 0.0) / decoder.module.get_parameter(places[place]).numel()
        for place, trace in traces.items()
    }
    found = np.zeros((decoder.model.layers, len(bits)))
    for (layer, column), change in _changes(decoder, bits).items():
        found[layer, column] = sum(mean[n] * float(d.square().sum()) for n, d in change.items())
    return found


def depth(layers: int, bits: Sequence[int]) -> FloatArray:
    """Earlier layers count more: errors pass through all that follow."""
    found: FloatArray = np.outer(np.arange(layers, 0, -1), _steps(bits))
    return found


def random_order(layers: int, bits: Sequence[int], seed: int) -> FloatArray:
    """Layers in random order of importance."""
    found: FloatArray = np.outer(np.random.default_rng(seed).random(layers), _steps(bits))
    return found


def _steps(bits: Sequence[int]) -> FloatArray:
    """Squared step of a uniform quantiser of range 1 (theory)."""
    return np.array([0.0 if b >= 16 else 1.0 / (2**b - 1) ** 2 for b in bits])


# ---------------------------------------------------------------------------------- measurements


def _batches(ids: IntArray) -> Iterator[Tensor]:
    import torch

    for first in range(0, len(ids), BATCH):
        yield torch.from_numpy(ids[first : first + BATCH])


def _log_probabilities(
    decoder: QuantisedDecoder, ids: IntArray, plan: Sequence[int]
) -> Iterator[Tensor]:
    """``[windows, tokens, vocab]`` of one batch of windows after another."""
    import torch

    decoder.set_bits(plan)
    with torch.inference_mode():
        for part in _batches(ids):
            yield decoder.logits(part).float().log_softmax(-1)


def _divergence(
    exact: Sequence[Tensor], decoder: QuantisedDecoder, ids: IntArray, plan: Sequence[int]
) -> float:
    passes = _log_probabilities(decoder, ids, plan)
    return sum(_kl(p, q) for p, q in zip(exact, passes, strict=True)) / ids.size


def _kl(p: Tensor, q: Tensor) -> float:
    """Sum over tokens; in fp64, because 8 bits leave differences near fp32's own."""
    gap = p.double() - q.double()
    return max(0.0, float((p.double().exp() * gap).sum()))


class _Moments:
    """Inputs of one linear: sums over tokens."""

    def __init__(self, k: int) -> None:
        import torch

        self._outer = torch.zeros(k, k)
        self._sum, self._count = torch.zeros(k), 0

    def add(self, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float().cpu()
        self._outer += rows.t() @ rows
        self._sum += rows.sum(0)
        self._count += len(rows)

    @property
    def second(self) -> Tensor:
        """``E[x x^T]``."""
        return self._outer / self._count

    @property
    def variance(self) -> float:
        """Of all the input's numbers together."""
        mean = float(self._sum.mean()) / self._count
        return float(self.second.diagonal().mean()) - mean * mean


def _moments(decoder: QuantisedDecoder, ids: IntArray) -> dict[tuple[int, str], _Moments]:
    """Moments of the input of every linear, by layer and name."""
    import torch

    refuse_experts(decoder.model, f"the inputs of single experts are not seen; {WITH_EXPERTS}")
    found: dict[tuple[int, str], _Moments] = {}
    hooks = []
    for layer in range(decoder.model.layers):
        for linear in decoder.linears(layer):
            moments = found[layer, linear.name] = _Moments(linear.k)
            first = decoder.pieces(layer, linear.name)[0].parameter.removesuffix(".weight")
            part = decoder.module.get_submodule(first)
            hooks.append(part.register_forward_pre_hook(_watch(moments)))
    try:
        decoder.set_bits((16,) * decoder.model.layers)
        with torch.inference_mode():
            for batch in _batches(ids):
                decoder.logits(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _watch(moments: _Moments) -> Callable[[Any, tuple[Tensor, ...]], None]:
    def hook(part: Any, inputs: tuple[Tensor, ...]) -> None:
        moments.add(inputs[0])

    return hook


def _names(decoder: QuantisedDecoder) -> list[str]:
    """Parameters that are quantised, each once."""
    found = (
        piece.parameter
        for layer in range(decoder.model.layers)
        for linear in decoder.linears(layer)
        for piece in decoder.pieces(layer, linear.name)
    )
    return list(dict.fromkeys(found))


def _changes(
    decoder: QuantisedDecoder, bits: Sequence[int]
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """What lowering a layer adds to each of its parameters, by layer and column of ``bits``."""
    import torch

    decoder.set_bits((16,) * decoder.model.layers)
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for layer in range(decoder.model.layers):
        for column, count in enumerate(bits):
            if count >= 16:
                continue
            changed = found[layer, column] = {}
            for linear, weight in decoder.stored(layer, count):
                for piece in decoder.pieces(layer, linear):
                    exact = decoder.module.get_parameter(piece.parameter).detach()
                    change = changed.setdefault(piece.parameter, torch.empty_like(exact))
                    part = weight[piece.rows].to(exact.device)
                    piece.of(change).copy_(part - piece.of(exact))
    return found


def _logits_module(decoder: QuantisedDecoder) -> torch.nn.Module:
    import torch

    class Logits(torch.nn.Module):
        """Takes token ids and returns logits alone."""

        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder.module

        def forward(self, ids: Tensor) -> Tensor:
            return decoder.logits(ids)

    return Logits()
