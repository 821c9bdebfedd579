"""`ShardStage`: a stage's layers on one of several devices that compute them together.

Every device takes the whole residual stream through its heads and features of each layer; what
the devices add to the stream is summed over them. Words are split too: each device embeds its own
and picks the best of its own. A pass is therefore a row of pieces with an exchange after each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foreplan.cost_models.tensor_parallel import shard_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import WeightSource
from foreplan.planner.verify._decoder_layer import DECODE, PREFILL
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.shard_weights import ShardWeights
from foreplan.planner.verify.stage_kernels import StageKernels


class ShardStage(DecoderStage):
    """See the module and `DecoderStage`.

    Args:
        model: the whole model.
        start, end: layers of the stage.
        degree: devices that share it.
        lane: which of them.
        options: as of `DecoderStage`.

    Raises:
        SpecError: as of `DecoderStage`, or a degree by which the model cannot be split.
    """

    def __init__(
        self, model: Model, start: int, end: int, *, degree: int, lane: int, **options: Any
    ) -> None:
        super().__init__(shard_model(model, degree), start, end, **options)
        self._degree, self._lane = degree, lane

    def load(self, weights: WeightSource, kernels: StageKernels) -> None:
        """As of `DecoderStage`, of the device's part of ``weights``."""
        super().load(ShardWeights(weights, self._degree, self._lane), kernels)

    def _allocate(self) -> None:
        # What a library sums in place has to be a plain tensor, and so has what a pass that makes
        # such tensors writes to.
        with torch.inference_mode(mode=False), torch.no_grad():
            super()._allocate()

    @property
    def exchanges(self) -> int:
        """Pieces of a pass after which something is exchanged: all but the last."""
        return 2 * (self.end - self.start) + int(self.first) + int(self.last)

    def passing(self, phase: int, micro_batch: int, step: int, x: Tensor) -> Iterator[Tensor]:
        """The pieces of a pass; use in `torch.no_grad`.

        Args:
            phase: `PREFILL` or `DECODE`.
            micro_batch: index in the phase's micro-batches.
            step: of decoding; 0 of prefill.
            x: as of `DecoderStage.prefill` and `DecoderStage.decode`, the same on every device.

        Yields:
            What is exchanged in place before the next is asked for: sums over the devices, then
            on a stage with the head ``[degree, batch, 2]`` fp64, of which each device fills its
            own. Last the pass's result, the same on every device.
        """
        batch = self._batches[phase][micro_batch]
        tokens = self.prompt if phase == PREFILL else 1
        position = self.prompt + step - 1 if phase == DECODE else 0
        now = self._at(phase, batch, tokens, position)
        if self._embed is not None:
            x = self._own_words(x.reshape(-1))
            yield x
            x = self._placed(x, now)
        for layer, (cache_k, cache_v) in zip(
            self._layers, self._caches[phase][micro_batch], strict=True
        ):
            part = layer.attend(x, now, cache_k, cache_v)
            yield part
            attended = layer.add_attended(x, part)
            if not layer.parallel:
                x = attended  # nobody needs the layer's input any longer
            part = layer.feed(x, now)
            yield part
            x = layer.add_fed(attended, part)
            del attended  # of which nothing is left for the next layer to hold
        if self._head is None:
            yield x
            return
        logits = self._scores(x, now)
        best = self._argmax(logits)
        choices = torch.zeros(self._degree, batch, 2, dtype=torch.float64, device=self.device)
        choices[self._lane, :, 0] = logits.gather(1, best[:, None])[:, 0].double()
        choices[self._lane, :, 1] = (best + self._lane * self.model.vocab).double()
        yield choices
        # Of equal logits the first word's, as one device would choose.
        lane = choices[:, :, 0].argmax(0, keepdim=True)
        yield choices[:, :, 1].gather(0, lane)[0].long()

    def _own_words(self, ids: Tensor) -> Tensor:
        """Embedded tokens, zero where the word is another device's."""
        assert self._embed is not None  # only the first stage embeds
        rows = ids - self._lane * self.model.vocab
        other = (rows < 0) | (rows >= len(self._embed))
        found: Tensor = self._embedding(self._embed, rows.masked_fill(other, 0))
        return found.masked_fill_(other[:, None], 0)
