"""Columns of a CSV or Parquet file, looked up by any of several names, with one-line errors."""

from __future__ import annotations

import codecs
import gzip
import lzma
import os
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets import latency_range
from foreplan.datasets.parquet import open_parquet, plain
from foreplan.datasets.specs import nearest
from foreplan.datasets.sweeps.operator_table import Texts, texts
from foreplan.errors import SpecError

#: Larger sizes overflow when they are multiplied.
_MOST = 1e18
#: Bytes of a CSV: about half a GB once read.
_MOST_BYTES = 256 << 20


class Columns:
    """A file's columns.

    Args:
        where: the file, for errors.
        table: a ``pyarrow.Table``.
        device: device of every row, or ``None`` if the file says.
        first_line: line of a text file that holds the first row; ``None`` where there are no lines.
    """

    def __init__(
        self, where: str, table: Any, device: str | None = None, *, first_line: int | None = None
    ) -> None:
        self.where = where
        self._first_line = first_line
        self.device = device
        self._table = table
        self._names: dict[str, str] = {}
        self._index: dict[str, list[int]] = {}
        for index, name in enumerate(table.column_names):
            word = name.strip().lower()
            self._names.setdefault(word, name)
            self._index.setdefault(word, []).append(index)

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._table.num_rows)

    def find(self, *names: str) -> str | None:
        """The first of the names (in lower case) that is a column of the file."""
        return next((name for name in names if name in self._names), None)

    def has(self, *names: str) -> bool:
        """Whether each of the names is a column."""
        return all(name in self._names for name in names)

    def texts(self, *names: str, default: str | None = None) -> Texts:
        """The column of the first known name as texts; an empty cell is ``default`` or ``""``.

        Raises:
            SpecError: no such column, and no default; two columns of the name; no UTF-8.
        """
        found = self.find(*names)
        if found is None:
            if default is None:
                raise self._missing(names)
            return texts([default] * len(self))
        try:
            values = [
                # Where one cell is no UTF-8, Arrow reads a CSV's whole column as bytes.
                value.decode() if isinstance(value, bytes) else value
                for value in self._column(found).to_pylist()
            ]
        except UnicodeDecodeError as error:
            raise SpecError(
                f"{self.where}: column {found}", got=str(error), expected="texts in UTF-8"
            ) from error
        return texts((default or "") if value is None else str(value).strip() for value in values)

    def devices(self, *names: str) -> Texts:
        """As `texts`; rows that name no device ran on the reader's own, if it was given one.

        Raises:
            SpecError: a row without a device, and none given.
        """
        found = self.texts(*names, default=self.device)
        if self.device:  # a CSV's empty cell beside texts is one, too, and no missing value
            return texts(name or self.device for name in found)
        self._refuse_texts(
            found == "", found, names, "the device that it was measured on",
            "name it there; evaluate and train take --device for rows that do not",
        )  # fmt: skip
        return found

    def words(self, name: str, known: Collection[str]) -> Texts:
        """As `texts`, of words that are all known.

        Raises:
            SpecError: another word; the error names the first such row.
        """
        found = self.texts(name)
        bad = ~np.isin(found, list(known))
        guess = nearest(found[np.argmax(bad)], known) if bad.any() else None
        fix = f"did you mean {guess}?" if guess else None
        self._refuse_texts(bad, found, (name,), f"one of {', '.join(known)}", fix)
        return found

    def numbers(self, *names: str, default: float | None = None) -> NDArray[np.float64]:
        """The column of the first known name as numbers; an empty cell is ``default`` or NaN.

        Raises:
            SpecError: no such column and no default, two columns of the name, or a cell that is no
                number.
        """
        import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

        found = self.find(*names)
        if found is None:
            if default is None:
                raise self._missing(names)
            return np.full(len(self), default)
        column = self._column(found)
        try:
            values = column.cast(pa.float64()).to_numpy()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SpecError(
                f"{self.where}: column {found}", got=str(error), expected="numbers"
            ) from error
        if default is not None:
            values = np.where(np.isnan(values), default, values)
        self._refuse(np.abs(values) > _MOST, values, names, "a number of a size that computes")
        return np.asarray(values, dtype=np.float64)

    def place(self, row: int) -> str:
        """Where a row (of N, from 0) stands: the file's line, or the row, counted from 1."""
        if self._first_line is None:
            return f"{self.where}: row {row + 1}"
        return f"{self.where}: line {row + self._first_line}"

    def sizes(
        self, *names: str, rows: NDArray[np.bool_] | None = None, least: int = 1,
        default: float | None = None,
    ) -> NDArray[np.float64]:  # fmt: skip
        """As `numbers`, of whole numbers of at least ``least``.

        Args:
            names: the column's names.
            rows: where the size is needed (all rows); elsewhere 0.
            least: smallest size.
            default: of an empty cell and of a file without the column.

        Raises:
            SpecError: a size that is not one; the error names the first such row.
        """
        values = self.numbers(*names, default=default)
        needed = np.ones(len(self), dtype=bool) if rows is None else rows
        bad = needed & ~((values >= least) & (values == np.floor(values)))
        self._refuse(bad, values, names, f"a whole number of at least {least}")
        return np.where(needed, values, 0.0)

    def milliseconds(self, *names: str) -> NDArray[np.float64]:
        """A column of milliseconds, in seconds.

        Raises:
            SpecError: a latency that none can be; see `latency_range`.
        """
        return self._latencies(names, 1e3, "ms")

    def seconds(self, *names: str) -> NDArray[np.float64]:
        """A column of seconds.

        Raises:
            SpecError: a latency that none can be; see `latency_range`.
        """
        return self._latencies(names, 1.0, "s")

    def _latencies(self, names: tuple[str, ...], per_s: float, unit: str) -> NDArray[np.float64]:
        values = self.numbers(*names)
        seconds: NDArray[np.float64] = values / per_s
        bad = ~((seconds >= latency_range.LEAST_S) & (seconds <= latency_range.MOST_S))
        self._refuse(bad, values, names, latency_range.expected(per_s, unit))
        return seconds

    def _refuse(
        self, bad: NDArray[np.bool_], values: NDArray[np.float64], names: Sequence[str],
        expected: str,
    ) -> None:  # fmt: skip
        if bad.any():
            value = float(values[int(np.argmax(bad))])
            raise self._refusal(bad, None if np.isnan(value) else value, names, expected)

    def _refuse_texts(
        self, bad: NDArray[np.bool_], values: Texts, names: Sequence[str], expected: str,
        fix: str | None,
    ) -> None:  # fmt: skip
        if bad.any():
            value = values[int(np.argmax(bad))] or None
            raise self._refusal(bad, value, names, expected, fix)

    def _refusal(
        self, bad: NDArray[np.bool_], got: object, names: Sequence[str], expected: str,
        fix: str | None = None,
    ) -> SpecError:  # fmt: skip
        """What is said of the first bad row."""
        # As the file spells it, which may be another name than ours for the same.
        found = self.find(*names)
        name = names[0] if found is None else self._names[found].strip()
        more = f" ({int(bad.sum())} such rows)" if bad.sum() > 1 else ""
        place = self.place(int(np.argmax(bad)))
        return SpecError(f"{place}, column {name}", got=got, expected=expected + more, fix=fix)

    def _column(self, name: str) -> Any:
        index = self._index[name]
        if len(index) > 1:
            raise SpecError(
                f"{self.where}: column {name}",
                got=", ".join(self._table.column_names[i] for i in index),
                expected="one column of that name (letters' case does not matter)",
            )
        return self._table.column(index[0])

    def _missing(self, names: tuple[str, ...]) -> SpecError:
        return SpecError(
            self.where,
            got="columns " + ", ".join(self._names),
            expected="a column " + " or ".join(names),
        )


