"""ProgramTransformer: a masked transformer over a program's leaves, bounded by the roofline.

    latency = bound + launch * sigmoid(theta) + scale * exp(raw)      (program_bound, program_scale)

with ``raw`` from the leaves, the device's figures and the program's summary (`_program_network`).
So efficiency against the roofline stays below one on every chip and shape. The loss is the relative
error, linear beyond a factor of two: one bad label does not rule a batch. Embeddings of the
devices (or families) of a batch are pulled together by central moment discrepancy; training rows
only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_inputs import DEVICE_ENTRIES, ProgramInputs
from foreplan.cost_models.programs.program_table import Floats, ProgramTable, by_leaf_count

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Size and training of the network.

    Attributes:
        width: of the network.
        layers: of the encoder.
        epochs: passes over the training rows.
        batch: programs of a step.
        learning_rate: peak of a one-cycle schedule.
        positional: whether position and depth of leaves are used.
        bounded: whether the bound is added; without it the scale alone sets the size.
        cmd_weight: weight of the discrepancy between domains of a batch.
        domains: what the domains are.
        torch_device: where the network runs.
        seed: of weights and batches.
    """

    width: int
    layers: int
    epochs: int
    batch: int
    learning_rate: float
    positional: bool
    bounded: bool
    cmd_weight: float
    domains: Literal["device", "family"]
    torch_device: str
    seed: int


