"""CdmppStack: weights of K of CDMPP's networks in arrays, and one step of training of all of them.

One network's step is some two thousand kernels of microseconds (11 layers, Adam, 2 passes), so it
waits for their launches: 20 ms on an H200. Here every operation runs for all K networks, weights of
a part lie in one array, and the step has no choice that depends on values: it can be a CUDA graph.

Shape legend: K networks, B programs of a batch, U unlabelled ones, R = B + U, L leaves, W entries
of a leaf, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from foreplan.cost_models.baselines_programs._cdmpp_network import HEADS, cmd, mmd

if TYPE_CHECKING:
    from torch import Tensor

_CLIP, _BETAS, _EPSILON = 2.0, (0.9, 0.999), 1e-8
_MOMENTUM, _NORM_EPSILON = 0.1, 1e-5  # PyTorch's defaults of BatchNorm1d and LayerNorm


class StepRows(NamedTuple):
    """What a step is made on; all programs have (or are fitted to) one leaf count.

    Attributes:
        rows: labelled programs of each network (K, B).
        active: 1 for networks that learn from them, 0 for those without such programs (K).
        others: unlabelled programs (K, U); U may be 0.
        paired: 1 where the discrepancy counts (K).
    """

    rows: Tensor
    active: Tensor
    others: Tensor
    paired: Tensor


class StackedPart:
    """Parameters that are updated together: rows (K) of one array, with Adam's state.

    Sizes are rounded up to fours with zeros, which stay zero: of 985 columns a matrix unit's
    kernels cannot load whole vectors.
    """

    def __init__(self, own: Sequence[Mapping[str, Tensor]]) -> None:

        first = next(item for item in own if item)
        shapes = {name: [_round(n) for n in tensor.shape] for name, tensor in first.items()}
        spans, at = {}, 0
        for name, shape in shapes.items():
            spans[name] = slice(at, at + math.prod(shape))
            at += -(-math.prod(shape) // 4) * 4
        like = next(iter(first.values())).detach()
        self._values, self._slopes, self._mean, self._square = (
            like.new_zeros(len(own), at) for _ in range(4)
        )
        self._steps = like.new_zeros(len(own), 1)

        def views(array: Tensor) -> dict[str, Tensor]:
            return {n: array[:, spans[n]].view(len(own), *shape) for n, shape in shapes.items()}

        self._filled, self._slope_of = views(self._values), views(self._slopes)
        for number, item in enumerate(own):
            for name, tensor in item.items():
                _corner(self._filled[name][number], tensor).copy_(tensor.detach())
        self.weights = {n: view.detach().requires_grad_() for n, view in self._filled.items()}

    def tensors(self) -> list[Tensor]:
        """Everything that an update changes."""
        return [self._values, self._mean, self._square, self._steps]

    def take(self, slopes: Sequence[Tensor]) -> Tensor:
        """Keep the slopes of all weights; return the sum of their squares (K)."""
        for name, slope in zip(self.weights, slopes, strict=True):
            self._slope_of[name].copy_(slope)
        return self._slopes.square().sum(1)

    def update(self, factor: Tensor, active: Tensor, rate: Tensor, decay: float) -> None:
        """Adam with L2 decay on slopes times a factor (K), of active networks alone."""
        import torch

        active = active[:, None]
        slope = torch.addcmul(decay * self._values, self._slopes, factor[:, None])
        self._mean.lerp_(slope, (1 - _BETAS[0]) * active)
        self._square.lerp_(slope.square_(), (1 - _BETAS[1]) * active)
        self._steps += active
        lean = [1 - beta ** self._steps.clamp(min=1) for beta in _BETAS]
        below = (self._square / lean[1]).sqrt_().add_(_EPSILON)
        self._values.addcmul_(self._mean / below, active * rate / lean[0], value=-1)

    def write(self, number: int, own: Mapping[str, Tensor]) -> None:
        """Copy one network's weights to its own tensors."""
        for name, tensor in own.items():
            tensor.copy_(_corner(self._filled[name][number], tensor))


