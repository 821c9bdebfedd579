"""CdmppStack: K of CDMPP's networks of one leaf count as arrays, and a step of training of all.

One network's step is some two thousand kernels of microseconds (11 layers, Adam, 2 passes), so it
waits for their launches: 32 to 44 ms as plain PyTorch, 7 ms as a CUDA graph, 13 to 23 ms for
seven networks in one (H200, leaf counts 1 to 5). Here every operation runs for all K networks,
weights of a part lie in one array, and the step has no choice that depends on values: it can be a
CUDA graph.

Shape legend: K networks, B programs of a batch, U unlabelled ones, R = B + U, L leaves, W entries
of a leaf, C columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from foreplan.cost_models.programs.baselines._cdmpp_network import HEADS, cmd, mmd

if TYPE_CHECKING:
    from torch import Tensor

#: Norm of the gradients of a network, at most: the release's.
_CLIP = 2.0
_MOMENTUM, _NORM_EPSILON = 0.1, 1e-5  # PyTorch's defaults of BatchNorm1d and LayerNorm
#: Weights of a layer of the encoder.
_LAYER = [
    f"{part}{kind}"
    for part in ("self_attn.in_proj_", "self_attn.out_proj.", "linear1.", "linear2.", "norm1.",
                 "norm2.")
    for kind in ("weight", "bias")
]  # fmt: skip


class StepRows(NamedTuple):
    """Programs that a step is made on, all of the networks' leaf count.

    Attributes:
        rows: labelled programs of each network (K, B).
        others: unlabelled programs (K, U); U may be 0.
        paired: 1 where those are the network's own and the discrepancy counts, else 0 (K).
    """

    rows: Tensor
    others: Tensor
    paired: Tensor


class CdmppStack:
    """The networks' weights, statistics of their normalisations, Adam's state, and the step.

    The networks' own tensors become parts of the arrays: they are up to date after every step.
    Sizes are rounded up to fours with zeros, which stay zero: of 985 columns a matrix unit's
    kernels cannot load whole vectors.

    Args:
        networks: `network` modules of one leaf count, width and number of layers.
        discrepancy: ``none``, ``mmd`` or ``cmd``.
        discrepancy_weight: of that term.
        weight_decay: of Adam.
        dropout: in the encoder.
    """

    def __init__(
        self, networks: Sequence[Any], *, discrepancy: str, discrepancy_weight: float,
        weight_decay: float, dropout: float,
    ) -> None:  # fmt: skip
        import torch

        first = networks[0]
        self._leaves, self._layers = first.leaves, len(first.encoder.layers)
        self._with_devices = first.joins_devices
        self._apart = mmd if discrepancy == "mmd" else cmd
        self._weight, self._dropout = discrepancy_weight, dropout
        self._values, views = _stacked([self._learned(item) for item in networks])
        self._weights = {name: view.detach().requires_grad_() for name, view in views.items()}
        self._adam = torch.optim.Adam(
            [self._values], self._values.new_zeros(()), weight_decay=weight_decay, fused=True,
            capturable=self._values.is_cuda,
        )  # fmt: skip
        zeros = torch.zeros_like
        self._adam.state[self._values] = {
            "step": torch.zeros((), device=self._values.device),
            "exp_avg": zeros(self._values), "exp_avg_sq": zeros(self._values),
        }  # fmt: skip
        self._averages, self._statistics = _stacked([_statistics(item) for item in networks])

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        return [self._values, *self._adam.state[self._values].values(), self._averages]

    def step(self, arrays: Mapping[str, Tensor], chosen: StepRows, rate: Tensor) -> None:
        """One step of every network.

        Args:
            arrays: ``leaves`` (M, W) of all programs, first leaf ``start`` (N) of each, its
                ``device`` figures (N, 8) and ``target`` label (N).
            chosen: programs.
            rate: learning rate (0-d, float32).
        """
        import torch

        slopes = torch.autograd.grad(self._loss(arrays, chosen), list(self._weights.values()))
        with torch.no_grad():
            joined = torch.cat([slope.flatten(1) for slope in slopes], 1)
            del slopes  # as large again
            self._update(joined, rate)

    def _update(self, slopes: Tensor, rate: Tensor) -> None:
        """Clip the slopes (K, P) of each network, then Adam with L2 decay."""
        import torch

        norm = torch.linalg.vector_norm(slopes, dim=1, keepdim=True)
        self._values.grad = slopes.mul_((_CLIP / (norm + 1e-6)).clamp(max=1.0))
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        self._values.grad = None

    def _learned(self, network: Any) -> dict[str, Tensor]:
        """Its weights but those that no output depends on."""
        return {
            name: weight
            for name, weight in network.named_parameters()
            if self._with_devices or not name.startswith("device.")
        }

    def _loss(self, arrays: Mapping[str, Tensor], chosen: StepRows) -> Tensor:
        import torch

        rows = torch.cat([chosen.rows, chosen.others], 1)
        slots = torch.arange(self._leaves, device=rows.device)
        flat = self._encoded(arrays["leaves"][arrays["start"][rows][..., None] + slots])
        size = chosen.rows.shape[1]
        device = arrays["device"][rows]
        output, hidden = self._decoded(flat[:, :size], device[:, :size], None)
        wanted = arrays["target"][chosen.rows]
        difference = output - wanted
        relative = (difference.abs() / wanted.abs().clamp(min=1e-3)).mean(1)
        loss = 1000 * difference.square().mean(1) + relative
        if chosen.others.shape[1]:
            theirs = self._decoded(flat[:, size:], device[:, size:], chosen.paired)[1]
            loss = loss + self._weight * chosen.paired * self._apart(hidden, theirs)
        return loss.sum()

    def _encoded(self, leaves: Tensor) -> Tensor:
        """Leaves (K, R, L, W) after the encoder, those of a program side by side (K, R, L W)."""
        x = leaves
        for number in range(self._layers):
            own = [self._weights[f"encoder.layers.{number}.{name}"] for name in _LAYER]
            x = _encoder_layer(x, own, self._dropout)
        return x.flatten(2)

    def _decoded(
        self, flat: Tensor, device: Tensor, counted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Labels (K, R) and the hidden layer before them (K, R, C); `counted` as in `_normed`."""
        import torch

        embedded = self._mlp(flat, "flatten.", 5, counted, plain=0)
        if self._with_devices:
            figures = self._mlp(device, "device.", 4, counted)
            embedded = self._normed(embedded, "norm.", counted)
            embedded = embedded + self._normed(figures, "norm.", counted)
        hidden = self._mlp(embedded, "decoder.", 3, counted)
        output = _linear(hidden, self._weights, "last.")[..., 0]
        return torch.nan_to_num(output), hidden

    def _mlp(
        self, x: Tensor, at: str, layers: int, counted: Tensor | None, plain: int | None = None
    ) -> Tensor:
        """Linear, BatchNorm, ReLU so many times; the layer of number `plain` has no ReLU."""
        w = self._weights
        for number in range(layers):
            norm = f"{at}{3 * number + 1}."
            x = self._normed(_linear(x, w, f"{at}{3 * number}."), norm, counted)
            x = x * w[norm + "weight"][:, None] + w[norm + "bias"][:, None]
            x = x if number == plain else x.relu_()
        return x

    def _normed(self, x: Tensor, name: str, counted: Tensor | None) -> Tensor:
        """BatchNorm1d without scale, of each network's batch (K, R, C).

        Only networks with 1 in `counted` (K) keep the batch's statistics; all of them by default.
        """
        import torch

        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        with torch.no_grad():
            rows = x.shape[1]
            part = mean.new_full((), _MOMENTUM) if counted is None else _MOMENTUM * counted[:, None]
            self._statistics[name + "running_mean"].lerp_(mean[:, 0], part)
            self._statistics[name + "running_var"].lerp_(variance[:, 0] * (rows / (rows - 1)), part)
        return (x - mean) * torch.rsqrt(variance + _NORM_EPSILON)


