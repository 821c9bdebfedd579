"""`in_turn`: time a function as a training step runs it, on operands that no cache holds.

An operator that is timed in a loop finds its weights, saved tensors and the memory of its result
in the caches, where a training step has used a hundred megabytes since. On one core of an EPYC
fp32 products are 4 % slower in a step than in such a loop, element-wise operators 10 to 70 %. So
operands that are cold in a step come in several sets, and results are kept for as long.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foreplan.datasets.kernels.quantise import Quantised

#: Sets fill this many caches. A cast of 6 MiB takes 72 us warm; with sets of twice a cache of 32
#: MiB 132, three times 138, six and twelve times 151: caches keep some of what comes in a cycle.
_CACHES = 4
#: No more sets than this (programs so small take their launch), nor longer than this to make them,
#: though two at the least (products that take so long are bound by arithmetic).
_MOST_SETS, _SETS_S = 512, 0.15
_ASSUMED_CACHE_BYTES = 64 << 20  # where the machine does not say
#: Bytes that a core keeps of a large cache, at most. Of 480 MiB that a virtual Xeon names its cores
#: kept 64 (`measured`, docs/results/end_to_end.md); sets of four times 480 were memory that other
#: processes needed.
_MOST_HELD_BYTES = 128 << 20


class InTurn:
    """Runs once a call, on the next set of operands, in torch's ordinary (recording) mode.

    Args:
        run: takes a set's members.
        sets: operands.
        results: of the latest runs.
        warm: operands of all sets, which the operator before has written.
        kept: whether a step keeps the results, for its backward pass.

    Attributes:
        sets: operands.
        results: of the latest runs, latest last; every call adds one and drops the oldest.
    """

    def __init__(
        self, run: Callable[..., Any], sets: Sequence[Sequence[Any]], results: deque[Any],
        warm: Sequence[Any] = (), *, kept: bool = True,
    ) -> None:  # fmt: skip
        self.sets, self.results = sets, results
        self._run, self._turn = run, itertools.cycle(sets)
        self._warm, self._kept = tuple(warm), kept

    def __call__(self) -> None:
        """Run on the next set."""
        self.results.append(self._run(*next(self._turn)))
        self.results.popleft()

    def limited(self, sets: int) -> InTurn:
        """The same on at most so many sets of operands, as many as a pass has of them.

        Results that a step does not keep go to memory that was just freed: only one is held.

        Args:
            sets: at least 1.
        """
        held = sets if self._kept else 1
        latest = itertools.islice(self.results, max(0, len(self.results) - held), None)
        return InTurn(self._run, self.sets[:sets], deque(latest), self._warm, kept=self._kept)

    def warm_up(self) -> None:
        """Write what the operator before has written, as it stands, so that caches hold it."""
        with torch.no_grad():
            for tensor in _tensors(self._warm):
                tensor.data.add_(0)  # of ``data``: autograd need not know

    def displace(self) -> None:
        """On a CPU, run other operators, which take over the nearer caches.

        A step enters autograd once: a backward pass's own operators come behind another's.
        """
        _others()
        if not self._kept:
            _other_gradient()


def in_turn(
    run: Callable[..., Any], make: Callable[[], Sequence[Any]], warm: Sequence[Any] = (), *,
    kept: bool = True,
) -> InTurn:  # fmt: skip
    """Run on sets of operands that no cache holds together, keeping as many results.

    Args:
        run: takes a set's members.
        make: a new set; it holds nothing if all operands are warm.
        warm: as of `InTurn`.
        kept: likewise.
    """
    started = time.perf_counter()
    sets = [make()]
    results: deque[Any] = deque([run(*sets[0])])
    first = tuple(_tensors([sets, results[0]]))
    used = sum(t.numel() * t.element_size() for t in first)
    cache = held_cache(str(first[0].device)) if first else 0
    wanted = min(_MOST_SETS, -(-_CACHES * cache // max(used, 1)))
    # Results then go to memory that the process has, as a step's go to that of the step before.
    while len(sets) < wanted and (len(sets) < 2 or time.perf_counter() - started < _SETS_S):
        sets.append(make())
        results.append(run(*sets[-1]))
    return InTurn(run, sets, results, warm, kept=kept)


def last_level_cache(device: str) -> int:
    """Bytes of the largest cache of a torch device, 64 MiB where it does not say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_ASSUMED_CACHE_BYTES // 1024 if not _cache_files() else 0]
    for path in _cache_files():
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1, "M": 1024}[text[-1]] if text[-1:] in "KM" else 0)
    return max(sizes) * 1024


def held_cache(device: str) -> int:
    """Bytes that operands have to be out of to be cold on a torch device: of its largest cache."""
    return min(_MOST_HELD_BYTES, last_level_cache(device))


#: Activations of 4 MiB, as a training step's: behind 1 MiB, what a core has for itself, casts of
#: 1 MiB to 8 bits took 60 us and not 88, embeddings 70 and not 123 (in a step 119).
_OTHER_ROWS = 2048


@functools.cache
def _operands() -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return torch.randn(_OTHER_ROWS, 512), torch.randn(512, 256)


def _others() -> None:
    a, b = _operands()
    F.layer_norm(F.gelu(a @ b), (256,))
    F.gelu(a)


@functools.cache
def _differentiable() -> tuple[Tensor, Tensor, Tensor]:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(8, 8, requires_grad=True)
        return x, x * 1.0, torch.ones(8, 8)


def _other_gradient() -> None:
    """What enters autograd, whose code other operators have taken over.

    A ReLU's backward pass of 64 x 128 took 80 us right behind them, 34 behind this (``measured`` on
    an AMD EPYC, Zen 5).
    """
    x, made, gradient = _differentiable()
    torch.autograd.grad(made, [x], gradient, retain_graph=True)


def _cache_files() -> list[Path]:
    return list(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))


def _tensors(value: Any) -> Iterator[Tensor]:
    """What a set or a result holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Quantised):
        yield from (value.values, value.scale)
    elif isinstance(value, torch.optim.Optimizer):
        for tensor in value.param_groups[0]["params"]:
            yield from (tensor, tensor.grad, *value.state[tensor].values())
    elif isinstance(value, Sequence):
        for part in value:
            yield from _tensors(part)
