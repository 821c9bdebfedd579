"""`EncoderStage`: the units of one encoder stage on one rank, and what they hand to each other."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from foreplan.errors import SpecError
from foreplan.planner.bubbles.execution.cut import Cut
from foreplan.planner.bubbles.execution.lanes import Lanes
from foreplan.planner.bubbles.execution.parts import EncoderPart
from foreplan.planner.bubbles.execution.pieces import Pieces
from foreplan.planner.bubbles.spec import Encoder


class EncoderStage:
    """Runs units one at a time, each a `Cut`; or halves with the lanes' sums apart (`Pieces`).

    Args:
        spec: the encoder.
        parts: by unit, in order.
        lanes: that share each half.
        first: whether the stage takes patches, which need no gradient.
        apart: the rank's list has the sums as actions of their own.

    Raises:
        SpecError: sums apart of units larger than half a layer, or of units computed again.
    """

    def __init__(
        self, spec: Encoder, parts: Mapping[int, EncoderPart], lanes: Lanes, *, first: bool,
        apart: bool,
    ) -> None:  # fmt: skip
        self._units = range(min(parts), max(parts) + 1)
        self._cuts: dict[int, Cut] = {}
        self._pieces: Pieces | None = None
        self._between: dict[tuple[str, int, int], Tensor] = {}
        ends, passes = (parts[self._units[0]], parts[self._units[-1]]), not first
        if apart:
            halves = [half for part in parts.values() for half in part.pieces]
            if spec.recompute or len(halves) > len(parts):
                raise SpecError(
                    f"units of encoder {spec.name}", got="collectives of their own",
                    expected="that of halves of layers that are not computed again",
                )  # fmt: skip
            self._pieces = Pieces(
                halves, lambda inputs, _: ends[0].open(*inputs), lambda x, _: ends[1].close(x),
                [passes], lanes, frozen=spec.frozen,
            )  # fmt: skip
            return
        for unit, part in parts.items():
            self._cuts[unit] = Cut(
                lambda inputs, _, part=part: part(*inputs),  # type: ignore[misc]  # bound at once
                [passes or unit > self._units[0]], frozen=spec.frozen,
                recompute=bool(spec.recompute),
            )  # fmt: skip

    @property
    def apart(self) -> bool:
        """Whether sums are apart."""
        return self._pieces is not None

    @property
    def live(self) -> int:
        """Micro-batches of units that are between their two passes."""
        return sum(cut.live for cut in self._cuts.values()) + (
            0 if self._pieces is None else self._pieces.live
        )

    def starts(self, unit: int, *, backward: bool) -> bool:
        """Whether a pass of the stage begins with this unit."""
        return unit == self._units[-1 if backward else 0]

    def forward(self, unit: int, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Run a unit forwards.

        Args:
            unit: which; units run in order.
            microbatch: which.
            x: for the stage's first unit.

        Returns:
            Of the last unit the stage's output.
        """
        if self._pieces is not None:
            inputs = [] if x is None else [x]
            return self._pieces.forward_piece(microbatch, unit - self._units[0], inputs)
        if x is None:
            x = self._between.pop(("F", unit, microbatch))
        made = self._cuts[unit].forward(microbatch, [x])
        if unit == self._units[-1]:
            return made
        self._between["F", unit + 1, microbatch] = made
        return None

    def backward(self, unit: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Run a unit backwards.

        Args:
            unit: which; units run in reverse order.
            microbatch: which.
            gradient: of the stage's output, for its last unit.

        Returns:
            Of the first unit the gradient of the stage's input, where that needs one.
        """
        if self._pieces is not None:
            turned = self._pieces.backward_piece(microbatch, self._units[-1] - unit, gradient)
            return None if turned is None else turned[0]
        if gradient is None:
            gradient = self._between.pop(("B", unit, microbatch))
        (found,) = self._cuts[unit].backward(microbatch, gradient)
        if unit == self._units[0]:
            return found
        assert found is not None
        self._between["B", unit - 1, microbatch] = found
        return None

    def wait(self, microbatch: int) -> None:
        """Wait for the sum that the micro-batch's last unit started, if one is on its way."""
        if self._pieces is not None:
            self._pieces.wait(microbatch)

    def forget(self) -> None:
        """Drop what unfinished micro-batches keep."""
        for cut in self._cuts.values():
            cut.forget()
        if self._pieces is not None:
            self._pieces.forget()
        self._between.clear()
