"""train_cdmpp_together: CDMPP's networks of several models at once, one for each leaf count.

As the release trains each: on programs of its leaf count, with Adam and L2 decay of its own, a
triangular cycle of the rate, slopes clipped, and where asked the discrepancy from unlabelled
programs of that count. Networks of one leaf count are stacked. On CUDA the step of all stacks is
one CUDA graph in which they run side by side: each is a chain of some two thousand short kernels,
and what one leaves idle the others use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.baselines._cdmpp_network import DROPOUT
from foreplan.cost_models.programs.baselines._cdmpp_stack import CdmppStack, StepRows
from foreplan.cost_models.programs.program_training import captured

if TYPE_CHECKING:
    from torch import Tensor

#: Steps of a cycle of the rate: PyTorch's default of CyclicLR, which the release leaves.
CYCLE = 4000
#: Bytes that a stack's step may keep for its backward pass: stacks are cut to so many networks.
_MOST_KEPT_BYTES = 4 * 2**30
#: And those of stacks that run side by side. A fit needs them twice: graphs share one pool, and
#: before a second one is captured its steps run outside.
_MOST_AT_ONCE_BYTES = 32 * 2**30


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


class CdmppProgress(NamedTuple):
    """How far a training is.

    Attributes:
        epochs: made.
        steps: of each network.
        samples_per_s: labelled ones, all networks together.
    """

    epochs: int
    steps: int
    samples_per_s: float


def train_cdmpp_together(
    networks: Sequence[Mapping[int, Any]],
    labelled: Sequence[CdmppRows],
    unlabelled: Sequence[CdmppRows | None],
    settings: CdmppSettings,
    on_epoch: Callable[[CdmppProgress], bool | None] | None = None,
) -> None:
    """Train the networks of models in place, each on its model's programs of its leaf count.

    All networks take equally many steps. An epoch is a pass over the programs of the most frequent
    leaf count; the others meet theirs more often. Batches of a leaf count are of one size for all
    models, at most ``batch``; a model with fewer programs of it sees some twice. Unlabelled
    programs are at most ``discrepancy_rows``, as many as the model with most of them has; a network
    with less than two of its leaf count has no discrepancy.

    Args:
        networks: of each model by leaf count (`_cdmpp_network.network`), with equal
            ``joins_devices``; at least two labelled programs for each.
        labelled: programs of each model.
        unlabelled: of each.
        settings: of all.
        on_epoch: called after each, networks up to date; true ends the training.
    """
    import torch

    where = settings.torch_device
    if settings.discrepancy == "none":
        unlabelled = [None] * len(labelled)
    # In single precision whatever the networks' is: the fused Adam of CUDA reads no other.
    rate = torch.zeros((), device=where, dtype=torch.float32)
    arrays = _joined(labelled, unlabelled, where)
    on_gpu = where.startswith("cuda")
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        # The largest first, whose memory the graphs of the others fit into.
        courses = sorted(_courses(networks, labelled, unlabelled, settings), key=lambda c: -c.cost)
        for course in courses:
            course.start(arrays, rate)
        # Graphs hold no memory of what they read and write: courses do, to the end.
        runs = _graphs(courses) if on_gpu else [course.run for course in courses]
        turns = max(course.turns for course in courses)
        steps = seen = 0
        spent = 0.0
        for epoch in range(settings.epochs):
            begun = time.perf_counter()
            for _ in range(turns):
                drawn = [course.draw() for course in courses]  # while the last step runs
                rate.fill_(triangular_rate(steps, settings.learning_rate))
                for course, rows in zip(courses, drawn, strict=True):
                    course.fill(*rows)
                for run in runs:
                    run()
                seen += sum(labels.size for labels, _ in drawn)
                steps += 1
            if on_gpu:
                torch.cuda.synchronize()
            spent += time.perf_counter() - begun
            progress = CdmppProgress(epoch + 1, steps, seen / spent)
            if on_epoch is not None and on_epoch(progress):
                break
    finally:
        torch.set_float32_matmul_precision(precision)


def triangular_rate(step: int, middle: float) -> float:
    """Rate of a step: up from a tenth of the middle to ten times it and down, linearly."""
    share = abs(2 * (step % CYCLE) / CYCLE - 1)
    return middle / 10 + (10 * middle - middle / 10) * (1 - share)


class _Course:
    """Networks of one leaf count that take their steps together, and the programs of each.

    Attributes:
        turns: steps of a pass over the programs.
        cost: bytes that a step keeps for its backward pass.
    """

    def __init__(
        self, networks: Sequence[Any], own: Sequence[NDArray[np.int64]],
        others: Sequence[NDArray[np.int64]], settings: CdmppSettings, seed: Sequence[int],
    ) -> None:  # fmt: skip
        self._networks, self._own, self._others = networks, own, others
        self._settings = settings
        most = max(len(rows) for rows in own)
        self.turns = -(-most // settings.batch)
        self._batch = -(-most // self.turns)
        wide = max(len(rows) for rows in others)
        self._wide = min(settings.discrepancy_rows, wide) if wide > 1 else 0
        self.cost = len(networks) * _kept_bytes(networks[0], self._batch, self._wide)
        self._generator = np.random.default_rng(seed)

    def start(self, arrays: Mapping[str, Tensor], rate: Tensor) -> None:
        """Stack the networks.

        Args:
            arrays: of `CdmppStack.step`.
            rate: that every step reads (0-d, float32).
        """
        import torch

        settings = self._settings
        self._stack = CdmppStack(
            self._networks, discrepancy=settings.discrepancy, weight_decay=settings.weight_decay,
            discrepancy_weight=settings.discrepancy_weight, dropout=settings.dropout,
        )  # fmt: skip
        self._arrays, self._rate = arrays, rate
        paired = torch.tensor([len(rows) > 1 for rows in self._others])
        self._rows = StepRows(
            rate.new_zeros(len(self._own), self._batch, dtype=torch.int64),
            rate.new_zeros(len(self._own), self._wide, dtype=torch.int64),
            paired.to(rate.device, next(self._networks[0].parameters()).dtype),
        )
        self._drawn = self.batches()
        self.fill(  # programs that exist, to capture on
            np.stack([np.resize(rows, self._batch) for rows in self._own]),
            np.stack([np.resize(rows, self._wide) for rows in self._own]),
        )

    def run(self) -> None:
        """One step of every network on the programs of the last `fill`."""
        self._stack.step(self._arrays, self._rows, self._rate)

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes."""
        return self._stack.tensors()

    def draw(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Programs of the next step, as of `batches`."""
        return next(self._drawn)

    def fill(self, labels: NDArray[np.int64], others: NDArray[np.int64]) -> None:
        """Set the programs of the next step."""
        import torch

        self._rows.rows.copy_(torch.from_numpy(np.ascontiguousarray(labels)))
        self._rows.others.copy_(torch.from_numpy(others))

    def batches(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Labelled (K, B) and unlabelled programs (K, U) of each step, shuffled every pass."""
        while True:
            size = self.turns * self._batch
            drawn = np.stack([self._some(rows, size) for rows in self._own])
            for labels in np.split(drawn, self.turns, axis=1):
                pairs = zip(self._own, self._others, strict=True)
                yield labels, np.stack([
                    self._some(theirs if len(theirs) > 1 else rows, self._wide)
                    for rows, theirs in pairs
                ])  # fmt: skip

    def _some(self, rows: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """Rows at random, repeated up to a size."""
        return np.resize(self._generator.permutation(rows), size)


def _graphs(courses: Sequence[_Course]) -> list[Callable[[], None]]:
    """CUDA graphs of the courses' steps, as many courses side by side as memory allows."""
    import torch

    pool = torch.cuda.graph_pool_handle()
    return [
        captured(_side_by_side(some), [t for course in some for t in course.tensors()], pool)
        for some in _rounds(courses)
    ]


def _rounds(courses: Sequence[_Course]) -> list[list[_Course]]:
    """Courses in their order, cut to memory."""
    rounds: list[list[_Course]] = [[]]
    for course in courses:
        kept = sum(other.cost for other in rounds[-1]) + course.cost
        if rounds[-1] and kept > _MOST_AT_ONCE_BYTES:
            rounds.append([])
        rounds[-1].append(course)
    return rounds


def _side_by_side(courses: Sequence[_Course]) -> Callable[[], None]:
    """A step of each course, on streams of their own between two points of the caller's."""
    import torch

    streams = [torch.cuda.Stream() for _ in courses]  # type: ignore[no-untyped-call, unused-ignore]

    def run() -> None:
        here = torch.cuda.current_stream()
        for course, stream in zip(courses, streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                course.run()
        for stream in streams:
            here.wait_stream(stream)

    return run


def _kept_bytes(network: Any, labelled: int, unlabelled: int) -> int:
    """Bytes that a step of one network on so many programs keeps for its backward pass, about.

    Of each leaf and layer of the encoder: hidden activations before and after dropout and its mask,
    and twelve arrays of the leaf's width. Of two programs, where there is a discrepancy: distance,
    three kernels and their arguments.
    """
    layer, programs = network.encoder.layers[0].linear1, labelled + unlabelled
    each = 2.25 * layer.out_features + 12 * layer.in_features
    encoder = each * len(network.encoder.layers) * network.leaves * programs
    return int(4 * (encoder + (8 * programs**2 if unlabelled else 0)))


def _courses(
    networks: Sequence[Mapping[int, Any]], labelled: Sequence[CdmppRows],
    unlabelled: Sequence[CdmppRows | None], settings: CdmppSettings,
) -> Iterator[_Course]:  # fmt: skip
    """Networks by leaf count, as many together as memory allows; rows are those of `_joined`."""
    starts = np.cumsum([0, *(len(rows.counts) for rows in labelled)])
    others_from = starts[-1] + np.cumsum(
        [0, *(0 if rows is None else len(rows.counts) for rows in unlabelled)]
    )
    for count in sorted({count for own in networks for count in own}):
        models = [number for number, own in enumerate(networks) if count in own]
        own = [starts[k] + np.flatnonzero(labelled[k].counts == count) for k in models]
        others = [
            np.zeros(0, np.int64) if rows is None
            else others_from[k] + np.flatnonzero(rows.counts == count)
            for k, rows in ((k, unlabelled[k]) for k in models)
        ]  # fmt: skip
        each = _kept_bytes(
            networks[models[0]][count], min(settings.batch, max(len(rows) for rows in own)),
            min(settings.discrepancy_rows, max(len(rows) for rows in others)),
        )  # fmt: skip
        groups = -(-len(models) // max(1, _MOST_KEPT_BYTES // each))
        for number, chosen in enumerate(np.array_split(np.arange(len(models)), groups)):
            yield _Course(
                [networks[models[k]][count] for k in chosen], [own[k] for k in chosen],
                [others[k] for k in chosen], settings, (settings.seed, count, number),
            )  # fmt: skip


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
        "device": np.concatenate([rows.device for rows in every]),
        "target": np.concatenate(targets),
    }
    return {name: torch.from_numpy(array).to(where) for name, array in joined.items()}
