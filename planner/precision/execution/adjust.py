"""`LiveAdjustment`: measures ranks while they train and changes their precisions without a restart.

    adjust = LiveAdjustment(model, replan, period=50)
    for x, y in batches:
        with adjust.step():
            criterion(model(x), y).backward()
        optimizer.step()

A rank's time runs from the start of its step until its last gradient is there, so that waiting for
other ranks in an all-reduce does not count. Every ``period`` steps the ranks exchange their mean
times and each asks ``replan`` for its variants; weights, optimizer state and buckets stay.

`PlannerReplan` of the module `replanning` is a ``replan`` that asks the planner again.
`PrecisionLadder` is one that needs no prices: it gives precision back while a rank has slack and
takes it away when the rank holds others up (QSync's runtime only ever raises, and stops at the
first overshoot).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreplan.errors import SpecError
from foreplan.planner.precision.execution.modules import apply_variants
from foreplan.planner.verify.exchange import gather

#: From the mean seconds of all ranks to this rank's variants, or ``None`` for no change.
Replan = Callable[[Sequence[float]], Mapping[str, str] | None]
#: From this rank's seconds to those of all ranks, in their order.
Gather = Callable[[float], Sequence[float]]


class LiveAdjustment:
    """See the module.

    Args:
        model: planned or not; not the ``DistributedDataParallel`` around it.
        replan: called by every rank at the same step.
        period: steps between two calls.
        gather: how ranks exchange times; over ``torch.distributed``'s default group if ``None``.
        seed: of stochastic rounding.

    Attributes:
        history: of each call, the step, all ranks' seconds and whether this rank changed.
    """

    def __init__(
        self, model: nn.Module, replan: Replan, *, period: int = 50, gather: Gather | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        if period < 1:
            raise SpecError("period", got=period, expected="at least one step")
        self._model, self._replan, self._period, self._seed = model, replan, period, seed
        first = next(model.parameters())
        self._device = first.device
        self._gather = gather or self._over_group
        self._events: list[tuple[Any, Any]] = []
        self._seconds = 0.0
        self._steps = 0
        self._last: Any = None
        self.history: list[tuple[int, tuple[float, ...], bool]] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(self._arrived)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around forward and backward pass; adjusts behind every ``period``-th.

        Raises:
            SpecError: no gradient came in the block.
        """
        began = self._now()
        self._last = None
        yield
        if self._last is None:
            raise SpecError("step", got="no gradient", expected="a backward pass in the block")
        if self._device.type == "cuda":
            self._events.append((began, self._last))
        else:
            self._seconds += self._last - began
        self._steps += 1
        if self._steps % self._period == 0:
            self._adjust()

    def _adjust(self) -> None:
        if self._events:
            torch.cuda.synchronize(self._device)
            self._seconds = sum(a.elapsed_time(b) for a, b in self._events) / 1e3
            self._events.clear()
        everyone = tuple(self._gather(self._seconds / self._period))
        self._seconds = 0.0
        variants = self._replan(everyone)
        if variants is not None:
            # Rounding goes on where it was: each step took two seeds of a module.
            apply_variants(self._model, variants, seed=self._seed + 2 * self._steps)
        self.history.append((self._steps, everyone, variants is not None))

    def _arrived(self, parameter: Tensor) -> None:
        self._last = self._now()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self._device))
        return event

    def _over_group(self, seconds: float) -> Sequence[float]:
        import torch.distributed as dist

        mine = torch.tensor([seconds], dtype=torch.float64)
        if dist.get_backend() == "nccl":
            mine = mine.to(self._device)
        return [float(value) for value in gather(mine)]


class PrecisionLadder:
    """Moves one operator a call, up or down a list that is ordered by how much precision matters.

    Args:
        rank: whose precisions.
        variants: of all planned modules at the start.
        rungs: (module, low variant, high variant), the move that gains most first. Modules that
            are high at the start come first.
        margin: relative difference of times that is left alone, so that noise moves nothing.

    Attributes:
        variants: at present.

    Raises:
        SpecError: rungs that do not fit the variants.
    """

    def __init__(
        self, rank: int, variants: Mapping[str, str], rungs: Sequence[tuple[str, str, str]], *,
        margin: float = 0.05,
    ) -> None:  # fmt: skip
        self._rank, self._rungs, self._margin = rank, tuple(rungs), margin
        self.variants = dict(variants)
        high = [self.variants.get(name) == top for name, _, top in rungs]
        self._height = sum(high)
        low = [self.variants.get(name) == bottom for name, bottom, _ in rungs[self._height :]]
        if not all(high[: self._height]) or not all(low):
            raise SpecError(
                "rungs", got=[name for name, _, _ in rungs],
                expected="modules at their high variant first, the others at their low one",
            )  # fmt: skip

    def __call__(self, seconds: Sequence[float]) -> dict[str, str] | None:
        """Raise an operator with slack against the slowest other rank, lower one if behind it."""
        mine = seconds[self._rank]
        slowest = max((s for r, s in enumerate(seconds) if r != self._rank), default=mine)
        if mine < (1.0 - self._margin) * slowest and self._height < len(self._rungs):
            name, _, text = self._rungs[self._height]
            self._height += 1
        elif mine > (1.0 + self._margin) * slowest and self._height:
            self._height -= 1
            name, text, _ = self._rungs[self._height]
        else:
            return None
        self.variants[name] = text
        return dict(self.variants)
