"""CdmppReleased: CDMPP as its authors released it (git 6480e7a).

Read off the release: post-norm transformer on the leaf vectors themselves (no projection; min-max
scaled, positional encoding added unscaled with the release's exponents), 11 layers, 4 heads,
feed-forward 2048; leaves concatenated into the head's input; where there are several
devices, an encoder of eight figures of theirs joined by addition after a shared non-affine
BatchNorm; Box-Cox labels and 1000 MSE + MAPE on them; where asked, the discrepancy (MMD, or CMD)
between the last hidden layer on the batch and on unlabelled programs of the target, with slopes
through both.

One network is trained for each leaf count and shares nothing with the others: the release's scripts
train three leaves from scratch, and fine-tune copies of the network of five for other counts, all
weights free. Here all are trained from scratch. As in the README's command there is no
discrepancy; ``mmd`` is what the release's other configuration turns on.

What differs: leaf vectors are whatever the table holds, padded to a multiple of the heads
(`StoreFeatureEncoder` makes the release's 164 entries); labels and inputs are scaled by training
rows alone, and inputs beyond those count as the nearest end (the release's scale has seen the test
rows; without this an entry that is constant in training would come out a million wide); labels near
0 count as 1e-3 in MAPE; the last weights are taken, where the release takes those with the least
error on its test programs. Programs of a leaf count without a network go to the nearest count that
has one, by truncation or repetition of the last leaf; the release predicts 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import (  # type: ignore[import-untyped, unused-ignore]
    BaseEstimator,
    RegressorMixin,
)

from foreplan.cost_models.programs.baselines._base import labels
from foreplan.cost_models.programs.baselines._cdmpp_network import HEADS, encoding, network
from foreplan.cost_models.programs.baselines.cdmpp_training import (
    CdmppProgress,
    CdmppRows,
    CdmppSettings,
    train_cdmpp_together,
)
from foreplan.cost_models.programs.program_table import Floats, ProgramTable
from foreplan.datasets.device import Device
from foreplan.errors import SpecError

_DISCREPANCIES = ("none", "mmd", "cmd")
#: Programs of a prediction at once, to bound memory.
_AT_ONCE = 4096


class CdmppReleased(RegressorMixin, BaseEstimator):  # type: ignore[misc, unused-ignore]
    """The released auto-tuned configuration "search_trial_1575".

    Args:
        epochs: passes over the programs of the most frequent leaf count; networks of others take
            as many steps.
        layers: of the encoder.
        batch: programs of a step.
        learning_rate: middle of the triangular cycle, a tenth to ten times it.
        weight_decay: of Adam (L2).
        discrepancy: ``none``, ``mmd`` or ``cmd``; counts where ``fit`` is given unlabelled
            programs.
        discrepancy_weight: of that term.
        discrepancy_rows: unlabelled programs of a step.
        least: programs that a leaf count needs for a network of its own (as many as the release
            asks of a task); the most frequent count has one anyway.
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
        discrepancy: str = "none",
        discrepancy_weight: float = 1.0,
        discrepancy_rows: int = 2048,
        least: int = 48,
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
        self.least = least
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
        watch = None if on_epoch is None else lambda epoch: on_epoch(epoch, self)
        fit_cdmpp_together([self], [table], [unlabelled], None if y is None else [y], watch)
        return self

    def prepare(self, table: ProgramTable, y: Floats | None = None) -> CdmppRows:
        """Fit the scales of labels and leaves, make untrained networks; return what they see.

        Raises:
            SpecError: as `fit`.
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
        if programs.max() < 2:  # BatchNorm needs two
            raise SpecError("programs", got=len(table), expected="two with as many leaves")
        self.counts_ = counts[programs >= min(max(self.least, 2), programs.max())]
        self.label_ = PowerTransformer(method="box-cox")
        # In microseconds: Box-Cox of 1e-6 loses its digits.
        target = self.label_.fit_transform(1e6 * seconds[:, None])[:, 0].astype(np.float32)
        low, high = table.leaves.min(0), table.leaves.max(0)
        self.scale_ = low, np.maximum(high - low, 1e-6)
        devices = len(np.unique(table.device))
        self.by_leaves_: dict[int, Any] = {}
        with torch.random.fork_rng(devices=[]):
            for count in self.counts_.tolist():
                torch.manual_seed(self.seed)
                made = network(self._width(table), devices > 1, count, self.layers)
                self.by_leaves_[count] = made.to(self.torch_device)
        return self.rows(table)._replace(target=target)

    def rows(self, table: ProgramTable) -> CdmppRows:
        """Programs as the networks see them, without labels."""
        scaled = ((table.leaves - self.scale_[0]) / self.scale_[1]).clip(0, 1)
        scaled = np.pad(scaled, ((0, 0), (0, self._width(table) - scaled.shape[-1])))
        # Position as the release counts it: markers of closed nodes included.
        place = 2 * table.position - table.depth
        leaves = (scaled + encoding(place, scaled.shape[-1])).astype(np.float32)
        return CdmppRows(leaves, table.offsets[:-1], table.counts, _device_figures(table), None)

    @property
    def training(self) -> CdmppSettings:
        """Settings that models which are trained together share."""
        return CdmppSettings(
            self.epochs, self.batch, self.learning_rate, self.weight_decay, self.discrepancy,
            self.discrepancy_weight, self.discrepancy_rows, self.torch_device, self.seed,
        )  # fmt: skip

    def predict(self, table: ProgramTable) -> Floats:
        """Return seconds (N,)."""
        import torch

        leaves, start, counts, device, _ = self.rows(table)
        resident = [torch.from_numpy(array).to(self.torch_device) for array in (leaves, device)]
        found = np.zeros(len(table))
        with torch.inference_mode():
            for count in np.unique(counts):
                alike = np.flatnonzero(counts == count)
                nearest = int(self.counts_[np.abs(self.counts_ - count).argmin()])
                slots = np.minimum(np.arange(nearest), count - 1)
                own = self.by_leaves_[nearest].eval()
                for begin in range(0, len(alike), _AT_ONCE):
                    rows = alike[begin : begin + _AT_ONCE]
                    at = torch.from_numpy(start[rows][:, None] + slots).to(self.torch_device)
                    chosen = torch.from_numpy(rows).to(self.torch_device)
                    output = own(resident[0][at], resident[1][chosen])[0]
                    found[rows] = output.double().cpu().numpy()
        seconds = 1e-6 * self.label_.inverse_transform(found[:, None])[:, 0]
        seconds = np.nan_to_num(np.clip(seconds, 1e-9, 1e6), nan=1e-6)  # the release's rule
        return np.asarray(seconds, dtype=np.float64)

    def _width(self, table: ProgramTable) -> int:
        return int(-(-table.leaves.shape[1] // HEADS) * HEADS)


def fit_cdmpp_together(
    models: Sequence[CdmppReleased],
    tables: Sequence[ProgramTable],
    unlabelled: Sequence[ProgramTable | None],
    seconds: Sequence[Floats] | None = None,
    on_epoch: Callable[[int], bool | None] | None = None,
) -> None:
    """Fit models that differ in seeds alone, each on its own table; all networks train together.

    Args:
        models: unfitted; the first one's seed orders the batches.
        tables: of each.
        unlabelled: programs of each one's target, or none.
        seconds: labels of each; the tables' own by default.
        on_epoch: called with the passes made, models ready to predict; true ends the fit.

    Raises:
        SpecError: as `CdmppReleased.fit`, or models that cannot be trained together.
    """
    import torch

    first = models[0]
    ys = [None] * len(models) if seconds is None else seconds
    rows = [m.prepare(t, y) for m, t, y in zip(models, tables, ys, strict=True)]
    others = [None if t is None else m.rows(t) for m, t in zip(models, unlabelled, strict=True)]
    kinds = {(m.training._replace(seed=0), m.layers, r.leaves.shape[1],
              next(iter(m.by_leaves_.values())).joins_devices)
             for m, r in zip(models, rows, strict=True)}  # fmt: skip
    if len(kinds) > 1:
        raise SpecError("models", got=len(kinds), expected="equal settings, and all of them with "
                        "one device or all with several")  # fmt: skip

    def watch(progress: CdmppProgress) -> bool | None:
        for model in models:
            model.steps_, model.samples_per_s = progress.steps, progress.samples_per_s
        return None if on_epoch is None else on_epoch(progress.epochs)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(first.seed)  # dropout
        train_cdmpp_together([m.by_leaves_ for m in models], rows, others, first.training, watch)


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
