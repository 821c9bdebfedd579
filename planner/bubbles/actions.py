"""The words of a rank's order, and what each means as an `Action`.

Close to the text form of PyTorch's pipeline schedules (``torch.distributed.pipelining``)::

    2F0        forward of virtual stage 2, micro-batch 0
    2B0        its backward; 2I0 and 2W0 are the halves for input and weights
    2F0:1      piece 1 of it (see below)
    e0.2F5     forward of unit 2 of encoder 0, micro-batch 5
    e0.2B5     its backward
    e0.0-7F5   units 0, 1 ... 7 in turn; e0.7-0B5 units 7, 6 ... 0
    e0.2f5     the collective in front of unit 2 (tensor parallel encoders); e0.2b5 backwards

Communication is not written: it follows from what is computed where. As actions
(``Action.op, stage, microbatch, step``):

==================  ==============================================================================
``F``, ``B``,       stage = virtual stage; step -1. Split passes (only with tensor parallelism) have
``I``, ``W``        step = piece
``encode``,         stage = ``decision.stage_number(encoder, stage)``, step = unit (numbered through
``encode_backward`` all stages of the encoder)
``send``, ``recv``  stage = the *receiver's* stage, micro-batch, step = ``2 * encoder + direction``,
                    direction 0 for activations, 1 for gradients; ``encoder`` is that of the
                    features (stage 0) or of their gradient, and 0 between backbone stages
``all_gather``,     sharded parameters before the first use, gradients behind the last backward;
``reduce_scatter``  stage = first stage on the rank, step -1; or the encoder's stage, step = first
                    unit of the bucket (`StepSchedule.buckets`)
``all_reduce``      gradients without sharded optimizer, in place; stage and step likewise, an
                    encoder stage being one bucket
``beside``          what one of these takes from the rank's computation while it runs beside it, as
                    measured (`Tier.taken_beside`): computes nothing of its own; step likewise,
                    stage the encoder's or -1
``tensor``          collective of a layer inside a split pass or in front of an encoder unit, step
                    = the piece or unit that follows it
``optimizer``       once a rank, last
==================  ==============================================================================

What lies on one rank is handed over without send and recv: features of an encoder stage on the rank
of stage 0, consecutive stages of one rank.

Pieces: with tensor parallelism a layer's pass computes twice (attention, MLP) between collectives.
``2F0:1`` computes piece 1 alone. A pass that is written piece by piece has its collectives in front
of each piece as actions of their own, and behind the last one that of the number that follows, so
that what is listed between pieces runs while the link is busy; a pass that is written whole keeps
them inside. Likewise the units of a micro-batch and stage: where a collective is written, all of
theirs are, and else they are part of the units. One behind a stage's last unit bears the next
unit's number (backwards: the one before).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from foreplan.errors import SpecError

ENCODE, ENCODE_BACKWARD = "encode", "encode_backward"
ACTIVATION, GRADIENT = 0, 1

_WORD = re.compile(
    r"(?:e(?P<encoder>\d{1,7})\.(?P<first>-?\d{1,7})(?:-(?P<last>\d{1,7}))?(?P<unit_op>[FBfb])"
    r"|(?P<stage>\d{1,7})(?P<op>[FBIW]))(?P<microbatch>\d{1,7})(?::(?P<piece>\d{1,7}))?",
    re.ASCII,
)
#: Twice the layers of any encoder; a run of units is written as one word whatever its length.
_MOST_UNITS = 4096
#: Of one rank's order, units one by one.
MOST_STEPS = 1_000_000


class Step(NamedTuple):
    """One entry of an order.

    Attributes:
        op: ``F``, ``B``, ``I`` or ``W``; ``f`` or ``b`` for a collective of an encoder.
        microbatch: its micro-batch.
        stage: virtual stage, -1 for encoder work.
        encoder: encoder, -1 for the backbone's work.
        unit: unit of the encoder, -1 for the backbone's work.
        piece: of a split pass, -1 for a whole one.
    """

    op: str
    microbatch: int
    stage: int = -1
    encoder: int = -1
    unit: int = -1
    piece: int = -1

    @property
    def word(self) -> str:
        """Text form."""
        if self.encoder >= 0:
            return f"e{self.encoder}.{self.unit}{self.op}{self.microbatch}"
        piece = "" if self.piece < 0 else f":{self.piece}"
        return f"{self.stage}{self.op}{self.microbatch}{piece}"


def parse_order(text: str, where: str = "order") -> list[Step]:
    """Read one rank's order; runs of units come out unit by unit.

    Raises:
        SpecError: a word that is none.
    """
    steps: list[Step] = []
    for word in text.split():
        steps += _read(word, where)
        if len(steps) > MOST_STEPS:
            raise SpecError(where, got=f"{text[:40]}...", expected=f"at most {MOST_STEPS} passes")
    return steps


def _read(word: str, where: str) -> Iterator[Step]:
    match = _WORD.fullmatch(word)
    if match is None or (match["encoder"] and match["piece"]):
        raise SpecError(where, got=word, expected="words such as 2F0, 1B3, e0.2F5 or e0.7-0B5")
    microbatch = int(match["microbatch"])
    if match["encoder"] is None:
        piece = -1 if match["piece"] is None else int(match["piece"])
        yield Step(match["op"], microbatch, int(match["stage"]), piece=piece)
        return
    first = int(match["first"])
    last = first if match["last"] is None else int(match["last"])
    if abs(last - first) > _MOST_UNITS:
        raise SpecError(where, got=word, expected=f"runs of at most {_MOST_UNITS} units")
    for unit in range(first, last + 1) if last >= first else range(first, last - 1, -1):
        yield Step(match["unit_op"], microbatch, encoder=int(match["encoder"]), unit=unit)


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
        turn = 1 if step.op in "Ff" else -1
        if run and step != run[-1]._replace(unit=run[-1].unit + turn):
            close()
        if step.encoder >= 0:
            run.append(step)
        else:
            close()
            words.append(step.word)
    close()
    return " ".join(words)
