"""Tile and wave model after NeuSight: utilisation of a wave from device-normalised tile figures.

    latency = waves * wave_flops / (roofline rate * u),  u = sigmoid(g) - sigmoid(a) / waves

(a, g) come from an MLP on four log ratios: tile FLOP, tile bytes and the waves' bytes, over a
multiprocessor's peak, bandwidth share, memory size and L2. NeuSight reads the tile from the
profiler's kernel name; at prediction time nobody knows that, so the tile here is the candidate with
the fewest padded FLOP and at least one wave (its nearest-neighbour table of tiles is not kept).
Source: sitar-lab/NeuSight, MIT licence, (c) 2025 Georgia Institute of Technology and Microsoft; the
code is our own.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator  # type: ignore[import-untyped, unused-ignore]

from foreplan.cost_models.operators.operator_features import FAMILIES
from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.cost_models.operators.tile_times import TILES
from foreplan.datasets.sweeps.operator_table import KINDS, OperatorTable

Floats = NDArray[np.float64]


class TileWaveModel(BaseEstimator):  # type: ignore[misc, unused-ignore]
    """NeuSight-like utilisation model, one MLP a family.

    Args:
        width: units of the two hidden layers.
        epochs: passes over the rows.
        rows: most rows of a family that are used.
        seed: of weights and order.

    Attributes:
        networks_: family to fitted network.
    """

    def __init__(
        self, *, width: int = 64, epochs: int = 30, rows: int = 20_000, seed: int = 0
    ) -> None:
        self.width = width
        self.epochs = epochs
        self.rows = rows
        self.seed = seed

    def fit(self, table: OperatorTable) -> Self:
        """Fit with the symmetric relative error NeuSight uses."""
        import torch

        self.networks_: dict[str, Any] = {}
        for family, kinds in FAMILIES.items():
            rows = np.flatnonzero(np.isin(table.kind, kinds))
            if not len(rows):
                continue
            rng = np.random.default_rng(self.seed)
            rows = rng.permutation(rows)[: self.rows]
            part = table.take(rows)
            inputs, waves, ideal = _waves(part)
            usable = np.isfinite(inputs).all(axis=1) & np.isfinite(ideal)
            if usable.sum() < 30:
                continue
            torch.manual_seed(self.seed)
            x = torch.tensor(inputs[usable], dtype=torch.float32)
            w = torch.tensor(waves[usable], dtype=torch.float32)
            t = torch.tensor(np.log(ideal[usable]), dtype=torch.float32)
            y = torch.tensor(np.log(part.latency_s[usable]), dtype=torch.float32)
            network = torch.nn.Sequential(
                torch.nn.BatchNorm1d(x.shape[1], affine=False),
                torch.nn.Linear(x.shape[1], self.width), torch.nn.ReLU(),
                torch.nn.Linear(self.width, self.width), torch.nn.ReLU(),
                torch.nn.Linear(self.width, 2),
            )  # fmt: skip
            optimiser = torch.optim.AdamW(network.parameters(), lr=2e-3)
            for _ in range(self.epochs):
                order = torch.randperm(len(x))
                for at in range(0, len(x), 512):
                    batch = order[at : at + 512]
                    if len(batch) < 2:
                        continue
                    log_time = t[batch] - torch.log(_utilisation(network(x[batch]), w[batch]))
                    # |p - y| / ((p + y) / 2) = 2 tanh(|ln p - ln y| / 2)
                    loss = torch.tanh((log_time - y[batch]).abs() / 2).mean()
                    optimiser.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                    optimiser.step()
            self.networks_[family] = network.eval()
        return self

    def predict(self, table: OperatorTable) -> Floats:
        """Seconds (N,), NaN where a figure is not known or the family was not trained."""
        import torch

        out = np.full(len(table), np.nan)
        for family, network in self.networks_.items():
            rows = np.flatnonzero(np.isin(table.kind, FAMILIES[family]))
            if not len(rows):
                continue
            inputs, waves, ideal = _waves(table.take(rows))
            with torch.no_grad():
                raw = network(torch.tensor(inputs, dtype=torch.float32))
                used = _utilisation(raw, torch.tensor(waves, dtype=torch.float32))
            out[rows] = ideal / used.numpy().astype(np.float64)
        return out


def _utilisation(raw: Any, waves: Any) -> Any:
    import torch

    used = torch.sigmoid(raw[:, 0]) - torch.sigmoid(raw[:, 1]) / waves
    return used.clamp(1e-4, 1.0)


def _waves(table: OperatorTable) -> tuple[Floats, Floats, Floats]:
    """Inputs (N, 4 + shape), waves (N,) and the time at full utilisation (N,)."""
    work, d = operator_work(table), table.dims
    product = np.isin(table.kind, ("bmm", "linear"))
    count = np.maximum(work.bytes / 16_384, 1)
    padding = np.ones(len(table))
    best = np.full(len(table), np.inf)
    for rows, cols in TILES if product.any() else ():
        tiles = d["b"] * np.ceil(d["m"] / rows) * np.ceil(d["n"] / cols)
        quantised = np.ceil(tiles / work.units) * work.units * rows * cols
        better = product & (quantised < best)
        best = np.where(better, quantised, best)
        count = np.where(better, tiles, count)
        padding = np.where(better, tiles * rows * cols / (d["b"] * d["m"] * d["n"]), padding)
    waves = np.ceil(count / work.units)
    flops, moved = work.flops * padding / count, work.bytes / count
    peak, share = work.peak / work.units, work.bandwidth / work.units
    l2 = np.array([_figure(table, name, "l2_bytes") for name in table.device])
    size = np.array([_figure(table, name, "memory_bytes") for name in table.device])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = [
            np.log2(np.maximum(flops, 1e-9) / peak), np.log2(moved / share),
            np.log2(waves * moved * work.units / size), np.log2(waves * moved * work.units / l2),
        ]  # fmt: skip
        names = sorted({name for kind in set(table.kind) for name in KINDS.get(kind, ())})
        shape = [np.log2(np.maximum(d[name], 0.5)) for name in names]
        inputs = np.column_stack([*ratios, *shape])
    ideal = waves * np.maximum(flops / peak, moved / share)
    return np.nan_to_num(inputs, nan=0.0, posinf=0.0, neginf=0.0), waves, ideal


def _figure(table: OperatorTable, name: str, figure: str) -> float:
    device = table.device_of(name)
    value = None if device is None else getattr(device, figure)
    return float("nan") if value is None else float(value)
