"""`RequestStage`: requests that come and go, each of a length of its own. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError
from foreplan.planner.verify._decoder_layer import DECODE, PREFILL, Cache, Pass, Unequal
from foreplan.planner.verify.decoder import DecoderStage


class RequestStage(DecoderStage):
    """Layers ``[start, end)`` of a model with a cache of rows, one a request.

    A pass takes rows that follow each other: who ends leaves a gap, into which another row is
    moved.

    Args:
        model: the model; not one that attends to latents.
        start, end: as of `DecoderStage`.
        rows: of the cache.
        positions: of a row, the longest request's prompt and new tokens.
        device, reference: as of `DecoderStage`.

    Raises:
        SpecError: as of `DecoderStage`, or attention to latents.
    """

    def __init__(
        self, model: Model, start: int, end: int, *, rows: int, positions: int,
        device: str = "cpu", reference: bool = False,
    ) -> None:  # fmt: skip
        if model.latent is not None:
            raise SpecError(
                f"model {model.name}", got="attention to latents",
                expected="attention to keys and values, for requests of unequal lengths",
            )  # fmt: skip
        super().__init__(
            model, start, end, prefill_batches=(rows,), decode_batches=(rows,), prompt=1,
            positions=positions, device=device, reference=reference,
        )  # fmt: skip

    @torch.inference_mode()
    def fill(self, first: int, lengths: Sequence[int], tokens: int, x: Tensor) -> Tensor:
        """Take prompts through the stage.

        Args:
            first: row of the first; the others follow it.
            lengths: tokens of each prompt.
            tokens: that each is padded to, behind.
            x: first stage: token ids ``[batch, tokens]``; others: the peer's result ``[batch *
                tokens, hidden]``.

        Returns:
            The residual stream ``[batch * tokens, hidden]``, or on the last stage the next token
            ids ``[batch]``.
        """
        batch = len(lengths)
        now = self._at(PREFILL, batch, tokens, 0)
        if min(lengths) < tokens:
            now = now._replace(unequal=self._unequal([n - 1 for n in lengths], None))
        return self._through(x, now, self._views(first, batch))

    @torch.inference_mode()
    def extend(self, first: int, lengths: Sequence[int], x: Tensor) -> Tensor:
        """Take one more token of each request through the stage.

        Args:
            first: row of the first; the others follow it.
            lengths: tokens of each with this one.
            x: first stage: token ids ``[batch]``; others: ``[batch, hidden]``.

        Returns:
            The residual stream ``[batch, hidden]``, or on the last stage the next token ids.
        """
        batch, longest = len(lengths), max(lengths)
        now = self._at(DECODE, batch, 1, longest - 1)
        if min(lengths) < longest:
            last = torch.tensor([n - 1 for n in lengths], device=self.device)
            seen = torch.arange(longest, device=self.device) <= last[:, None]
            turns = {
                kind: (cos[last][:, None], sin[last][:, None])
                for kind, (cos, sin) in self._rotations.items()
            }
            unequal = self._unequal([n - 1 for n in lengths], seen)
            now = Pass(DECODE, batch, 1, min(lengths) - 1, longest, turns, unequal)
        return self._through(x, now, self._views(first, batch))

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of a row of the cache into another row."""
        cache = self._cache
        assert cache is not None  # a loaded stage has one
        parts = (cache,) if isinstance(cache, Tensor) else (cache.codes, cache.scale)
        for part in parts:
            part[:, :, target, :, :length].copy_(part[:, :, source, :, :length])

    def _views(self, first: int, batch: int) -> list[tuple[Cache, Cache]]:
        """The rows of a pass in the cache of each layer."""
        rows = slice(first, first + batch)
        return [(keys[rows], values[rows]) for keys, values in self._caches[DECODE][0]]

    def _unequal(self, last: Sequence[int], seen: Tensor | None) -> Unequal:
        return Unequal(torch.tensor(last, device=self.device), tuple(last), seen)
