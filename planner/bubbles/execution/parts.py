"""`BackbonePart` and `EncoderPart`: consecutive layers that run without a cut in between.

A part is built without memory (see `layers`); its parameters have the names that they have in the
whole model, so that equal names mean equal weights wherever a part is built.

Shape legend: S = samples of a micro-batch, B = sequences of an encoder (S * images), T = positions,
C = features of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foreplan.planner.bubbles.execution.lanes import Lanes
from foreplan.planner.bubbles.execution.layers import (
    META,
    Half,
    Linear,
    Rotation,
    WeightGradients,
    half,
    norm,
)
from foreplan.planner.bubbles.execution.step_sizes import StepSizes


class BackbonePart(nn.Module):
    """Consecutive layers of the backbone.

    The first part embeds; the last ends in norm and head.

    Args:
        step: what is trained.
        start, end: layers ``[start, end)``.
        later: where weight gradients are put off to, if they are.
        lanes: that share each layer; embedding, head and loss are computed by all.
    """

    def __init__(
        self,
        step: StepSizes,
        start: int,
        end: int,
        later: WeightGradients | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        super().__init__()
        tower, rotation = step.backbone, Rotation()
        self._start, self._scale = start, 1.0 / step.microbatches
        self._recompute = step.workload.recompute == "full"
        self.embedding: nn.Embedding | None = None
        self.positions: nn.Parameter | None = None
        self.norm: nn.Module | None = None
        self.head: Linear | None = None
        if start == 0:
            # Its constructor draws weights, which on the meta device loads all of torch.compile.
            rows = torch.empty(tower.vocab, tower.hidden, device=META)
            self.embedding = nn.Embedding.from_pretrained(rows, freeze=False)  # type: ignore[no-untyped-call]
            if not tower.gated:
                shape = step.workload.sequence_length, tower.hidden
                self.positions = nn.Parameter(torch.empty(shape, device=META))
        self.halves = nn.ModuleList(
            half(tower, index, rotation, lanes or Lanes()) for index in range(2 * start, 2 * end)
        )
        if end == tower.layers:
            self.norm = norm(tower)
            self.head = Linear(tower.hidden, tower.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, Linear):
                module.later = later

    def names(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Each parameter's name in the whole model, its module and its name there."""
        return _names(self, "backbone", self._start * 2)

    def forward(self, inputs: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """Compute the residual stream behind the part, or the logits.

        Args:
            inputs: the residual stream ``[S, T, C]``; of the first part the features ``[S,
                features, C]`` of every encoder, which come before the text.
            tokens: ``[S, text]``, for the first part.

        Returns:
            ``[S, T, C]``, or ``[S, T, vocabulary]`` behind the last layer.
        """
        x = self.open(inputs, tokens)
        again = self._recompute and torch.is_grad_enabled()
        for attention, mlp in zip(self.pieces[::2], self.pieces[1::2], strict=True):
            x = _recomputed(attention, mlp, x) if again else mlp(attention(x))
        return self.close(x)

    @property
    def pieces(self) -> list[Half]:
        """Its halves, in order."""
        return list(self.halves)  # type: ignore[arg-type]

    def open(self, inputs: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """What comes before the first half; arguments as of `forward`."""
        if self.embedding is None:
            (x,) = inputs
            return x
        x = torch.cat((*inputs, self.embedding(tokens)), 1)
        return x if self.positions is None else x + self.positions

    def close(self, x: Tensor) -> Tensor:
        """What comes behind the last half."""
        if self.head is None or self.norm is None:
            return x
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over all positions, divided by the number of micro-batches.

        So the gradients of a step add up to those of its mean.

        Args:
            logits: ``[S, T, vocabulary]``; the loss is computed in fp32.
            labels: ``[S, T]``.
        """
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) * self._scale


class EncoderPart(nn.Module):
    """Consecutive half layers of an encoder.

    The first part embeds patches; the last ends in norm and projector.

    Args:
        step: what is trained.
        encoder: which encoder.
        start, end: half layers ``[start, end)``.
        lanes: that share each layer; patch matrix and projector are computed by all.
    """

    def __init__(
        self, step: StepSizes, encoder: int, start: int, end: int, lanes: Lanes | None = None
    ) -> None:
        super().__init__()
        tower, spec = step.encoders[encoder], step.workload.encoders[encoder]
        self._start, self._name = start, f"encoders.{spec.name}"
        self._features = spec.features
        self._group = spec.tokens * spec.images // spec.features
        self._concatenate = spec.pool == "concatenate"
        self.patches: Linear | None = None
        self.positions: nn.Parameter | None = None
        self.norm: nn.Module | None = None
        self.projector: nn.Module | None = None
        if start == 0 and tower.entry is not None:
            self.patches = Linear(tower.entry[1], tower.entry[0], bias=True)
            self.positions = nn.Parameter(torch.empty(spec.tokens, tower.hidden, device=META))
        rotation = Rotation()
        self.halves = nn.ModuleList(
            half(tower, index, rotation, lanes or Lanes()) for index in range(start, end)
        )
        if end == 2 * tower.layers:
            self.norm = norm(tower)
            layers: list[nn.Module] = []
            for n, k in tower.exits:
                layers += [nn.GELU()] if layers else []
                layers.append(Linear(k, n, bias=True))
            self.projector = nn.Sequential(*layers)

    def names(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Each parameter's name in the whole model, its module and its name there."""
        return _names(self, self._name, self._start)

    def forward(self, x: Tensor) -> Tensor:
        """Take patches or the residual stream through the part.

        Args:
            x: ``[B, T, C]``, or ``[B, T, patch features]`` for the first part.

        Returns:
            ``[B, T, C]``; behind the last part the features ``[S, features, C of the backbone]``,
            of equal groups of positions (averaged, or one after another) where there are fewer
            features than positions.
        """
        x = self.open(x)
        for piece in self.halves:
            x = piece(x)
        return self.close(x)

    @property
    def pieces(self) -> list[Half]:
        """Its halves, in order."""
        return list(self.halves)  # type: ignore[arg-type]

    def open(self, x: Tensor) -> Tensor:
        """What comes before the first half."""
        return x if self.patches is None else self.patches(x) + self.positions

    def close(self, x: Tensor) -> Tensor:
        """What comes behind the last half."""
        if self.projector is None or self.norm is None:
            return x
        x = self.norm(x).reshape(-1, self._features, self._group, x.shape[-1])
        whole = self._concatenate or self._group == 1
        x = x.flatten(2) if whole else x.mean(2)
        return self.projector(x)  # type: ignore[no-any-return]


def _recomputed(
    attention: Callable[[Tensor], Tensor], mlp: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    def layer(y: Tensor) -> Tensor:
        return mlp(attention(y))

    # Nothing here draws random numbers, so that their state need not be kept.
    out: Tensor = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    return out


def _names(part: nn.Module, prefix: str, first_half: int) -> Iterator[tuple[str, nn.Module, str]]:
    for path, module in part.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            words = path.split(".") if path else []
            if words and words[0] == "halves":
                index = first_half + int(words[1])
                kind = "mlp" if index % 2 else "attention"
                words[:2] = ["layers", str(index // 2), kind]
            yield ".".join((prefix, *words, name)), module, name