class CdmppStack:
    """The networks' weights, statistics of their normalisations, and the step.

    Args:
        networks: `network` modules of one width and number of layers.
        discrepancy: ``mmd`` or ``cmd``.
        discrepancy_weight: of that term.
        weight_decay: of Adam.
        dropout: in the encoder.
    """

    def __init__(
        self, networks: Sequence[Any], *, discrepancy: str, discrepancy_weight: float,
        weight_decay: float, dropout: float,
    ) -> None:  # fmt: skip
        self._networks = networks
        self._apart = mmd if discrepancy == "mmd" else cmd
        self._weight, self._decay, self._dropout = discrepancy_weight, weight_decay, dropout
        self._layers = len(networks[0].encoder.layers)
        self._with_devices = networks[0].joins_devices
        counts = sorted({int(c) for item in networks for c in item.flatten})
        names: dict[str, tuple[str, ...]] = {str(c): (f"flatten.{c}.",) for c in counts}
        names["shared"] = ("encoder.", "decoder.", "last.", "device.")
        if not self._with_devices:  # those that no output depends on are not updated
            names["shared"] = names["shared"][:-1]
        self._owned = [
            {
                part: {n: p for n, p in item.named_parameters() if n.startswith(starts)}
                for part, starts in names.items()
            }
            for item in networks
        ]
        self._parts = {part: StackedPart([own[part] for own in self._owned]) for part in names}
        self._statistics = self._stacked_statistics()

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        found = [tensor for part in self._parts.values() for tensor in part.tensors()]
        return [*found, *self._statistics.values()]

    def write(self) -> None:
        """Give every network its weights and statistics."""
        import torch

        with torch.no_grad():
            for number, (item, own) in enumerate(zip(self._networks, self._owned, strict=True)):
                for name, part in self._parts.items():
                    part.write(number, own[name])
                for name, tensor in _statistics(item).items():
                    tensor.copy_(_corner(self._statistics[name][number], tensor))

    def step(
        self, arrays: Mapping[str, Tensor], chosen: StepRows, leaves: int, rate: Tensor
    ) -> None:
        """One step of every active network.

        Args:
            arrays: ``leaves`` (M, W) of all programs, ``start`` and ``count`` (N) of each, their
                ``device`` figures (N, 8) and ``target`` labels (N).
            chosen: programs.
            leaves: of each of them; those with less repeat their last.
            rate: learning rate (0-d).
        """
        import torch

        head = self._parts[str(leaves)]
        shared = self._parts["shared"]
        loss = self._loss(arrays, chosen, leaves, {**shared.weights, **head.weights})
        weights = [*shared.weights.values(), *head.weights.values()]
        slopes = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            squares = shared.take(slopes[: len(shared.weights)])
            squares = squares + head.take(slopes[len(shared.weights) :])
            factor = (_CLIP / (squares.sqrt() + 1e-6)).clamp(max=1.0)
            for part in (shared, head):
                part.update(factor, chosen.active, rate, self._decay)

    def _loss(
        self, arrays: Mapping[str, Tensor], chosen: StepRows, leaves: int, w: Mapping[str, Tensor]
    ) -> Tensor:
        import torch

        rows = torch.cat([chosen.rows, chosen.others], 1)
        slots = torch.arange(leaves, device=rows.device)
        slots = torch.minimum(slots, arrays["count"][rows][..., None] - 1)
        flat = self._encoded(arrays["leaves"][arrays["start"][rows][..., None] + slots], w)
        size = chosen.rows.shape[1]
        device = arrays["device"][rows]
        output, hidden = self._decoded(flat[:, :size], device[:, :size], leaves, w, chosen.active)
        wanted = arrays["target"][chosen.rows]
        difference = output - wanted
        relative = (difference.abs() / wanted.abs().clamp(min=1e-3)).mean(1)
        loss = 1000 * difference.square().mean(1) + relative
        if chosen.others.shape[1]:
            both = chosen.active * chosen.paired
            theirs = self._decoded(flat[:, size:], device[:, size:], leaves, w, both)[1]
            loss = loss + self._weight * chosen.paired * self._apart(hidden, theirs)
        return (loss * chosen.active).sum()

    def _encoded(self, leaves: Tensor, w: Mapping[str, Tensor]) -> Tensor:
        """Leaves (K, R, L, W) after the encoder, those of a program side by side (K, R, L W)."""
        import torch
        from torch.nn import functional as f

        k, programs, count, width = leaves.shape
        x = leaves.reshape(k, programs * count, width)
        for number in range(self._layers):
            at = f"encoder.layers.{number}."
            joined = _linear(x, w, at + "self_attn.in_proj_")
            joined = joined.view(k * programs, count, 3, HEADS, width // HEADS)
            query, key, value = joined.permute(2, 0, 3, 1, 4).unbind(0)
            scores = torch.softmax(query @ key.mT / math.sqrt(width // HEADS), -1)
            seen = (f.dropout(scores, self._dropout) @ value).transpose(1, 2)
            seen = _linear(seen.reshape(k, programs * count, width), w, at + "self_attn.out_proj.")
            x = _layer_norm(x + f.dropout(seen, self._dropout), w, at + "norm1.")
            inner = f.dropout(_linear(x, w, at + "linear1.").relu_(), self._dropout)
            inner = f.dropout(_linear(inner, w, at + "linear2."), self._dropout)
            x = _layer_norm(x + inner, w, at + "norm2.")
        return x.view(k, programs, count * width)

    def _decoded(
        self, flat: Tensor, device: Tensor, leaves: int, w: Mapping[str, Tensor], active: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Labels (K, R) and the hidden layer before them (K, R, C)."""
        import torch

        embedded = self._mlp(flat, f"flatten.{leaves}.", 5, w, active)
        if self._with_devices:
            x = device
            for number in (0, 2, 4):
                x = _linear(x, w, f"device.{number}.").relu_()
            x = _linear(x, w, "device.6.")
            embedded = self._normed(embedded, "norm.", active) + self._normed(x, "norm.", active)
        hidden = self._mlp(embedded, "decoder.", 3, w, active)
        return torch.nan_to_num(_linear(hidden, w, "last.")[..., 0]), hidden

    def _mlp(
        self, x: Tensor, at: str, layers: int, w: Mapping[str, Tensor], active: Tensor
    ) -> Tensor:
        for number in range(0, 3 * layers, 3):
            x = self._normed(_linear(x, w, f"{at}{number}."), f"{at}{number + 1}.", active)
            name = f"{at}{number + 1}."
            x = (x * w[name + "weight"][:, None] + w[name + "bias"][:, None]).relu_()
        return x

    def _normed(self, x: Tensor, name: str, active: Tensor) -> Tensor:
        """BatchNorm1d without scale, of each network's batch (K, R, C)."""
        import torch

        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        with torch.no_grad():
            part, rows = _MOMENTUM * active[:, None], x.shape[1]
            self._statistics[name + "running_mean"].lerp_(mean[:, 0], part)
            self._statistics[name + "running_var"].lerp_(variance[:, 0] * (rows / (rows - 1)), part)
        return (x - mean) * torch.rsqrt(variance + _NORM_EPSILON)

    def _stacked_statistics(self) -> dict[str, Tensor]:

        each = [_statistics(item) for item in self._networks]
        found = {}
        for name, like in {n: t for own in each for n, t in own.items()}.items():
            found[name] = like.new_zeros(len(each), _round(len(like)))
            for number, own in enumerate(each):
                if name in own:
                    found[name][number, : len(like)] = own[name]
        return found


def _statistics(network: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in network.named_buffers() if tensor.dim()}


def _linear(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    import torch

    found: Tensor = torch.baddbmm(w[f"{name}bias"][:, None], x, w[f"{name}weight"].mT)
    return found


def _layer_norm(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    import torch

    plain = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=_NORM_EPSILON)
    return torch.addcmul(w[name + "bias"][:, None], plain, w[name + "weight"][:, None])


def _round(size: int) -> int:
    return size if size <= 4 else -(-size // 4) * 4


def _corner(view: Tensor, like: Tensor) -> Tensor:
    """The part of an array that a smaller tensor fills."""
    return view[tuple(slice(n) for n in like.shape)]