def _encoder_layer(x: Tensor, weights: Sequence[Tensor], dropout: float) -> Tensor:
    """PyTorch's post-norm encoder layer on leaves (K, R, L, W); weights as in `_LAYER`.

    Attention is written as products and sums: a batched matrix product over a few leaves is a
    thread block for each program and head.
    """
    import torch
    from torch.nn import functional as f

    into, into_bias, out, out_bias, wide, wide_bias, back, back_bias, *norms = weights
    k, programs, count, width = x.shape
    x = x.reshape(k, programs * count, width)
    joined = torch.baddbmm(into_bias[:, None], x, into.mT)
    joined = joined.view(k, programs, count, 3, HEADS, width // HEADS)
    query, key, value = joined.unbind(3)
    scores = (query[:, :, :, None] * key[:, :, None]).sum(-1) / math.sqrt(width // HEADS)
    shares = f.dropout(torch.softmax(scores, 3), dropout)
    seen = (shares[..., None] * value[:, :, None]).sum(3).reshape(k, programs * count, width)
    seen = torch.baddbmm(out_bias[:, None], seen, out.mT)
    x = _layer_norm(x + f.dropout(seen, dropout), norms[0], norms[1])
    inner = f.dropout(torch.baddbmm(wide_bias[:, None], x, wide.mT).relu(), dropout)
    inner = f.dropout(torch.baddbmm(back_bias[:, None], inner, back.mT), dropout)
    x = _layer_norm(x + inner, norms[2], norms[3])
    return x.view(k, programs, count, width)


def _statistics(network: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in network.named_buffers() if tensor.dim()}


def _stacked(own: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """One array (K, P) of K networks' tensors, which become parts of it; its views by name."""
    shapes = {name: [-(-n // 4) * 4 for n in like.shape] for name, like in own[0].items()}
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes.values()))
    array = next(iter(own[0].values())).detach().new_zeros(len(own), ends[-1])
    views = {
        name: array[:, end - math.prod(shape) : end].view(len(own), *shape)
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    }
    for number, tensors in enumerate(own):
        for name, tensor in tensors.items():
            corner = views[name][number][tuple(slice(n) for n in tensor.shape)]
            corner.copy_(tensor.detach())
            tensor.data = corner
    return array, views


def _linear(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    import torch

    found: Tensor = torch.baddbmm(w[f"{name}bias"][:, None], x, w[f"{name}weight"].mT)
    return found


def _layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    import torch

    plain = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=_NORM_EPSILON)
    return torch.addcmul(shift[:, None], plain, scale[:, None])
