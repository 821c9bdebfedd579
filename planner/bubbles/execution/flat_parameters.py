"""`FlatParameters`: weights, gradients and optimizer of some parts, each as one flat tensor.

One tensor is what a collective takes and what an optimizer steps over in one call. Weights are
drawn from a generator seeded by the parameter's name, so that each rank makes its own share and it
equals that of any other process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from foreplan.errors import SpecError
from foreplan.planner.bubbles.execution.lanes import Lanes, Shard
from foreplan.planner.bubbles.execution.layers import Linear

#: Of the optimizer (AdamW); nothing here depends on the values.
LEARNING_RATE = 1e-4


class Part(Protocol):
    """A module that says what its parameters are called in the whole model."""

    def names(self) -> Iterable[tuple[str, nn.Module, str]]:
        """Each parameter's name in the whole model, its module and its name there."""
        ...


class Gradient(NamedTuple):
    """Elements ``[begin, end)`` of a parameter's flat gradient."""

    name: str
    begin: int
    end: int
    size: int
    values: Tensor


class _Place(NamedTuple):
    name: str
    begin: int
    shape: torch.Size
    shard: Shard | None


class FlatParameters:
    """See the module.

    Args:
        parts: built on the ``meta`` device; they get their parameters here.
        seed: of the weights.
        device: where.
        dtype: of weights and arithmetic; gradients and optimizer are fp32.
        frozen: without gradients and optimizer.
        replicas: ranks that share the optimizer in equal parts of the flat tensor.
        replica: which of them this one is.
        lanes: processes that share layers; each holds its shard of a cut parameter.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        frozen: bool = False,
        replicas: int = 1,
        replica: int = 0,
        lanes: Lanes | None = None,
    ) -> None:
        named = [place for part in parts for place in part.names()]
        self._lanes = lanes or Lanes()
        self._places: list[_Place] = []
        total = 0
        for name, module, key in named:
            meta = module.get_parameter(key)
            shard = module.shard_of(key) if isinstance(module, Linear) else None
            self._places.append(_Place(name, total, meta.shape, shard))
            total += meta.numel()
        total = math.ceil(total / replicas) * replicas
        self._seed, self._frozen = seed, frozen
        self.weights = torch.zeros(total, dtype=dtype, device=device)
        self.gradients = torch.zeros(0 if frozen else total, device=device)
        for place, (_, module, key) in zip(self._places, named, strict=True):
            self._install(module, key, place.begin, place.shape)
        part = total // replicas
        self._own = slice(replica * part, (replica + 1) * part)
        self._own_weights = self.weights[self._own]
        # Weights of a lower precision are rounded from a copy in full precision.
        full = self._own_weights.float() if not frozen else self.gradients
        self._master = full
        self._moments = (torch.zeros_like(full), torch.zeros_like(full))
        self._count = torch.zeros((), device=device)
        self._scattered = self._stepped = False
        self.draw()

    def _install(self, module: nn.Module, key: str, begin: int, shape: torch.Size) -> None:
        size = shape.numel()
        made = nn.Parameter(
            self.weights[begin : begin + size].view(shape), requires_grad=not self._frozen
        )
        module.register_parameter(key, made)
        if self._frozen:
            return
        gradient = self.gradients[begin : begin + size].view(shape)
        if made.dtype == gradient.dtype:
            made.grad = gradient  # autograd adds to it in place
            return
        if isinstance(module, Linear) and key == "weight":
            module.total = gradient
            return

        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
                parameter.grad = None

        made.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------------------------- a step

    def advance(self) -> None:
        """Zero the gradients."""
        self.gradients.zero_()
        self._scattered = False

    def reset(self) -> None:
        """Zero the gradients and undo what the optimizer did."""
        self.advance()
        if self._stepped:
            self.draw()

    def draw(self) -> None:
        """Draw the weights: linears for unit variance, norms about 1, vectors about 0."""
        with torch.no_grad():
            for name, begin, local, shard in self._places:
                shape = tuple(local) if shard is None else shard.shape(local)
                digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
                generator = torch.Generator(self.weights.device)
                generator.manual_seed(int.from_bytes(digest[:7], "big"))
                drawn = torch.randn(shape, generator=generator, device=self.weights.device)
                if len(shape) > 1:
                    drawn *= shape[-1] ** -0.5
                else:
                    drawn = 0.02 * drawn + (1.0 if name.endswith("norm.weight") else 0.0)
                drawn = drawn if shard is None else shard.take(drawn)
                self.weights[begin : begin + drawn.numel()] = drawn.flatten()
        self._stepped = False
        if not self._frozen and self._master.dtype != self.weights.dtype:
            self._master.copy_(self._own_weights)
        for value in (*self._moments, self._count):
            value.zero_()

    def scattered(self) -> None:
        """Note that a reduce-scatter has left sums in this rank's part alone."""
        self._scattered = True

    def optimized(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
        """Weights, gradients, both moments and count of this rank's part; ``None`` if frozen."""
        if self._frozen:
            return None
        return self._master, self.gradients[self._own], *self._moments, self._count

    def rounded(self) -> None:
        """Take over weights that the optimizer has changed."""
        if self._master.dtype != self.weights.dtype:
            self._own_weights.copy_(self._master)
        self._stepped = True

    # ------------------------------------------------------------------------------------ reports

    def gradient(self) -> Iterator[Gradient]:
        """What is known of each parameter's gradient here: all of it, or this rank's part.

        Shards of lanes are put together, which all lanes have to do at the same time.

        Raises:
            SpecError: shards of shards, which no report has words for.
        """
        if self._frozen:
            return
        known = self._own if self._scattered else slice(0, len(self.gradients))
        if self._scattered and self._lanes.size > 1:
            raise SpecError(
                "sharded_optimizer", got=True, expected="False with tensor parallel lanes"
            )
        for name, begin, shape, shard in self._places:
            size = shape.numel()
            first, last = max(known.start, begin), min(known.stop, begin + size)
            values = self.gradients[first:last]
            if shard is not None:
                whole = torch.zeros(shard.shape(shape), device=values.device)
                shard.put(whole, values.view(shape))
                self._lanes.sum(whole)
                yield Gradient(name, 0, whole.numel(), whole.numel(), whole.flatten())
            elif first < last:
                yield Gradient(name, first - begin, last - begin, size, values)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by the ledger's items."""
        states = sum(moment.nbytes for moment in self._moments)
        if not self._frozen and self._master.dtype != self.weights.dtype:
            states += self._master.nbytes
        return {"weights": self.weights.nbytes, "gradients": self.gradients.nbytes,
                "optimizer": states}  # fmt: skip


def optimize(flats: Iterable[FlatParameters]) -> None:
    """Take a step of AdamW over the rank's part of all parameters, in one call."""
    trained = [(flat, known) for flat in flats if (known := flat.optimized()) is not None]
    if not trained:
        return
    weights, gradients, first, second, counts = (
        list(column) for column in zip(*(known for _, known in trained), strict=True)
    )
    # The function, because torch.optim's classes load all of torch.compile.
    adamw(
        weights, gradients, first, second, [], counts, fused=True, amsgrad=False, beta1=0.9,
        beta2=0.999, lr=LEARNING_RATE, weight_decay=0.01, eps=1e-8, maximize=False,
    )  # fmt: skip
    for flat, _ in trained:
        flat.rounded()
