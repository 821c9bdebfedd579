"""Training tasks that need no network: a byte language model and handwritten digits.

``workload.network_options`` are the fields of the network's record in
`foreplan.datasets.models.networks`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foreplan.datasets.models.byte_text import standard_library_text, windows
from foreplan.datasets.models.digits import digits
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.networks import (
    ByteLMConfig,
    DigitsCNNConfig,
    DigitsMLPConfig,
    NetworkConfig,
    build,
)
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.precision.spec import PrecisionWorkload

Batch = tuple[tuple[Tensor, ...], Tensor]

#: Validation batches lie at steps from here on, beyond any training run.
_VALIDATION = 1 << 40


class DataTask:
    """A `foreplan.planner.precision.task.TrainingTask` on data of this machine.

    Attributes:
        name: what a reader calls it.
        config: the network.
        source: where the samples come from, for provenance.
    """

    def __init__(
        self, config: NetworkConfig, seed: int, source: str,
        draw: Callable[[tuple[int, ...], bool], Batch],
    ) -> None:  # fmt: skip
        self.name, self.config, self.source = config.kind, config, source
        self._seed, self._draw = seed, draw

    def module(self) -> nn.Module:
        """A new fp32 module with the seed's weights; built under the caller's default device."""
        return build(self.config, self._seed)

    def batch(self, step: int, rank: int) -> Batch:
        """(inputs, target) of a worker's step; negative steps are calibration batches."""
        # numpy's keys are non-negative; ranks and steps may not run into each other.
        return self._draw((self._seed, rank, step + (1 << 32)), True)

    def validation_batch(self, index: int) -> Batch:
        """(inputs, target) of samples that no training batch holds."""
        return self._draw((self._seed, _VALIDATION, index), False)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats, of fp32 ``[..., classes]`` against int64 ``[...]``."""
        return F.cross_entropy(output.flatten(0, -2), target.flatten())


def byte_lm(model: Model | None, workload: PrecisionWorkload, seed: int) -> DataTask:
    """Next byte of the standard library's source text.

    Raises:
        SpecError: unknown options, or samples longer than the context.
    """
    config = _config(ByteLMConfig, workload)
    length = config.context if workload.sequence_length is None else workload.sequence_length
    if length > config.context:
        raise SpecError(
            "workload.sequence_length", got=length, expected=f"at most {config.context} (context)"
        )

    def draw(key: tuple[int, ...], train: bool) -> Batch:
        text = standard_library_text("train" if train else "validation")
        # Copied: the windows are fresh, but of 8 bits.
        ids = torch.from_numpy(windows(text, workload.batch, length + 1, key).astype(np.int64))
        return (ids[:, :-1],), ids[:, 1:]

    return DataTask(config, seed, _python("standard library source"), draw)


def digits_mlp(model: Model | None, workload: PrecisionWorkload, seed: int) -> DataTask:
    """Handwritten digits by a perceptron.

    Raises:
        SpecError: unknown options.
    """
    return _digits(_config(DigitsMLPConfig, workload), workload, seed)


def digits_cnn(model: Model | None, workload: PrecisionWorkload, seed: int) -> DataTask:
    """Handwritten digits by a small convolutional network.

    Raises:
        SpecError: unknown options.
    """
    return _digits(_config(DigitsCNNConfig, workload), workload, seed)


def _digits(config: NetworkConfig, workload: PrecisionWorkload, seed: int) -> DataTask:
    def draw(key: tuple[int, ...], train: bool) -> Batch:
        images, labels = digits("train" if train else "test")
        chosen = np.random.default_rng(key).integers(0, len(images), workload.batch)
        return (torch.from_numpy(images[chosen]),), torch.from_numpy(labels[chosen])

    return DataTask(config, seed, "scikit-learn digits", draw)


def _config(kind: Any, workload: PrecisionWorkload) -> Any:
    return validate(kind, dict(workload.network_options), "workload.network_options")


def _python(what: str) -> str:
    import platform

    length = len(standard_library_text("train"))
    print_of = zlib.crc32(standard_library_text("train").tobytes())
    return f"Python {platform.python_version()} {what}, {length} bytes, crc32 {print_of:08x}"
