"""`ShardWeights`: the weights that one of several devices holds that share a model's layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from foreplan.cost_models.layout import Box
from foreplan.cost_models.tensor_parallel import shard_boxes, shard_model
from foreplan.datasets.models.weights import Part, WeightSource


class ShardWeights:
    """Boxes of another source's tensors; see `foreplan.datasets.models.weights.WeightSource`.

    Args:
        source: of the whole model; is read whole, slice by slice.
        degree: devices that share it.
        lane: which of them.

    Attributes:
        model: of the shard, see `shard_model`.
    """

    def __init__(self, source: WeightSource, degree: int, lane: int) -> None:
        self._source, self._degree, self._lane = source, degree, lane
        self.model = shard_model(source.model, degree)

    def names(self, part: Part) -> tuple[str, ...]:
        """Names of the tensors of ``part`` of which the device holds any."""
        return tuple(name for name in self._source.names(part) if self._boxes(part, name))

    def shape(self, part: Part, name: str) -> tuple[int, ...]:
        """Shape of the device's part of a tensor."""
        boxes = self._boxes(part, name)
        rows = sum(box.ranges[0][1] - box.ranges[0][0] for box in boxes)
        return rows, *(end - begin for begin, end in boxes[0].ranges[1:])

    def tensor(self, part: Part, name: str) -> torch.Tensor:
        """The device's part of a tensor."""
        return next(self.slices(part, name, self.shape(part, name)[0]))

    def slices(self, part: Part, name: str, rows: int) -> Iterator[torch.Tensor]:
        """The same in slices of ``rows``, the last maybe less."""
        held: list[torch.Tensor] = []
        for piece in self._pieces(part, name, rows):
            held.append(piece)
            while sum(map(len, held)) >= rows:
                joined = torch.cat(held) if len(held) > 1 else held[0]
                yield joined[:rows].contiguous()
                held = [joined[rows:]] if len(joined) > rows else []
        if held:
            yield torch.cat(held).contiguous()

    def _pieces(self, part: Part, name: str, rows: int) -> Iterator[torch.Tensor]:
        """What the boxes, which ascend, take from each slice of the source."""
        # A slice of fewer columns holds fewer elements than the caller has room for.
        whole = self._source.shape(part, name)
        wide = max(rows * math.prod(self.shape(part, name)[1:]) // math.prod(whole[1:]), 1)
        boxes, at = self._boxes(part, name), 0
        for piece in self._source.slices(part, name, min(wide, whole[0])):
            for box in boxes:
                (first, last), *others = box.ranges
                begin, end = max(first - at, 0), min(last - at, len(piece))
                if begin < end:
                    yield piece[(slice(begin, end), *(slice(low, high) for low, high in others))]
            at += len(piece)
            if at >= boxes[-1].ranges[0][1]:
                break

    def _boxes(self, part: Part, name: str) -> tuple[Box, ...]:
        shape = self._source.shape(part, name)
        return shard_boxes(self._source.model, self._degree, self._lane, name, shape)
