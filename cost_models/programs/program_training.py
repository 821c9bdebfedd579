"""train_together: fit any number of program networks at once, one batch of each a step.

Networks are small, so a step of one is a few hundred kernels of microseconds. Here the weights of K
networks of one shape are stacked and every operation runs for all of them; data stays on the
device, batches come in a few fixed shapes (by leaf count), and on CUDA a step (forward, backward,
clipping, AdamW) of each shape is one CUDA graph. K = 1 is the ordinary fit.

Shape legend: K networks, B programs of a batch, L leaves of the longest, W width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_inputs import ProgramInputs
from foreplan.cost_models.programs.program_table import Floats, ProgramTable

if TYPE_CHECKING:
    from torch import Tensor

    from foreplan.cost_models.programs.program_transformer import ProgramTransformer

#: Longest programs of each shape of a batch; one more holds all that are longer.
_LENGTHS = (1, 3, 5, 8, 16)
_WEIGHT_DECAY, _CLIP, _RAMP = 0.01, 1.0, 0.1
_BETAS, _EPSILON = (0.9, 0.999), 1e-8


class TrainingRows(NamedTuple):
    """What one network is trained on.

    Attributes:
        table: programs.
        inputs: theirs.
        seconds: labels (N).
    """

    table: ProgramTable
    inputs: ProgramInputs
    seconds: Floats


def train_together(
    networks: Sequence[ProgramTransformer],
    data: Sequence[TrainingRows],
    *,
    epochs: int,
    learning_rate: float,
) -> float:
    """Train networks of one shape in place, each on its own rows.

    Args:
        networks: with settings that differ in ``positional``, ``bounded``, ``cmd_weight`` and
            ``seed`` alone.
        data: of each network.
        epochs: passes; a network with fewer rows than others sees some of them more often.
        learning_rate: peak of a one-cycle schedule.

    Returns:
        Samples a second, all networks together, graphs captured.
    """
    import torch

    first = networks[0].settings
    where = first.torch_device
    stacked = _Stack(networks)
    arrays = _joined(networks, data)
    sizes = [np.minimum(np.searchsorted(_LENGTHS, d.table.counts), len(_LENGTHS)) for d in data]
    longest = max(int(d.table.counts.max()) for d in data)
    batch = min(first.batch, max(len(d.table) for d in data))
    plan = _Plan(sizes, batch, np.cumsum([0, *(len(d.table) for d in data[:-1])]), first.seed)
    steps = epochs * plan.steps
    rate = torch.zeros((), device=where)
    chosen = torch.zeros((len(networks), batch), dtype=torch.int64, device=where)
    runs: dict[int, Callable[[], None]] = {}
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for size in plan.shapes:
            length = longest if size == len(_LENGTHS) else _LENGTHS[size]

            def step(length: int = length) -> None:
                stacked.step(arrays, chosen, length, rate)

            chosen.copy_(torch.from_numpy(plan.some(size)))
            runs[size] = captured(step, stacked.tensors()) if where.startswith("cuda") else step
        done, begun = 0, time.perf_counter()
        for _ in range(epochs):
            for size, rows in plan.epoch():
                chosen.copy_(torch.from_numpy(rows))
                rate.fill_(learning_rate * _cycle(done / max(1, steps)))
                runs[size]()
                done += 1
        if where.startswith("cuda"):
            torch.cuda.synchronize()
        took = time.perf_counter() - begun
    finally:
        torch.set_float32_matmul_precision(precision)
    stacked.unstack(networks)
    return done * batch * len(networks) / took


def _cycle(share: float) -> float:
    """One cycle: up on a cosine for a tenth of the steps, down to a 25,000th."""
    if share < _RAMP:
        return 0.04 + 0.96 * (0.5 - 0.5 * math.cos(math.pi * share / _RAMP))
    return 0.5 + 0.5 * math.cos(math.pi * (share - _RAMP) / (1 - _RAMP)) + 4e-5


class _Plan:
    """Which rows are in which batch: batches of one shape hold programs of like leaf counts."""

    def __init__(
        self, sizes: list[NDArray[np.int64]], batch: int, offsets: NDArray[np.int64], seed: int
    ) -> None:
        self._batch, self._generator = batch, np.random.default_rng(seed)
        everywhere = sorted({int(s) for own in sizes for s in np.unique(own)})
        self._rows = {
            size: [
                at + (found if len(found) else np.arange(len(own)))
                for at, own in zip(offsets, sizes, strict=True)
                for found in [np.flatnonzero(own <= size) if size == 0 else
                              np.flatnonzero(own == size)]
            ]
            for size in everywhere
        }  # fmt: skip
        # A network without rows of a shape takes any that fit: shorter ones.
        for size in everywhere:
            for number, own in enumerate(sizes):
                if not (own == size).any():
                    fitting = np.flatnonzero(own <= size)
                    self._rows[size][number] = offsets[number] + fitting
        self.shapes = [s for s in everywhere if all(len(r) for r in self._rows[s])]
        self._turns = {
            size: max(1, -(-max(len(rows) for rows in self._rows[size]) // batch))
            for size in self.shapes
        }
        self.steps = sum(self._turns.values())

    def some(self, size: int) -> NDArray[np.int64]:
        """Any batch of a shape (K, B)."""
        return np.stack([np.resize(rows, self._batch) for rows in self._rows[size]])

    def epoch(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Batches (K, B) of an epoch, in random order, with their shapes."""
        order = np.repeat(self.shapes, [self._turns[s] for s in self.shapes])
        self._generator.shuffle(order)
        drawn = {
            size: np.stack(
                [
                    np.resize(self._generator.permutation(rows), turns * self._batch)
                    for rows in self._rows[size]
                ]
            )
            for size, turns in self._turns.items()
        }
        used = dict.fromkeys(self.shapes, 0)
        for size in order.tolist():
            at = used[size]
            used[size] = at + self._batch
            yield size, np.ascontiguousarray(drawn[size][:, at : at + self._batch])


