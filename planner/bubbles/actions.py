"""The words of a rank's order, and what each means as an `Action`.

Close to the text form of PyTorch's pipeline schedules (``torch.distributed.pipelining``)::

    2F0        forward of virtual stage 2, micro-batch 0
    2B0        its backward; 2I0 and 2W0 are the halves for input and weights
    2F0:1-3    pieces 1 to 3 of it (see below)
    e0.2F5     forward of unit 2 of encoder 0, micro-batch 5
    e0.2B5     its backward
    e0.0-7F5   units 0, 1 ... 7 in turn; e0.7-0B5 units 7, 6 ... 0

Communication is not written: it follows from what is computed where. As actions
(``Action.op, stage, microbatch, step``):

==================  ==============================================================================
``F``, ``B``,       stage = virtual stage; step -1. Split passes (only with tensor parallelism) have
``I``, ``W``        step = first piece
``encode``,         stage = ``decision.stage_number(encoder, stage)``, step = unit (numbered through
``encode_backward`` all stages of the encoder)
``send``, ``recv``  stage = the *receiver's* stage, micro-batch, step = ``2 * encoder + direction``,
                    direction 0 for activations, 1 for gradients; ``encoder`` is that of the
                    features (stage 0) or of their gradient, and 0 between backbone stages
``all_gather``,     sharded parameters before the first use, gradients behind the last backward;
``reduce_scatter``  stage = first stage on the rank, or the encoder's stage
``all_reduce``      gradients of an encoder stage over its pipelines (no sharded optimizer), in
                    place; stage = the encoder's stage
``tensor``          collective of a layer inside a split pass, step = the piece that follows it
``optimizer``       once a rank, last
==================  ==============================================================================

What lies on one rank is handed over without send and recv: features of an encoder stage on the rank
of stage 0, consecutive stages of one rank.

Pieces: with tensor parallelism a layer's pass computes twice (attention, MLP) between collectives.
``2F0:1-3`` computes pieces 1 to 3 as one action; a split pass shows its collectives before each of
its parts and behind the last as actions of their own, so that what is listed between parts runs
while the link is busy. A pass that is written whole keeps them inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from foreplan.errors import SpecError

ENCODE, ENCODE_BACKWARD = "encode", "encode_backward"
ACTIVATION, GRADIENT = 0, 1
#: Passes of the backbone by the letter of an order.
PASSES = ("F", "B", "I", "W")

_WORD = re.compile(
    r"(?:e(?P<encoder>\d+)\.(?P<first>\d+)(?:-(?P<last>\d+))?|(?P<stage>\d+))(?P<op>[FBIW])"
    r"(?P<microbatch>\d+)(?::(?P<begin>\d+)-(?P<end>\d+))?"
)


class Step(NamedTuple):
    """One entry of an order.

    Attributes:
        op: ``F``, ``B``, ``I`` or ``W``.
        microbatch: its micro-batch.
        stage: virtual stage, -1 for encoder work.
        encoder: encoder, -1 for the backbone's work.
        unit: unit of the encoder, -1 for the backbone's work.
        pieces: first and last piece of a split pass, ``None`` for a whole one.
    """

    op: str
    microbatch: int
    stage: int = -1
    encoder: int = -1
    unit: int = -1
    pieces: tuple[int, int] | None = None

    @property
    def word(self) -> str:
        """Text form."""
        if self.encoder >= 0:
            return f"e{self.encoder}.{self.unit}{self.op}{self.microbatch}"
        pieces = "" if self.pieces is None else f":{self.pieces[0]}-{self.pieces[1]}"
        return f"{self.stage}{self.op}{self.microbatch}{pieces}"


def parse_order(text: str, where: str = "order") -> list[Step]:
    """Read one rank's order; runs of units come out unit by unit.

    Raises:
        SpecError: a word that is none.
    """
    return [step for word in text.split() for step in _read(word, where)]


def _read(word: str, where: str) -> Iterator[Step]:
    match = _WORD.fullmatch(word)
    if match is None or (match["encoder"] and (match["op"] in "IW" or match["begin"])):
        raise SpecError(where, got=word, expected="words such as 2F0, 1B3, e0.2F5 or e0.7-0B5")
    microbatch = int(match["microbatch"])
    if match["encoder"] is None:
        pieces = None if match["begin"] is None else (int(match["begin"]), int(match["end"]))
        yield Step(match["op"], microbatch, int(match["stage"]), pieces=pieces)
        return
    first = int(match["first"])
    last = first if match["last"] is None else int(match["last"])
    for unit in range(first, last + 1) if last >= first else range(first, last - 1, -1):
        yield Step(match["op"], microbatch, encoder=int(match["encoder"]), unit=unit)


def write_order(steps: Iterable[Step]) -> str:
    """Write one rank's order; consecutive units of a micro-batch become one word."""
    words: list[str] = []
    run: list[Step] = []

    def close() -> None:
        if len(run) == 1:
            words.append(run[0].word)
        elif run:
            a, b = run[0], run[-1]
            words.append(f"e{a.encoder}.{a.unit}-{b.unit}{a.op}{a.microbatch}")
        run.clear()

    for step in steps:
        turn = 1 if step.op == "F" else -1
        if run and step != run[-1]._replace(unit=run[-1].unit + turn):
            close()
        if step.encoder >= 0:
            run.append(step)
        else:
            close()
            words.append(step.word)
    close()
    return " ".join(words)
