"""Orders of a bubble plan as CSV, for schedules of PyTorch and for whoever inserts encoder units.

The backbone's part is PyTorch's ``compute_only`` form (``torch.distributed.pipelining``,
``_PipelineScheduleRuntime._load_csv``): a row a rank, cells such as ``2F0``, ``1B3``, ``0I2``,
``0W2``. It has no words for encoder units, so that these are a second table: a line a unit, with
the number of the rank's backbone cells that come before it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from foreplan.errors import SpecError
from foreplan.planner.bubbles.actions import Step, parse_order, write_order
from foreplan.planner.bubbles.decision import BubblesDecision

#: Columns of the table of encoder units.
HEADER = ("rank", "after", "encoder", "unit", "pass", "microbatch")


def backbone_csv(decision: BubblesDecision) -> str:
    """The backbone's passes of each rank, in PyTorch's form.

    Raises:
        SpecError: passes in pieces, which PyTorch has no words for.
    """
    rows = []
    for rank, order in enumerate(decision.orders):
        steps = [step for step in parse_order(order) if step.encoder < 0]
        if any(step.piece >= 0 for step in steps):
            raise SpecError(
                f"orders[{rank}]", got="passes in pieces",
                expected="whole passes, which files of orders have words for",
                fix="plan without lanes (plan: {tp: 1, pp: ...}), where passes stay whole",
            )  # fmt: skip
        rows.append([step.word for step in steps])
    return _write(rows)


def encoder_csv(decision: BubblesDecision) -> str:
    """Every unit and where it stands: behind the first ``after`` backbone passes of its rank.

    Units with the same ``after`` run in the order of their lines.

    Raises:
        SpecError: collectives of units as words of their own.
    """
    rows: list[Sequence[object]] = [HEADER]
    for rank, order in enumerate(decision.orders):
        after = 0
        for step in parse_order(order):
            if step.encoder < 0:
                after += 1
            elif step.op not in "FB":
                raise SpecError(f"orders[{rank}]", got=step.word, expected="whole units")
            else:
                rows.append((rank, after, step.encoder, step.unit, step.op, step.microbatch))
    return _write(rows)


def read_orders(backbone: str, encoders: str) -> tuple[str, ...]:
    """The orders that `backbone_csv` and `encoder_csv` were written from.

    Args:
        backbone: rows of cells; empty cells, which PyTorch uses to line ranks up, are skipped.
        encoders: lines of units.

    Raises:
        SpecError: a cell that is no pass, a line that is no unit, a rank without a row, a place
            behind the row's end.
    """
    cells = [[cell for cell in row if cell] for row in _read(backbone, "backbone")]
    passes = [parse_order(" ".join(row), f"backbone row {k}") for k, row in enumerate(cells)]
    for k, row in enumerate(passes):
        for step in row:
            if step.encoder >= 0:
                raise SpecError(f"backbone row {k}", got=step.word, expected="passes such as 2F0")
    units: list[list[list[Step]]] = [[[] for _ in range(len(row) + 1)] for row in passes]
    for number, line in enumerate(_read(encoders, "encoder"), 1):
        if number == 1:
            if tuple(line) != HEADER:
                raise SpecError("encoder line 1", got=",".join(line), expected=",".join(HEADER))
            continue
        rank, after, step = _unit(line, number)
        if rank >= len(units) or after >= len(units[rank]):
            raise SpecError(
                f"encoder line {number}", got=",".join(line),
                expected="a rank with a row and a place in it",
            )  # fmt: skip
        units[rank][after].append(step)
    return tuple(
        write_order(step for k, after in enumerate(places) for step in (*row[k - 1 : k], *after))
        for row, places in zip(passes, units, strict=True)
    )


def _unit(line: Sequence[str], number: int) -> tuple[int, int, Step]:
    try:
        rank, after, encoder, unit = (int(field) for field in line[:4])
        op, microbatch = line[4], int(line[5])
        if min(rank, after, encoder, unit, microbatch) < 0 or op not in ("F", "B"):
            raise ValueError
    except (ValueError, IndexError):
        raise SpecError(
            f"encoder line {number}", got=",".join(line), expected=", ".join(HEADER)
        ) from None
    return rank, after, Step(op, microbatch, encoder=encoder, unit=unit)


def _read(text: str, what: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(text))
    except csv.Error as error:
        raise SpecError(f"{what} table", got=error, expected="lines of short cells") from error


def _write(rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
