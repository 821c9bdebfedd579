"""Orders of a bubble plan as CSV, for schedules of PyTorch and for whoever inserts encoder units.

The backbone's part is PyTorch's ``compute_only`` form (``torch.distributed.pipelining``,
``_PipelineScheduleRuntime._load_csv``): a row a rank, cells such as ``2F0``, ``1B3``, ``0I2``,
``0W2``. It has no words for encoder units, so that these are a second table: a line a unit, with
the number of the rank's backbone cells that come before it. With tensor parallelism units run
beside the collectives inside a pass. Such a line says how many of how many pieces of the next cell
come before it, too: half layers (attention and MLP in turn), and the collective behind them.
Collectives of units have lines of their own, with ``f`` and ``b`` for the pass of the unit that
they are in front of.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import Step, parse_order, write_order
from foreplan.planner.bubbles.decision import BubblesDecision

#: Columns of the table of encoder units.
HEADER = ("rank", "after", "encoder", "unit", "pass", "microbatch", "piece", "pieces")
#: Pieces of a pass at most: two a layer.
_MOST_PIECES = 1 << 12


def backbone_csv(decision: BubblesDecision) -> str:
    """The backbone's passes of each rank, in PyTorch's form: whole, however they are run."""
    return _write(
        [step.word for step, _ in _passes(parse_order(order))] for order in decision.orders
    )


def encoder_csv(decision: BubblesDecision) -> str:
    """Every unit and where it stands: behind the first ``after`` backbone passes of its rank.

    Units at the same place run in the order of their lines.
    """
    rows: list[Sequence[object]] = [HEADER]
    for rank, order in enumerate(decision.orders):
        steps = parse_order(order)
        counts = [pieces for _, pieces in _passes(steps)]
        begun = piece = 0
        for step in steps:
            if step.encoder < 0:
                begun += step.piece <= 0
                piece = step.piece + 1
                continue
            inside = 0 < piece < counts[begun - 1]
            place = (piece, counts[begun - 1]) if inside else (0, 0)
            unit = step.encoder, step.unit, step.op, step.microbatch
            rows.append((rank, begun - inside, *unit, *place))
    return _write(rows)


def _passes(steps: Iterable[Step]) -> list[tuple[Step, int]]:
    """Whole passes of the backbone, with the pieces that each is written in; 0: in none."""
    found: list[tuple[Step, int]] = []
    for step in steps:
        if step.encoder >= 0:
            continue
        if step.piece > 0 and found:
            found[-1] = found[-1][0], step.piece + 1
        else:
            found.append((step._replace(piece=-1), step.piece + 1))
    return found


class _Row:
    """A rank's passes, and the units before, inside and behind them."""

    def __init__(self, passes: Sequence[Step]) -> None:
        self.passes = passes
        self._units: list[dict[int, list[Step]]] = [{} for _ in range(len(passes) + 1)]
        self._pieces = [0] * len(passes)

    def add(self, after: int, piece: int, pieces: int, step: Step) -> bool:
        """Place a unit; whether there is such a place."""
        if after > len(self.passes):
            return False
        if piece or pieces:
            if after == len(self.passes) or self._pieces[after] not in (0, pieces):
                return False
            self._pieces[after] = pieces
        self._units[after].setdefault(piece, []).append(step)
        return True

    def steps(self) -> Iterator[Step]:
        """All of them in order; passes with units inside piece by piece."""
        for k, units in enumerate(self._units):
            yield from units.get(0, ())
            if k == len(self.passes):
                return
            if not self._pieces[k]:
                yield self.passes[k]
            for piece in range(self._pieces[k]):
                yield from units.get(piece, ()) if piece else ()
                yield self.passes[k]._replace(piece=piece)


def read_orders(backbone: str, encoders: str) -> tuple[str, ...]:
    """The orders that `backbone_csv` and `encoder_csv` were written from.

    A pass that was written in pieces without a unit between them comes back whole.

    Args:
        backbone: rows of cells; empty cells, which PyTorch uses to line ranks up, are skipped.
        encoders: lines of units.

    Raises:
        SpecError: a cell that is no pass, a line that is no unit, a rank without a row, a place
            behind the row's end, a pass of two numbers of pieces.
    """
    cells = [[cell for cell in row if cell] for row in _read(backbone, "backbone")]
    rows = [_Row(parse_order(" ".join(row), f"backbone row {k}")) for k, row in enumerate(cells)]
    for k, row in enumerate(rows):
        for step in row.passes:
            if step.encoder >= 0 or step.piece >= 0:
                raise SpecError(f"backbone row {k}", got=step.word, expected="passes such as 2F0")
    for number, line in enumerate(_read(encoders, "encoder"), 1):
        if number == 1:
            if tuple(line) != HEADER:
                raise SpecError("encoder line 1", got=",".join(line), expected=",".join(HEADER))
            continue
        rank, after, piece, pieces, step = _unit(line, number)
        if rank >= len(rows) or not rows[rank].add(after, piece, pieces, step):
            raise SpecError(
                f"encoder line {number}", got=",".join(line),
                expected="a rank with a row and a place in it",
            )  # fmt: skip
    return tuple(write_order(row.steps()) for row in rows)


def _unit(line: Sequence[str], number: int) -> tuple[int, int, int, int, Step]:
    try:
        rank, after, encoder, unit = (int(field) for field in line[:4])
        op, microbatch, piece, pieces = line[4], *(int(field) for field in line[5:8])
        link = op in ("f", "b")  # one behind a stage's first unit, backwards, is numbered -1
        numbers = rank, after, encoder, microbatch, unit + link
        if min(numbers) < 0 or not (link or op in ("F", "B")):
            raise ValueError
        if not (0 < piece < pieces <= _MOST_PIECES or piece == pieces == 0):
            raise ValueError
    except (ValueError, IndexError):
        raise SpecError(
            f"encoder line {number}", got=",".join(line), expected=", ".join(HEADER)
        ) from None
    return rank, after, piece, pieces, Step(op, microbatch, encoder=encoder, unit=unit)


def _read(text: str, what: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(text))
    except csv.Error as error:
        raise SpecError(f"{what} table", got=error, expected="lines of short cells") from error


def _write(rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
