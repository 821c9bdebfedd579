"""`ProgramPerceptrons`: perceptrons on how much longer each leaf of a program takes than its scale.

Three hidden layers see the standardised columns that trees see (`ProgramInputs.flat`) and give each
leaf's correction; the sum over leaves is fitted, with the loss of `program_trees` and a narrower
foot. Errors of both correlate at 0.9 on unseen families, so that their mean is better than either
(docs/results/program_history.md). Fitted by torch, evaluated by numpy.

Shape legend: N programs, M leaves, K columns kept of F, H width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_inputs import ProgramInputs

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float64]

#: Width of each layer and of the loss's round foot, its slopes above and below, programs of a step,
#: share of values that are dropped, peak learning rate, decay of weights. Chosen on the development
#: families.
_WIDTH, _FOOT, _ABOVE, _BELOW = 256, 0.1, 1.6, 0.8
_BATCH, _DROPPED, _RATE, _DECAY = 256, 0.1, 1.5e-3, 1e-2
#: Largest standardised value, least spread of a column that is kept and that it is divided by.
_CLIP, _LEAST_SPREAD, _LEAST_UNIT = 5.0, 1e-4, 0.05
#: Most that a leaf is corrected by, as a logarithm; leaves that are evaluated at once.
_MOST, _AT_ONCE = 6.0, 8192


class ProgramPerceptrons:
    """One network for all leaves.

    Build it with `fit`, or from the `arrays` of a fitted one.

    Args:
        arrays: ``mean``, ``unit`` (K), ``kept`` (K, numbers of columns), ``weight0`` (K, H) to
            ``weight3`` (H, 1) and ``bias0`` to ``bias3``.

    Raises:
        KeyError: one is missing.
        ValueError: shapes that do not fit.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        names = ("mean", "unit", "kept", *(f"{k}{n}" for n in range(4) for k in ("weight", "bias")))
        self._arrays = {name: np.asarray(arrays[name]) for name in names}
        self._layers = [(self._arrays[f"weight{n}"], self._arrays[f"bias{n}"]) for n in range(4)]
        width = len(self._arrays["kept"])
        if self._arrays["mean"].shape != (width,) or self._arrays["unit"].shape != (width,):
            raise ValueError("columns of perceptrons that do not fit")
        for weight, bias in self._layers:
            if weight.ndim != 2 or weight.shape[0] != width or bias.shape != weight.shape[1:]:
                raise ValueError("layers of perceptrons that do not fit")
            width = weight.shape[1]

    @classmethod
    def fit(cls, inputs: ProgramInputs, latency_s: Floats, *, epochs: int, seed: int) -> Self:
        """Fit on programs of one kind of device.

        Args:
            inputs: of the training programs.
            latency_s: labels (N).
            epochs: passes over them.
            seed: of first weights, of the order of programs and of what is dropped.
        """
        import torch

        flat = inputs.flat
        known = np.maximum(np.isfinite(flat).sum(0), 1)  # nobody may know a column
        mean = np.nansum(flat, 0, dtype=np.float64) / known
        spread = np.sqrt(np.nansum((flat - mean) ** 2, 0) / known)
        kept = np.flatnonzero(spread > _LEAST_SPREAD)
        arrays: dict[str, NDArray[Any]] = {
            "mean": mean[kept].astype(np.float32),
            "unit": np.maximum(spread[kept], _LEAST_UNIT).astype(np.float32),
            "kept": kept,
        }
        values = torch.from_numpy(_standardised(flat, arrays))
        start = torch.from_numpy(np.log(inputs.leaf_s).astype(np.float32))
        target = torch.from_numpy(np.log(latency_s).astype(np.float32))
        draw = torch.Generator().manual_seed(seed)
        layers = _first_layers(len(kept), draw)
        parameters = [tensor for layer in layers for tensor in layer]
        optimiser = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY)
        count = len(latency_s)
        steps = max(1, epochs * -(-count // _BATCH))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, _RATE, total_steps=steps, pct_start=0.2
        )
        ends = np.append(inputs.starts, len(inputs.program))
        for _ in range(epochs):
            order = torch.randperm(count, generator=draw).numpy()
            for begin in range(0, count, _BATCH):
                rows = order[begin : begin + _BATCH]
                sizes = ends[rows + 1] - ends[rows]
                of = torch.from_numpy(np.repeat(np.arange(len(rows)), sizes))
                first = np.repeat(ends[rows] - np.append(0, np.cumsum(sizes)[:-1]), sizes)
                at = torch.from_numpy(first + np.arange(len(first)))
                corrected = start[at] + _corrections(values[at], layers, draw)
                total = torch.zeros(len(rows)).index_add(0, of, corrected.exp())
                loss = _loss(total.log() - target[torch.from_numpy(rows)])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimiser.step()
                schedule.step()
        for number, (weight, bias) in enumerate(layers):
            arrays[f"weight{number}"] = weight.detach().numpy()
            arrays[f"bias{number}"] = bias.detach().numpy()
        return cls(arrays)

    def predict(self, flat: NDArray[np.float32]) -> Floats:
        """Return ln(latency / scale) of leaves (M) by their rows (M, F)."""
        found = np.empty(len(flat))
        for begin in range(0, len(flat), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            values = _standardised(flat[part], self._arrays)
            for weight, bias in self._layers[:-1]:
                values = values @ weight + bias
                values /= 1 + np.exp(-np.clip(values, -80, 80))
            weight, bias = self._layers[-1]
            found[part] = (values @ weight + bias)[:, 0]
        return np.clip(found, -_MOST, _MOST)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What it is built from."""
        return self._arrays


def _standardised(
    flat: NDArray[np.float32], arrays: Mapping[str, NDArray[Any]]
) -> NDArray[np.float32]:
    """The kept columns in units of their spread, what is unknown at their mean (M, K)."""
    values = (flat[:, arrays["kept"]] - arrays["mean"]) / arrays["unit"]
    return np.asarray(np.nan_to_num(np.clip(values, -_CLIP, _CLIP)), dtype=np.float32)


def _first_layers(columns: int, draw: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and biases before training; the last layer corrects nothing."""
    import torch

    layers = []
    for width in (columns, _WIDTH, _WIDTH):
        reach = max(width, 1) ** -0.5
        layers.append((
            ((2 * torch.rand(width, _WIDTH, generator=draw) - 1) * reach).requires_grad_(),
            ((2 * torch.rand(_WIDTH, generator=draw) - 1) * reach).requires_grad_(),
        ))  # fmt: skip
    layers.append((torch.zeros(_WIDTH, 1, requires_grad=True), torch.zeros(1, requires_grad=True)))
    return layers


def _corrections(
    values: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]], draw: torch.Generator
) -> torch.Tensor:
    """Of leaves (M), in training: some values behind the first two layers are dropped."""
    import torch

    for number, (weight, bias) in enumerate(layers[:-1]):
        values = torch.nn.functional.silu(values @ weight + bias)
        if number < 2:
            stays = torch.rand(values.shape, generator=draw) >= _DROPPED
            values = values * stays / (1 - _DROPPED)
    weight, bias = layers[-1]
    return (values @ weight + bias)[:, 0].clamp(-_MOST, _MOST)


def _loss(off: torch.Tensor) -> torch.Tensor:
    """Pseudo-Huber of ln(predicted / measured), steeper above; the mean over programs."""
    import torch

    side = torch.where(off > 0, _ABOVE, _BELOW)
    return (side * _FOOT * (torch.sqrt(1 + (off / _FOOT) ** 2) - 1)).mean()
