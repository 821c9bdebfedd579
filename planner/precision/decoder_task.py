"""A decoder of the model zoo or of a Hugging Face folder as a training task.

Its samples are windows of Python's standard library, one byte a token: the same text for every
model, real statistics, and no download. Weights come from the folder where it has them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from foreplan.datasets.models.attention_window import refuse_windows
from foreplan.datasets.models.byte_text import standard_library_text, windows
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.model_limits import refuse_experts, refuse_longer
from foreplan.datasets.timing.host_memory import free_bytes
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.precision.spec import PrecisionWorkload

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BYTES = 256


class DecoderTask:
    """Next-token training of one decoder; see `TrainingTask`.

    Attributes:
        name: of the model.
    """

    def __init__(self, model: Model, workload: PrecisionWorkload, seed: int) -> None:
        refuse_experts(model, "training plans know no layers of experts")
        length = workload.sequence_length or min(128, model.sliding_window or model.max_sequence)
        refuse_longer(model, length, "workload.sequence_length", length)
        refuse_windows(model, length, "workload.sequence_length", "training under one is not timed")
        if model.vocab < _BYTES:
            raise SpecError(
                "model.vocab", got=model.vocab, expected=f"at least {_BYTES}: samples are bytes"
            )
        self.name, self._model, self._seed = model.name, model, seed
        self._batch, self._length = workload.batch, length

    def module(self) -> torch.nn.Module:
        """The causal language model, fp32; returns logits alone.

        Raises:
            InfeasibleError: its weights are more than this host has free.
        """
        import torch

        if torch.get_default_device().type == "cpu":
            self._refuse_larger(free_bytes())

        from foreplan.datasets.graphs.causal_lm import causal_lm

        class Logits(torch.nn.Module):
            """Takes token ids and returns logits."""

            def __init__(self, decoder: Any) -> None:
                super().__init__()
                self.decoder = decoder

            def forward(self, ids: Tensor) -> Tensor:
                out: Tensor = self.decoder(input_ids=ids, use_cache=False).logits
                return out

        with _seeded(self._seed):
            return Logits(causal_lm(self._model))

    def _refuse_larger(self, free: int) -> None:
        """Refuse before the system ends this process, or others, for the memory of the weights."""
        needed = 4 * self._model.parameters
        if needed > free:
            raise InfeasibleError(
                f"{self.name} is run with its weights in fp32, {needed / 2**30:.3g} GiB, of"
                f" which this host has {free / 2**30:.3g} GiB free",
                fix="plan on a larger host, or for a smaller model",
            )

    def batch(self, step: int, rank: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Windows of text and the bytes that follow them."""
        import torch

        text = standard_library_text("train")
        key = (self._seed, rank, step + (1 << 32))
        ids = torch.from_numpy(windows(text, self._batch, self._length + 1, key)).long()
        return (ids[:, :-1],), ids[:, 1:]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats."""
        from torch.nn import functional as F

        return F.cross_entropy(output.flatten(0, -2), target.flatten())


def decoder_task(model: Model | None, workload: PrecisionWorkload, seed: int) -> DecoderTask:
    """The plan's model as a task.

    Raises:
        SpecError: no model, a mixture of experts, or sequences that it does not take.
    """
    if model is None:
        raise SpecError(
            "model", got=None, expected="a model, because workload.network is 'model'",
            fix="give --model, or a network such as byte_lm",
        )  # fmt: skip
    return DecoderTask(model, workload, seed)


@contextlib.contextmanager
def _seeded(seed: int) -> Any:
    """Torch's random numbers from a seed, put back afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