def _joined(
    networks: Sequence[ProgramTransformer], data: Sequence[TrainingRows]
) -> dict[str, Tensor]:
    """Inputs of all networks one below the other; leaves end with a row that stands for none."""
    import torch

    where = networks[0].settings.torch_device
    each = [n.arrays_of(d.table, d.inputs) for n, d in zip(networks, data, strict=True)]
    joined = {key: torch.cat([item[key] for item in each]) for key in each[0]}
    starts, at = [], 0
    for item, own in zip(each, data, strict=True):
        starts.append(own.table.offsets[:-1] + at)
        at += len(item["leaves"])
    domains = [n.domains_of(d.table) for n, d in zip(networks, data, strict=True)]

    def whole(values: list[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(where)

    return joined | {
        "start": whole(starts),
        "count": whole([d.table.counts for d in data]),
        "target": whole([np.log(d.seconds).astype(np.float32) for d in data]),
        "domain": whole(domains),
    }


class _Stack:
    """Stacked weights of K networks, the optimiser's state, and one step of training."""

    def __init__(self, networks: Sequence[ProgramTransformer]) -> None:
        import torch

        own = [dict(n.network.named_parameters()) for n in networks]
        self.weights = {
            name: torch.stack([w[name].detach() for w in own]).requires_grad_() for name in own[0]
        }
        self._state = {
            name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()
        }
        first = next(iter(self.weights.values()))
        self._steps = torch.zeros((), device=first.device)
        self._model = networks[0].network
        self._cmd = torch.tensor([n.settings.cmd_weight for n in networks], device=first.device)
        self._any_cmd = any(n.settings.cmd_weight > 0 for n in networks)

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        return [*self.weights.values(), *(s for pair in self._state.values() for s in pair),
                self._steps]  # fmt: skip

    def step(self, arrays: dict[str, Tensor], rows: Tensor, length: int, rate: Tensor) -> None:
        """One step of every network on its rows (K, B), programs of at most ``length`` leaves."""
        import torch

        loss = torch.func.vmap(self._loss, in_dims=(0, 0, 0, None, None))(
            self.weights, self._cmd, rows, arrays, length
        )
        names = list(self.weights)
        slopes = torch.autograd.grad(loss.sum(), [self.weights[name] for name in names])
        with torch.no_grad():
            squared = sum(s.reshape(len(s), -1).square().sum(1) for s in slopes)
            factor = (_CLIP / (torch.as_tensor(squared).sqrt() + 1e-6)).clamp(max=1.0)
            self._steps += 1
            lean = [1 - beta**self._steps for beta in _BETAS]
            for name, slope in zip(names, slopes, strict=True):
                weight, (mean, square) = self.weights[name], self._state[name]
                slope = slope * factor.view(-1, *[1] * (slope.dim() - 1))
                mean.lerp_(slope, 1 - _BETAS[0])
                square.mul_(_BETAS[1]).addcmul_(slope, slope, value=1 - _BETAS[1])
                weight.mul_(1 - rate * _WEIGHT_DECAY)
                weight.sub_(rate * (mean / lean[0]) / ((square / lean[1]).sqrt() + _EPSILON))

    def unstack(self, networks: Sequence[ProgramTransformer]) -> None:
        """Give every network its weights."""
        import torch

        with torch.no_grad():
            for number, item in enumerate(networks):
                for name, weight in item.network.named_parameters():
                    weight.copy_(self.weights[name][number])

    def _loss(
        self, weights: dict[str, Tensor], cmd: Tensor, rows: Tensor, arrays: dict[str, Tensor],
        length: int,
    ) -> Tensor:  # fmt: skip
        import torch

        from foreplan.cost_models.programs.program_transformer import log_seconds

        def call(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = torch.func.functional_call(self._model, weights, inputs)
            return found

        logs, embedding = log_seconds(call, weights["launch"], arrays, rows, length)
        loss = relative_loss(logs - arrays["target"][rows])
        if self._any_cmd:
            loss = loss + cmd * discrepancy(embedding, arrays["domain"][rows])
        return loss


def captured(
    step: Callable[[], None], changed: Sequence[Tensor], pool: Any = None
) -> Callable[[], None]:
    """A step as a CUDA graph; what trying it changed is put back.

    Args:
        step: reads and writes tensors that stay where they are, and returns none.
        changed: those that it writes.
        pool: `torch.cuda.graph_pool_handle` of graphs that never run side by side.
    """
    import torch

    before = [tensor.detach().clone() for tensor in changed]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    with torch.no_grad():
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
    return graph.replay


def relative_loss(difference: Tensor) -> Tensor:
    """Mean of abs(predicted / measured - 1), continued as lines beyond a factor of two.

    Without the lower line a prediction that is far too small would hardly be moved.
    """
    import torch

    limit = 0.6931471805599453
    inside = torch.expm1(difference.clamp(-limit, limit)).abs()
    above, below = (difference - limit).clamp(min=0), (-difference - limit).clamp(min=0)
    return (inside + 2.0 * above + 0.5 * below).mean()


def discrepancy(embedding: Tensor, domain: Tensor) -> Tensor:
    """Discrepancy of the batch's most frequent domain from the others, 0 where it has one."""
    import torch

    from foreplan.cost_models.programs._program_network import central_moment_discrepancy

    alike = (domain[:, None] == domain[None, :]).sum(1)
    first = (domain == torch.gather(domain, 0, alike.argmax(0, keepdim=True))).float()
    enough = ((1 - first).sum() >= _LEAST_OTHERS).float()
    return enough * central_moment_discrepancy(embedding, first, 1 - first)


_LEAST_OTHERS = 8
