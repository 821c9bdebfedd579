"""What the baselines share: scaled inputs, and a training loop for those that are networks."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import (  # type: ignore[import-untyped, unused-ignore]
    BaseEstimator,
    RegressorMixin,
)

from foreplan.cost_models.programs.program_table import Floats, ProgramTable, by_leaf_count
from foreplan.datasets.device import FEATURE_NAMES as DEVICE_FEATURES
from foreplan.errors import SpecError


def device_inputs(table: ProgramTable) -> NDArray[np.float32]:
    """Figures of each program's device, log10 and zero where unknown (N, figures)."""
    rows = np.stack([device.vector().values for device in table.devices])
    logs = np.log10(np.maximum(rows, 1e-12))
    return np.nan_to_num(logs, nan=0.0).astype(np.float32)[table.device]


def labels(table: ProgramTable, y: Floats | None) -> Floats:
    """Labels of a fit.

    Raises:
        SpecError: a label that is no positive number.
    """
    seconds = table.latency_s if y is None else np.asarray(y, dtype=float)
    if len(seconds) == 0 or not np.all(seconds > 0):
        raise SpecError("labels", got=len(seconds), expected="one positive number a program")
    return seconds


class NetworkBaseline(RegressorMixin, BaseEstimator):  # type: ignore[misc, unused-ignore]
    """A network on leaves that predicts the standardised logarithm of the latency.

    A subclass gives ``_network(features, device_features)`` whose forward takes leaves (B, L, F),
    mask (B, L), device (B, D), position and depth (B, L, 2), and returns (B,). It may give
    ``_batches``.

    Args:
        epochs: passes over the rows.
        batch: programs of a step.
        learning_rate: of Adam.
        torch_device: where it runs.
        seed: of weights and batches.
    """

    def __init__(
        self,
        *,
        epochs: int = 30,
        batch: int = 256,
        learning_rate: float = 7e-4,
        torch_device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.torch_device = torch_device
        self.seed = seed

    def fit(self, table: ProgramTable, y: Floats | None = None) -> Self:
        """Fit on a table.

        Raises:
            SpecError: a label that is no positive number.
        """
        import torch

        seconds = labels(table, y)
        self.scale_ = (
            table.leaves.mean(0),
            np.maximum(table.leaves.std(0), 0.1),
        )
        logs = np.log(seconds)
        self.label_ = (float(logs.mean()), float(logs.std() + 1e-6))
        target = torch.from_numpy(((logs - self.label_[0]) / self.label_[1]).astype(np.float32))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network_ = self._network(table.leaves.shape[1], len(DEVICE_FEATURES))
        self.network_.to(self.torch_device).train()
        inputs, generator = self._inputs(table), np.random.default_rng(self.seed)
        optimiser = torch.optim.Adam(self.network_.parameters(), self.learning_rate)
        for _ in range(self.epochs):
            for rows in self._batches(table, generator):
                output = self._run(inputs, table, rows)
                difference = output - target[torch.from_numpy(rows)].to(output.device)
                loss = difference.square().mean()
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
        return self

    def predict(self, table: ProgramTable) -> Floats:
        """Return seconds (N,)."""
        import torch

        self.network_.eval()
        inputs, found = self._inputs(table), np.empty(len(table))
        with torch.inference_mode():
            for rows in self._batches(table, None):
                found[rows] = self._run(inputs, table, rows).double().cpu().numpy()
        return np.asarray(np.exp(found * self.label_[1] + self.label_[0]), dtype=np.float64)

    def _network(self, features: int, device_features: int) -> Any:
        raise NotImplementedError

    def _batches(self, table: ProgramTable, generator: np.random.Generator | None) -> Any:
        return by_leaf_count(table.counts, self.batch, generator)

    def _inputs(self, table: ProgramTable) -> dict[str, Any]:
        import torch

        leaves = ((table.leaves - self.scale_[0]) / self.scale_[1]).astype(np.float32)
        places = np.stack([table.position, table.depth], 1)
        arrays = {
            "leaves": np.concatenate([leaves, np.zeros_like(leaves[:1])]),
            "places": np.concatenate([places, np.zeros_like(places[:1])]).astype(np.int64),
            "device": device_inputs(table),
        }
        return {k: torch.from_numpy(v).to(self.torch_device) for k, v in arrays.items()}

    def _run(self, inputs: dict[str, Any], table: ProgramTable, rows: NDArray[np.int64]) -> Any:
        import torch

        counts = table.counts[rows]
        slots = np.arange(int(counts.max()))[None, :]
        exists = slots < counts[:, None]
        where = np.where(exists, table.offsets[rows][:, None] + slots, len(table.leaves))
        at = torch.from_numpy(where).to(self.torch_device)
        mask = torch.from_numpy(exists).to(self.torch_device)
        chosen = torch.from_numpy(rows).to(self.torch_device)
        return self.network_(
            inputs["leaves"][at], mask, inputs["device"][chosen], inputs["places"][at]
        )