class ProgramTransformer:
    """One network with the means and widths of its inputs.

    Attributes:
        settings: size and training.
        scales: means and widths of the inputs, from training rows alone.
        network: the torch module.
        samples_per_s: training samples per second of the last fit, 0 before one.
    """

    def __init__(
        self, settings: NetworkSettings, scales: Mapping[str, NDArray[np.float32]]
    ) -> None:
        import torch

        from foreplan.cost_models.programs._program_network import ProgramNetwork

        self.settings, self.scales = settings, dict(scales)
        self.samples_per_s = 0.0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.network = ProgramNetwork(
                len(scales["leaf_mean"]), 2 * DEVICE_ENTRIES + len(scales["summary_mean"]),
                width=settings.width, layers=settings.layers,
            ).to(settings.torch_device)  # fmt: skip

    @classmethod
    def untrained(
        cls, settings: NetworkSettings, table: ProgramTable, inputs: ProgramInputs
    ) -> Self:
        """A network with random weights that scales its inputs as training programs lie.

        Args:
            settings: size and training.
            table: training programs.
            inputs: theirs.
        """
        unknown = np.isnan(inputs.device).all(0)
        device = np.where(unknown, 0.0, inputs.device)  # its input is zero anyway
        scales = {
            "leaf_mean": table.leaves.mean(0),
            "leaf_width": np.maximum(table.leaves.std(0), 0.1),
            "summary_mean": inputs.summary.mean(0),
            "summary_width": np.maximum(inputs.summary.std(0), 0.05),
            "device_mean": np.nanmean(device, 0),
            # One chip has no width of its own: a factor of ten counts as one.
            "device_width": np.fmax(np.nanstd(device, 0), 1.0),
        }
        return cls(settings, {k: v.astype(np.float32) for k, v in scales.items()})

    def train(
        self,
        table: ProgramTable,
        inputs: ProgramInputs,
        seconds: Floats,
        epochs: int,
        learning_rate: float,
    ) -> None:
        """Train on programs, from the weights as they are; scales stay."""
        from foreplan.cost_models.programs.program_training import TrainingRows, train_together

        self.samples_per_s = train_together(
            [self], [TrainingRows(table, inputs, seconds)], epochs=epochs,
            learning_rate=learning_rate,
        )  # fmt: skip

    def predict(
        self, table: ProgramTable, inputs: ProgramInputs
    ) -> tuple[Floats, NDArray[np.float32]]:
        """Return ln(latency) (N) and embeddings in [-1, 1] (N, width)."""
        import torch

        where = self.settings.torch_device
        arrays = self.arrays_of(table, inputs)
        arrays["start"] = torch.from_numpy(table.offsets[:-1]).to(where)
        arrays["count"] = torch.from_numpy(table.counts).to(where)
        logs = np.empty(len(table))
        embeddings = np.empty((len(table), self.settings.width), dtype=np.float32)
        self.network.eval()
        with torch.inference_mode():
            for rows in by_leaf_count(table.counts, 1024):
                found, embedding = log_seconds(
                    self.network, self.network.launch, arrays, torch.from_numpy(rows).to(where),
                    int(table.counts[rows].max()),
                )  # fmt: skip
                logs[rows] = found.double().cpu().numpy()
                embeddings[rows] = embedding.cpu().numpy()
        return logs, embeddings

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Weights and scales, for saving."""
        state = self.network.state_dict()
        found = {f"weight.{k}": v.detach().cpu().numpy() for k, v in state.items()}
        return found | {f"scale.{k}": v for k, v in self.scales.items()}

    @classmethod
    def from_arrays(cls, settings: NetworkSettings, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Build a network from what `arrays` gave.

        Raises:
            ValueError: settings that are not those of the arrays, before anything of their size is
                made.
            RuntimeError: arrays of other shapes.
        """
        import torch

        scales = {k[6:]: v for k, v in arrays.items() if k.startswith("scale.")}
        width = arrays["weight.norm.weight"].shape
        layers = {k.split(".")[2] for k in arrays if k.startswith("weight.encoder.")}
        if (settings.width,) != width or settings.layers != len(layers):
            raise ValueError(f"{settings.layers} layers of width {settings.width}, not {width}")
        found = cls(settings, scales)
        found.network.load_state_dict(
            {k[7:]: torch.from_numpy(v) for k, v in arrays.items() if k.startswith("weight.")}
        )
        return found

    def arrays_of(self, table: ProgramTable, inputs: ProgramInputs) -> dict[str, Any]:
        """Everything that batches are cut from, on the network's device."""
        import torch

        scales = self.scales
        known = ~np.isnan(inputs.device)
        device = (inputs.device - scales["device_mean"]) / scales["device_width"]
        summary = (inputs.summary - scales["summary_mean"]) / scales["summary_width"]
        leaves = (table.leaves - scales["leaf_mean"]) / scales["leaf_width"]
        least = inputs.bound.bound_s if self.settings.bounded else 0.0 * inputs.scale_s
        places = np.stack([table.position, table.depth], 1) * int(self.settings.positional)
        # A zero row at the end stands for "no leaf".
        arrays = {
            "leaves": np.concatenate([leaves, np.zeros_like(leaves[:1])]),
            "places": np.concatenate([places, np.zeros_like(places[:1])]),
            # Far outside of what was seen a summary says no more than at its edge.
            "described": np.concatenate(
                [np.where(known, device, 0.0), known, np.clip(summary, -4.0, 4.0)], 1
            ),
            "bound": least,
            "scale": np.log(inputs.scale_s),
            "launch": inputs.bound.launch_s * (1.0 if self.settings.bounded else 0.0),
        }
        return {
            k: torch.from_numpy(v.astype(np.float32)).to(self.settings.torch_device)
            for k, v in arrays.items()
        }

    def domains_of(self, table: ProgramTable) -> NDArray[np.int64]:
        """Number of each program's domain (N)."""
        if self.settings.domains == "device":
            return table.device
        return np.unique(table.family, return_inverse=True)[1]


def log_seconds(
    network: Callable[..., tuple[Tensor, Tensor]],
    launch: Tensor,
    arrays: Mapping[str, Tensor],
    rows: Tensor,
    length: int,
) -> tuple[Tensor, Tensor]:
    """Natural logarithm of seconds (B,) and embeddings (B, W).

    Args:
        network: `ProgramNetwork` or its like.
        launch: logit of the share of the launch overhead.
        arrays: as `ProgramTransformer.arrays_of`, with ``start`` and ``count`` of leaves.
        rows: programs (B,).
        length: leaves of the longest of them, or more.
    """
    import torch

    slots = torch.arange(length, device=rows.device)
    mask = slots < arrays["count"][rows][:, None]
    at = torch.where(mask, arrays["start"][rows][:, None] + slots, len(arrays["leaves"]) - 1)
    raw, embedding = network(
        arrays["leaves"][at], arrays["places"][at], mask, arrays["described"][rows]
    )
    shown = arrays["launch"][rows] * torch.sigmoid(launch)
    least = torch.log(arrays["bound"][rows] + shown + 1e-12)
    return torch.logaddexp(least, arrays["scale"][rows] + raw), embedding
