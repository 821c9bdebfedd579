"""train_cdmpp_together: any number of CDMPP's networks at once, one batch of each a step.

As the release trains each: Adam with L2 decay, a triangular cycle of the rate, slopes clipped,
batches of one leaf count, and with each the unlabelled programs of that count. On CUDA the step of
each leaf count is one CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.baselines_programs._cdmpp_network import DROPOUT
from foreplan.cost_models.baselines_programs._cdmpp_stack import CdmppStack, StepRows
from foreplan.cost_models.program_training import captured

if TYPE_CHECKING:
    from torch import Tensor

#: Half a cycle of the rate in steps: PyTorch's default of CyclicLR, which the release leaves.
_HALF_CYCLE = 2000


class CdmppRows(NamedTuple):
    """Programs of one network, as it sees them.

    Attributes:
        leaves: encoded leaves (M, W).
        start: first leaf of each program (N).
        counts: leaves of each (N).
        device: figures of its device (N, 8).
        target: scaled labels (N); none where they are not looked at.
    """

    leaves: NDArray[np.floating[Any]]
    start: NDArray[np.int64]
    counts: NDArray[np.int64]
    device: NDArray[np.floating[Any]]
    target: NDArray[np.floating[Any]] | None


class CdmppSettings(NamedTuple):
    """What networks that are trained together have in common; see `CdmppReleased`."""

    epochs: int
    batch: int
    learning_rate: float
    weight_decay: float
    discrepancy: str
    discrepancy_weight: float
    discrepancy_rows: int
    torch_device: str
    seed: int
    dropout: float = DROPOUT


def train_cdmpp_together(
    networks: Sequence[Any],
    labelled: Sequence[CdmppRows],
    unlabelled: Sequence[CdmppRows | None],
    settings: CdmppSettings,
    on_epoch: Callable[[int, float], bool | None] | None = None,
) -> float:
    """Train networks of one width in place, each on its own rows.

    Batches of a leaf count are of one size for all networks, at most ``batch``; a network with
    fewer programs of that count sees some twice an epoch, one with less than two leaves the step
    out. Unlabelled programs are at most ``discrepancy_rows``, as many as the network with most of
    them has; without two of that count a network's step has no discrepancy.

    Args:
        networks: of `_cdmpp_network.network`, with equal ``joins_devices``.
        labelled: of each network.
        unlabelled: of each.
        settings: of all.
        on_epoch: called with the passes made and the samples a second so far, networks up to date;
            true ends the training.

    Returns:
        Labelled samples a second, all networks together, graphs captured.
    """
    import torch

    where = settings.torch_device
    plan = _Plan(labelled, unlabelled if settings.discrepancy_weight else [None] * len(networks),
                 settings)  # fmt: skip
    arrays = _joined(labelled, unlabelled, where)
    stack = CdmppStack(
        networks, discrepancy=settings.discrepancy, weight_decay=settings.weight_decay,
        discrepancy_weight=settings.discrepancy_weight, dropout=settings.dropout,
    )  # fmt: skip
    dtype = next(networks[0].parameters()).dtype
    rate = torch.zeros((), device=where, dtype=dtype)
    runs: dict[int, tuple[StepRows, Callable[[], None]]] = {}
    on_gpu = where.startswith("cuda")
    pool = torch.cuda.graph_pool_handle() if on_gpu else None
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for count in plan.counts:
            rows = StepRows(
                *(
                    torch.from_numpy(a).to(where, dtype if a.ndim == 1 else torch.int64)
                    for a in plan.some(count)
                )
            )

            def step(rows: StepRows = rows, count: int = count) -> None:
                stack.step(arrays, rows, count, rate)

            runs[count] = rows, captured(step, stack.tensors(), pool) if on_gpu else step
        steps = seen = 0
        spent = speed = 0.0
        for network in networks:
            network.train()
        for epoch in range(settings.epochs):
            begun = time.perf_counter()
            for count, labels, others in plan.epoch():
                rows, run = runs[count]
                rows.rows.copy_(torch.from_numpy(labels))
                rows.others.copy_(torch.from_numpy(others))
                rate.fill_(triangular_rate(steps, settings.learning_rate))
                run()
                steps, seen = steps + 1, seen + labels.size
            if on_gpu:
                torch.cuda.synchronize()
            spent += time.perf_counter() - begun
            speed = seen / spent
            if on_epoch is not None:
                stack.write()
                if on_epoch(epoch + 1, speed):
                    break
    finally:
        torch.set_float32_matmul_precision(precision)
    stack.write()
    return speed


def triangular_rate(step: int, middle: float) -> float:
    """Rate of a step: up from a tenth of the middle to ten times it and down, linearly."""
    share = abs((step % (2 * _HALF_CYCLE)) / _HALF_CYCLE - 1)
    return middle / 10 + (10 * middle - middle / 10) * (1 - share)


class _Plan:
    """Which programs are in which step."""

    def __init__(
        self, labelled: Sequence[CdmppRows], unlabelled: Sequence[CdmppRows | None],
        settings: CdmppSettings,
    ) -> None:  # fmt: skip
        self._generator = np.random.default_rng(settings.seed)
        sizes = [len(rows.counts) for rows in labelled]
        offsets = np.cumsum([0, *sizes])
        ends = np.cumsum([0, *(0 if rows is None else len(rows.counts) for rows in unlabelled)])
        found = {int(c) for rows in labelled for c in np.unique(rows.counts)}
        self._rows, self._others = {}, {}
        for count in sorted(found):
            own = [at + np.flatnonzero(r.counts == count)
                   for at, r in zip(offsets, labelled, strict=False)]  # fmt: skip
            if max(len(rows) for rows in own) < 2:  # BatchNorm needs two
                continue
            self._rows[count] = own
            self._others[count] = [
                np.zeros(0, np.int64) if r is None
                else offsets[-1] + at + np.flatnonzero(r.counts == count)
                for at, r in zip(ends, unlabelled, strict=False)
            ]  # fmt: skip
        self.counts = list(self._rows)
        self._offsets = offsets
        self._turns, self._batch, self._wide = {}, {}, {}
        for count in self.counts:
            most = max(len(rows) for rows in self._rows[count])
            self._turns[count] = -(-most // settings.batch)
            self._batch[count] = -(-most // self._turns[count])
            wide = max(len(rows) for rows in self._others[count])
            self._wide[count] = min(settings.discrepancy_rows, wide) if wide > 1 else 0

    def some(self, count: int) -> tuple[NDArray[Any], ...]:
        """Fields of `StepRows` of a leaf count."""
        active = np.array([len(rows) > 1 for rows in self._rows[count]])
        paired = np.array([len(rows) > 1 for rows in self._others[count]])
        return self._labels(count, 1)[0], active, self._unlabelled(count), paired

    def epoch(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Leaf count, labelled (K, B) and unlabelled programs (K, U) of each step, shuffled."""
        order = np.repeat(self.counts, [self._turns[count] for count in self.counts])
        self._generator.shuffle(order)
        drawn = {count: iter(self._labels(count, turns)) for count, turns in self._turns.items()}
        for count in order.tolist():
            yield count, next(drawn[count]), self._unlabelled(count)

    def _labels(self, count: int, turns: int) -> NDArray[np.int64]:
        drawn = [self._drawn(rows, k, turns * self._batch[count])
                 for k, rows in enumerate(self._rows[count])]  # fmt: skip
        return np.stack(drawn).reshape(len(drawn), turns, -1).transpose(1, 0, 2).copy()

    def _unlabelled(self, count: int) -> NDArray[np.int64]:
        return np.stack([self._drawn(rows, k, self._wide[count])
                         for k, rows in enumerate(self._others[count])])  # fmt: skip

    def _drawn(self, rows: NDArray[np.int64], network: int, size: int) -> NDArray[np.int64]:
        """Rows at random, repeated up to a size; any of the network's where it has none."""
        if len(rows) < 2:
            return np.full(size, self._offsets[network])
        return np.resize(self._generator.permutation(rows), size)


def _joined(
    labelled: Sequence[CdmppRows], unlabelled: Sequence[CdmppRows | None], where: str
) -> dict[str, Tensor]:
    """All programs one below the other, labelled ones first."""
    import torch

    every = [*labelled, *(rows for rows in unlabelled if rows is not None)]
    ends = np.cumsum([0, *(len(rows.leaves) for rows in every)])
    targets = [rows.target for rows in labelled if rows.target is not None]
    joined: dict[str, NDArray[Any]] = {
        "leaves": np.concatenate([rows.leaves for rows in every]),
        "start": np.concatenate([at + r.start for at, r in zip(ends, every, strict=False)]),
        "count": np.concatenate([rows.counts for rows in every]),
        "device": np.concatenate([rows.device for rows in every]),
        "target": np.concatenate(targets),
    }
    return {name: torch.from_numpy(array).to(where) for name, array in joined.items()}
