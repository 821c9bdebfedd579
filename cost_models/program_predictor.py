"""ProgramPredictor: latency of scheduled programs on any device, from their compact ASTs.

    latency = bound + launch * sigmoid(theta) + reference * exp(raw)            (program_bound)

with ``raw`` from a masked transformer over leaves and the device's figures (`_program_network`).
So efficiency against the roofline stays below one on every chip and shape. The loss is the relative
error, linear beyond a factor of two: one bad label does not rule a batch. Embeddings of the
devices (or families) of a batch are pulled together by central moment discrepancy; training rows
only. The interval is conformal on tasks kept out of the fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import (  # type: ignore[import-untyped, unused-ignore]
    BaseEstimator,
    RegressorMixin,
)

from foreplan.cost_models._leaf_names import FEATURE_NAMES, FEATURE_VERSION
from foreplan.cost_models.program_bound import program_bound
from foreplan.cost_models.program_table import Floats, ProgramTable, by_leaf_count
from foreplan.datasets.device import FEATURE_NAMES as DEVICE_FEATURES
from foreplan.datasets.storage import write_atomically
from foreplan.errors import MissingDataError, SpecError

SCHEMA = "foreplan.program-predictor/1"


class ProgramPredictor(RegressorMixin, BaseEstimator):  # type: ignore[misc, unused-ignore]
    """Masked transformer over leaves, bounded by the roofline.

    Args:
        width: of the network.
        layers: of the encoder.
        epochs: passes over the training rows.
        batch: programs of a step.
        learning_rate: peak of a one-cycle schedule.
        positional: whether position and depth of leaves are used.
        bounded: whether the bound is added; without it the reference alone sets the scale.
        cmd_weight: weight of the discrepancy between domains of a batch.
        domains: what the domains are.
        calibration: share of tasks kept out of the fit for the interval.
        coverage: nominal coverage of the interval.
        torch_device: where the network runs.
        seed: of weights, batches and the calibration tasks.

    Attributes:
        network_: the fitted network.
        quantile_: of abs(ln error) on the calibration tasks.
        card_: facts of the fit, as stored beside the weights.
    """

    def __init__(
        self,
        *,
        width: int = 128,
        layers: int = 3,
        epochs: int = 30,
        batch: int = 256,
        learning_rate: float = 1e-3,
        positional: bool = True,
        bounded: bool = True,
        cmd_weight: float = 0.02,
        domains: Literal["device", "family"] = "device",
        calibration: float = 0.1,
        coverage: float = 0.9,
        torch_device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.width = width
        self.layers = layers
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.positional = positional
        self.bounded = bounded
        self.cmd_weight = cmd_weight
        self.domains = domains
        self.calibration = calibration
        self.coverage = coverage
        self.torch_device = torch_device
        self.seed = seed

    def fit(self, table: ProgramTable, y: Floats | None = None) -> Self:
        """Fit on a table.

        Args:
            table: training programs.
            y: seconds (N,); the table's own by default.

        Raises:
            SpecError: fewer than two programs, or a label that is no positive number.
        """
        seconds = table.latency_s if y is None else np.asarray(y, dtype=float)
        if len(table) < 2 or not np.all(seconds > 0):
            raise SpecError("labels", got=len(table), expected="two programs or more, all > 0 s")
        generator = np.random.default_rng(self.seed)
        tasks = generator.permutation(np.unique(table.task))
        kept = tasks[: int(len(tasks) * self.calibration)]
        held = np.isin(table.task, kept)
        train = np.flatnonzero(~held)
        self._scale(table.take(train))
        self._build(len(FEATURE_NAMES))
        self._train(table.take(train), seconds[train], generator)
        self.quantile_ = self._quantile(table, seconds, held)
        self.card_ = {
            "rows": len(train),
            "tasks": len(tasks) - len(kept),
            "calibration_rows": int(held.sum()),
            "devices": [device.name for device in table.devices],
            "chips": sorted({device.chip for device in table.devices}),
            "families": sorted(set(table.family.tolist())),
        }
        return self

    def continue_fit(self, table: ProgramTable, *, epochs: int, learning_rate: float) -> Self:
        """Fine-tune on programs of a new device; scales and the interval stay.

        Raises:
            SpecError: a label that is no positive number.
        """
        if not np.all(table.latency_s > 0):
            raise SpecError("labels", got="zero or unknown", expected="all > 0 s")
        old = self.epochs, self.learning_rate
        self.epochs, self.learning_rate = epochs, learning_rate
        try:
            self._train(table, table.latency_s, np.random.default_rng(self.seed))
        finally:
            self.epochs, self.learning_rate = old
        return self

    def predict(self, table: ProgramTable) -> Floats:
        """Return seconds (N,).

        Raises:
            MissingDataError: a device without peak or bandwidth.
        """
        return self._forward(table)[0]

    def predict_interval(self, table: ProgramTable) -> tuple[Floats, Floats, Floats]:
        """Return seconds and the ends of the interval, each (N,)."""
        seconds = self.predict(table)
        factor = float(np.exp(self.quantile_))
        return seconds, seconds / factor, seconds * factor

    def embed(self, table: ProgramTable) -> NDArray[np.float32]:
        """Return embeddings in [-1, 1] (N, width), as used to choose tasks of a new device."""
        return self._forward(table)[1]

    def save(self, folder: str | Path, **facts: Any) -> None:
        """Write ``weights.safetensors`` and ``card.json``.

        Args:
            folder: made if need be.
            facts: further entries of the card (data, split, errors).

        Raises:
            SpecError: the folder cannot be written.
        """
        from safetensors.numpy import save

        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().cpu().numpy() for k, v in self.network_.state_dict().items()}
        tensors |= {f"scale.{k}": v for k, v in self.scales_.items()}
        card = {
            "schema": SCHEMA,
            "features": FEATURE_VERSION,
            "device_features": list(DEVICE_FEATURES),
            "parameters": self.get_params(),
            "quantile": self.quantile_,
            **self.card_,
            **facts,
        }
        write_atomically(where / "weights.safetensors", save(tensors))
        write_atomically(where / "card.json", json.dumps(card, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: str | Path, *, torch_device: str = "cpu") -> ProgramPredictor:
        """Read what `save` wrote.

        Raises:
            MissingDataError: no such folder.
            SpecError: weights of another version of the features.
        """
        import torch
        from safetensors.numpy import load_file

        where = Path(folder)
        if not (where / "card.json").exists():
            raise MissingDataError(f"no program predictor in {where}", fix="foreplan train")
        card = json.loads((where / "card.json").read_text(encoding="utf-8"))
        for name, wanted in (("schema", SCHEMA), ("features", FEATURE_VERSION)):
            if card.get(name) != wanted:
                raise SpecError(
                    f"{where}/card.json: {name}", got=card.get(name), expected=str(wanted)
                )
        model = cls(**{**card["parameters"], "torch_device": torch_device})
        tensors = load_file(where / "weights.safetensors")
        model.scales_ = {k[6:]: v for k, v in tensors.items() if k.startswith("scale.")}
        model._build(len(FEATURE_NAMES))
        state = {k: torch.from_numpy(v) for k, v in tensors.items() if not k.startswith("scale.")}
        model.network_.load_state_dict(state)
        model.quantile_ = float(card["quantile"])
        known = ("schema", "features", "device_features", "parameters", "quantile")
        model.card_ = {k: v for k, v in card.items() if k not in known}
        return model

    def _scale(self, table: ProgramTable) -> None:
        """Means and widths of the inputs, from training rows alone."""
        devices = np.stack([_figures(device.vector().values) for device in table.devices])
        unknown = np.isnan(devices).all(0)
        devices[:, unknown] = 0.0  # no device has it: its input is zero anyway
        self.scales_ = {
            "leaf_mean": table.leaves.mean(0).astype(np.float32),
            "leaf_width": np.maximum(table.leaves.std(0), 0.1).astype(np.float32),
            "device_mean": np.nanmean(devices, 0).astype(np.float32),
            # One chip has no width of its own: a factor of ten counts as one.
            "device_width": np.fmax(np.nanstd(devices, 0), 1.0).astype(np.float32),
        }

    def _build(self, features: int) -> None:
        import torch

        from foreplan.cost_models._program_network import ProgramNetwork

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.network_ = ProgramNetwork(
                features, 2 * len(DEVICE_FEATURES), width=self.width, layers=self.layers,
                positional=self.positional,
            ).to(self.torch_device)  # fmt: skip

    def _inputs(self, table: ProgramTable) -> dict[str, Any]:
        """Everything that batches are cut from, on the network's device."""
        import torch

        bound = program_bound(table)
        device = np.stack([_figures(item.vector().values) for item in table.devices])
        known = ~np.isnan(device)
        scaled = (device - self.scales_["device_mean"]) / self.scales_["device_width"]
        described = np.concatenate([np.where(known, scaled, 0.0), known], 1).astype(np.float32)
        leaves = (table.leaves - self.scales_["leaf_mean"]) / self.scales_["leaf_width"]
        # A zero row at the end stands for "no leaf".
        arrays = {
            "leaves": np.concatenate([leaves, np.zeros_like(leaves[:1])]),
            "places": np.concatenate(
                [np.stack([table.position, table.depth], 1), np.zeros((1, 2), dtype=np.int32)]
            ).astype(np.float32),
            "described": described[table.device],
            "bound": (bound.bound_s if self.bounded else 0.0 * bound.bound_s).astype(np.float32),
            "reference": np.log(bound.reference_s).astype(np.float32),
            "launch": bound.launch_s.astype(np.float32),
        }
        return {k: torch.from_numpy(v).to(self.torch_device) for k, v in arrays.items()}

    def _log_seconds(self, inputs: dict[str, Any], table: ProgramTable, rows: Any) -> Any:
        """Natural logarithm of seconds (B,) and embeddings (B, W)."""
        import torch

        counts = table.counts[rows]
        longest = int(counts.max())
        slots = np.arange(longest)[None, :]
        exists = slots < counts[:, None]
        last = len(table.leaves)
        at = torch.from_numpy(np.where(exists, table.offsets[rows][:, None] + slots, last))
        at, mask = at.to(self.torch_device), torch.from_numpy(exists).to(self.torch_device)
        chosen = torch.from_numpy(rows).to(self.torch_device)
        raw, embedding = self.network_(
            inputs["leaves"][at], inputs["places"][at], mask, inputs["described"][chosen]
        )
        launch = inputs["launch"][chosen] * torch.sigmoid(self.network_.launch)
        least = torch.log(inputs["bound"][chosen] + launch + 1e-12)
        return torch.logaddexp(least, inputs["reference"][chosen] + raw), embedding

    def _train(self, table: ProgramTable, seconds: Floats, generator: np.random.Generator) -> None:
        import torch

        inputs = self._inputs(table)
        target = torch.from_numpy(np.log(seconds).astype(np.float32)).to(self.torch_device)
        domain = table.device if self.domains == "device" else _numbers(table.family)
        steps = self.epochs * max(1, -(-len(table) // self.batch))
        optimiser = torch.optim.AdamW(
            self.network_.parameters(), self.learning_rate, weight_decay=0.01
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.learning_rate, total_steps=steps + 1, pct_start=0.1
        )
        self.network_.train()
        for _ in range(self.epochs):
            for rows in by_leaf_count(table.counts, self.batch, generator):
                logs, embedding = self._log_seconds(inputs, table, rows)
                loss = _relative_loss(logs - target[torch.from_numpy(rows).to(logs.device)])
                if self.cmd_weight > 0:
                    loss = loss + self.cmd_weight * _discrepancy(embedding, domain[rows])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.network_.parameters(), 1.0)
                optimiser.step()
                schedule.step()

    def _forward(self, table: ProgramTable) -> tuple[Floats, NDArray[np.float32]]:
        import torch

        inputs = self._inputs(table)
        seconds = np.empty(len(table))
        embeddings = np.empty((len(table), self.width), dtype=np.float32)
        self.network_.eval()
        with torch.inference_mode():
            for rows in by_leaf_count(table.counts, max(self.batch, 1024)):
                logs, embedding = self._log_seconds(inputs, table, rows)
                seconds[rows] = np.exp(logs.double().cpu().numpy())
                embeddings[rows] = embedding.cpu().numpy()
        return seconds, embeddings

    def _quantile(self, table: ProgramTable, seconds: Floats, held: NDArray[np.bool_]) -> float:
        """Conformal quantile over tasks kept out; of the training rows where none were."""
        rows = held if held.any() else np.ones(len(table), dtype=np.bool_)
        errors = np.abs(np.log(self.predict(table.take(rows)) / seconds[rows]))
        level = min(1.0, self.coverage * (1 + 1 / len(errors)))
        return float(np.quantile(errors, level, method="higher"))


def _figures(values: Floats) -> Floats:
    """Figures of a device on a logarithmic scale (base 10), NaN where unknown."""
    return np.log10(np.maximum(values, 1e-12))


def _numbers(words: NDArray[np.str_]) -> NDArray[np.int64]:
    return np.unique(words, return_inverse=True)[1]


def _relative_loss(difference: Any) -> Any:
    """Mean of abs(predicted / measured - 1), continued as lines beyond a factor of two.

    Without the lower line a prediction that is far too small would hardly be moved.
    """
    import torch

    limit = 0.6931471805599453
    inside = torch.expm1(difference.clamp(-limit, limit)).abs()
    above, below = (difference - limit).clamp(min=0), (-difference - limit).clamp(min=0)
    return (inside + 2.0 * above + 0.5 * below).mean()


def _discrepancy(embedding: Any, domain: NDArray[np.int64]) -> Any:
    """Discrepancy of the batch's most frequent domain from the others, 0 where it has one."""
    import torch

    from foreplan.cost_models._program_network import central_moment_discrepancy

    names, counts = np.unique(domain, return_counts=True)
    if len(names) < 2 or counts.max() > len(domain) - 8:
        return embedding.new_zeros(())
    first = torch.from_numpy(domain == names[counts.argmax()]).to(embedding.device)
    return central_moment_discrepancy(embedding[first], embedding[~first])