def read_columns(
    path: str | os.PathLike[str], *, device: str | None = None, header: bool = True
) -> Columns:
    """Read a CSV (``.csv``, ``.csv.gz``, ``.csv.xz``) or Parquet file.

    Args:
        path: the file; what it is, its first bytes say.
        device: device of every row.
        header: false where a CSV may have none; its columns are then ``c0``, ``c1``, ...

    Raises:
        SpecError: cannot be read, is broken, or has no row.
    """
    import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.csv as pv  # type: ignore[import-untyped, unused-ignore]

    where = str(path)
    first_line: int | None = None
    try:
        with Path(path).open("rb") as stream:
            magic = stream.read(6)
        if magic[:4] == b"PAR1":
            with open_parquet(where) as file:
                table = plain(file.read(), where)
        elif magic[:1] in (b"{", b"["):
            raise SpecError(
                where, got="JSON", expected="a CSV or Parquet file",
                fix="programs as JSON lines are of --format tir-jsonl",
            )  # fmt: skip
        elif magic[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise SpecError(
                where, got="text in UTF-16", expected="a CSV file in UTF-8",
                fix="save it again as CSV in UTF-8",
            )  # fmt: skip
        else:
            text = _text(where, magic)
            options = pv.ReadOptions()
            if not header and not _has_header(text):
                options.autogenerate_column_names = True
            table = pv.read_csv(pa.BufferReader(text), read_options=options)
            if table.num_columns == 1:
                _refuse_separator(where, table.column_names[0])
            first_line = 1 if options.autogenerate_column_names else 2
            if options.autogenerate_column_names:
                table = table.rename_columns([f"c{i}" for i in range(table.num_columns)])
    except OSError as error:
        got = error.strerror or str(error)
        raise SpecError(
            where, got=got, expected="a readable CSV or Parquet file", fix=_files_of(Path(path))
        ) from error
    except (
        pa.ArrowException, UnicodeDecodeError, EOFError, zlib.error, lzma.LZMAError
    ) as error:  # fmt: skip
        raise SpecError(where, got=str(error), expected="a CSV or Parquet file") from error
    if table.num_rows == 0:
        raise SpecError(where, got="no row", expected="at least one measured operator")
    try:
        return Columns(where, table, device, first_line=first_line)
    except UnicodeDecodeError as error:
        raise SpecError(where, got=str(error), expected="names of columns in UTF-8") from error


def _files_of(folder: Path) -> str | None:
    """What to say instead of a folder; ``None`` of what is none."""
    if not folder.is_dir():
        return None
    endings = (".csv", ".csv.gz", ".csv.xz", ".parquet")
    names = sorted(p.name for p in folder.iterdir() if p.name.lower().endswith(endings))
    if not names:
        return "a table of operators is one file; measured programs are what folders hold"
    more = f", or another of its {len(names)} tables" if len(names) > 1 else ""
    return f"say {folder / names[0]}{more}"


def _text(where: str, magic: bytes) -> bytes:
    """A text, unpacked where its first bytes are gzip's or xz's; one too long to hold is refused.

    Args:
        where: the file.
        magic: its first six bytes.
    """
    opened: Any = gzip.open if magic[:2] == b"\x1f\x8b" else open
    opened = lzma.open if magic == b"\xfd7zXZ\x00" else opened
    with opened(where, "rb") as stream:
        text: bytes = stream.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise SpecError(where, got=f"more than {_MOST_BYTES} bytes of text", expected="fewer")
    return text


def _refuse_separator(where: str, line: str) -> None:
    """Refuse a table whose only column is its whole first line."""
    for name, separator in (("semicolons", ";"), ("tabs", "\t")):
        if separator in line:
            raise SpecError(where, got=f"columns apart by {name}", expected="by commas")


def _has_header(text: bytes) -> bool:
    """Whether the first line holds anything but numbers."""
    first = text.partition(b"\n")[0].decode(errors="replace")
    try:
        [float(cell) for cell in first.split(",")]
    except ValueError:
        return True
    return False
