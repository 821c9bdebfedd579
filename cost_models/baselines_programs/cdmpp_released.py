"""CdmppReleased: CDMPP as its authors released it (git 6480e7a).

Read off the release: post-norm transformer on the leaf vectors themselves (no projection; min-max
scaled, positional encoding added unscaled with the release's exponents), 11 layers, 4 heads,
feed-forward 2048; leaves concatenated into one head per leaf count; where there are several
devices, an encoder of eight figures of theirs joined by addition after a shared non-affine
BatchNorm; Box-Cox labels and 1000 MSE + MAPE on them; the discrepancy (MMD, or CMD) between the
last hidden layer on the batch and on unlabelled programs of the target.

What differs: leaf vectors are whatever the table holds, padded to a multiple of the heads
(`StoreFeatureEncoder` makes the release's 164 entries); labels and inputs are scaled by training
rows alone; leaf counts unseen in training go to the nearest seen count by truncation or repetition,
where the release predicts 0; all heads are trained at once, where the release trains one count and
fine-tunes copies. What is not known of the release: whether gradients flow through the target's
half of the discrepancy (here they do) and whether kernels of MMD are summed (here they are).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import (  # type: ignore[import-untyped, unused-ignore]
    BaseEstimator,
    RegressorMixin,
)

from foreplan.cost_models.baselines_programs._base import labels
from foreplan.cost_models.baselines_programs._cdmpp_network import (
    HEADS,
    cmd,
    encoding,
    mmd,
    network,
)
from foreplan.cost_models.program_table import Floats, ProgramTable
from foreplan.datasets.device import Device
from foreplan.errors import SpecError

_DISCREPANCIES = ("mmd", "cmd")


class CdmppReleased(RegressorMixin, BaseEstimator):  # type: ignore[misc, unused-ignore]
    """The released auto-tuned configuration "search_trial_1575".

    Args:
        epochs: passes over the rows.
        layers: of the encoder.
        batch: programs of a step.
        learning_rate: middle of the triangular cycle, a tenth to ten times it.
        weight_decay: of Adam (L2).
        discrepancy: ``mmd``, the release's default, or ``cmd``.
        discrepancy_weight: of that term; counts where ``fit`` is given unlabelled programs.
        discrepancy_rows: unlabelled programs of a step.
        torch_device: where it runs.
        seed: of weights and batches.
    """

    def __init__(
        self,
        *,
        epochs: int = 100,
        layers: int = 11,
        batch: int = 600,
        learning_rate: float = 1.677e-5,
        weight_decay: float = 1.307e-3,
        discrepancy: str = "mmd",
        discrepancy_weight: float = 1.0,
        discrepancy_rows: int = 2048,
        torch_device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.epochs = epochs
        self.layers = layers
        self.batch = batch
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.discrepancy = discrepancy
        self.discrepancy_weight = discrepancy_weight
        self.discrepancy_rows = discrepancy_rows
        self.torch_device = torch_device
        self.seed = seed

    def fit(
        self,
        table: ProgramTable,
        y: Floats | None = None,
        *,
        unlabelled: ProgramTable | None = None,
        on_epoch: Callable[[int, CdmppReleased], bool | None] | None = None,
    ) -> Self:
        """Fit on a table.

        Args:
            table: programs to train on.
            y: labels in seconds; the table's by default.
            unlabelled: programs of the target, whose labels are not looked at. The release gives
                its test programs here.
            on_epoch: called with the number of passes made and this model; true ends the fit.

        Raises:
            SpecError: a label that is no positive number, an unknown discrepancy, or no leaf count
                that two programs share.
        """
        import torch
        from sklearn.preprocessing import (  # type: ignore[import-untyped, unused-ignore]
            PowerTransformer,
        )

        if self.discrepancy not in _DISCREPANCIES:
            raise SpecError(
                "discrepancy", got=self.discrepancy, expected=" or ".join(_DISCREPANCIES)
            )
        seconds = labels(table, y)
        counts, programs = np.unique(table.counts, return_counts=True)
        self.counts_ = counts[programs > 1]  # BatchNorm needs two
        if len(self.counts_) == 0:
            raise SpecError("programs", got=len(table), expected="two with as many leaves")
        self.label_ = PowerTransformer(method="box-cox")
        # In microseconds: Box-Cox of 1e-6 loses its digits.
        target = self.label_.fit_transform(1e6 * seconds[:, None])[:, 0].astype(np.float32)
        low, high = table.leaves.min(0), table.leaves.max(0)
        self.scale_ = low, np.maximum(high - low, 1e-6)
        devices = len(np.unique(table.device))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network_ = network(
                self._width(table), devices > 1, self.counts_.tolist(), self.layers
            )
            self.network_.to(self.torch_device).train()
            self._train(table, torch.from_numpy(target), unlabelled, on_epoch)  # draws for dropout
        return self

    def _train(
        self,
        table: ProgramTable,
        target: Any,
        unlabelled: ProgramTable | None,
        on_epoch: Callable[[int, CdmppReleased], bool | None] | None,
    ) -> None:
        import torch

        parameters = list(self.network_.parameters())
        optimiser = torch.optim.Adam(parameters, self.learning_rate, weight_decay=self.weight_decay)
        schedule = torch.optim.lr_scheduler.CyclicLR(
            optimiser, self.learning_rate / 10, self.learning_rate * 10, cycle_momentum=False
        )
        generator = np.random.default_rng(self.seed)
        inputs, target = self._resident(table), target.to(self.torch_device)
        other = None if unlabelled is None or not self.discrepancy_weight else unlabelled
        others = None if other is None else self._resident(other)
        seen, spent = 0, 0.0
        for epoch in range(self.epochs):
            begun = time.perf_counter()
            for rows in self._batches(table, generator):
                if len(rows) < 2:
                    continue
                wanted = target[torch.from_numpy(rows).to(self.torch_device)]
                output, hidden = self._run(table, inputs, rows)
                difference = output - wanted
                relative = (difference.abs() / wanted.abs().clamp(min=1e-3)).mean()
                loss = 1000 * difference.square().mean() + relative
                if other is not None:
                    alike = self._alike(other, int(table.counts[rows[0]]), generator)
                    if len(alike) > 1:
                        theirs = self._run(other, others, alike)[1]
                        measure = mmd if self.discrepancy == "mmd" else cmd
                        loss = loss + self.discrepancy_weight * measure(hidden, theirs)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 2.0)
                optimiser.step()
                schedule.step()
                seen += len(rows)
            if self.torch_device.startswith("cuda"):
                torch.cuda.synchronize()
            spent += time.perf_counter() - begun
            self.samples_per_s = seen / spent
            if on_epoch is not None and on_epoch(epoch + 1, self):
                break
            self.network_.train()

    def _alike(
        self, other: ProgramTable, count: int, generator: np.random.Generator
    ) -> NDArray[np.int64]:
        """Some unlabelled programs of one leaf count, of the one most like a batch's."""
        present = np.unique(other.counts)
        nearest = present[np.abs(present - count).argmin()]
        rows = np.flatnonzero(other.counts == nearest)
        return generator.permutation(rows)[: self.discrepancy_rows]

    def predict(self, table: ProgramTable) -> Floats:
        """Return seconds (N,)."""
        import torch

        self.network_.eval()
        inputs, found = self._resident(table), np.zeros(len(table))
        with torch.inference_mode():
            for rows in self._batches(table, None):
                found[rows] = self._run(table, inputs, rows)[0].double().cpu().numpy()
        seconds = 1e-6 * self.label_.inverse_transform(found[:, None])[:, 0]
        seconds = np.nan_to_num(np.clip(seconds, 1e-9, 1e6), nan=1e-6)  # the release's rule
        return np.asarray(seconds, dtype=np.float64)

    def _width(self, table: ProgramTable) -> int:
        return int(-(-table.leaves.shape[1] // HEADS) * HEADS)

    def _nearest(self, count: int) -> int:
        return int(self.counts_[np.abs(self.counts_ - count).argmin()])

    def _batches(
        self, table: ProgramTable, generator: np.random.Generator | None
    ) -> Iterator[NDArray[np.int64]]:
        batches = []
        for count in np.unique(table.counts):
            rows = np.flatnonzero(table.counts == count)
            rows = rows if generator is None else generator.permutation(rows)
            batches += [rows[at : at + self.batch] for at in range(0, len(rows), self.batch)]
        if generator is not None:
            generator.shuffle(batches)
        yield from batches

    def _run(self, table: ProgramTable, inputs: Any, rows: NDArray[np.int64]) -> Any:
        """Labels (N,) and the hidden layer before them (N, 930)."""
        import torch

        leaves, device = inputs

        count = int(table.counts[rows[0]])
        slots = np.minimum(np.arange(self._nearest(count)), count - 1)
        at = torch.from_numpy(table.offsets[rows][:, None] + slots).to(self.torch_device)
        return self.network_(leaves[at], device[torch.from_numpy(rows).to(self.torch_device)])

    def _resident(self, table: ProgramTable) -> tuple[Any, Any]:
        """Encoded leaves and device figures, where the network is."""
        import torch

        scaled = (table.leaves - self.scale_[0]) / self.scale_[1]
        scaled = np.pad(scaled, ((0, 0), (0, self._width(table) - scaled.shape[-1])))
        # Position as the release counts it: markers of closed nodes included.
        place = 2 * table.position - table.depth
        leaves = (scaled + encoding(place, scaled.shape[-1])).astype(np.float32)
        return (
            torch.from_numpy(leaves).to(self.torch_device),
            torch.from_numpy(_device_figures(table)).to(self.torch_device),
        )


def released_device_figures(device: Device) -> Floats:
    """The release's eight figures of a device, scaled by its constants; 0 where not known (8)."""
    cache = device.shared_memory_bytes_per_unit or device.l3_bytes
    peak = device.peak_flops.get("fp32/vector") or device.peak_flops.get("fp32/matrix")

    def logarithm(value: float | None, unit: float, most: float) -> float:
        return float(np.log2(max(value / unit, 1.0)) / np.log2(most)) if value else 0.0

    return np.array(
        [
            1.0,
            (device.clock_hz or 0.0) / 2e9,
            logarithm(device.memory_bytes, 2**30, 64),
            logarithm(cache, 2**10, 256),
            logarithm(device.l2_bytes, 2**20, 64),
            0.0,  # L1, which our descriptions of devices do not have
            logarithm(device.memory_bandwidth, 1e9, 2048),
            (peak or 0.0) / 12e12,
        ]
    )


def _device_figures(table: ProgramTable) -> NDArray[np.float32]:
    rows = np.stack([released_device_figures(device) for device in table.devices])
    return np.asarray(rows.astype(np.float32)[table.device])
