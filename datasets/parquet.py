"""A Parquet file of a stranger, read within bounds: `open_parquet`, then `plain` for its texts.

Parquet packs: a run stands for any number of equal values, and a dictionary of one long text for a
column of them. So what the footer says of cells and bytes is added up before anything is read, and
texts are read as dictionaries, whose length when written out is known before they are. What is left
is a footer that lies about a page, which Arrow unpacks whole, up to 2 GiB, and one long list.
"""

from __future__ import annotations

import os
from typing import Any

from foreplan.errors import SpecError

#: Values of a file, bytes of it when unpacked, and bytes of the texts of one batch.
MOST_CELLS, MOST_BYTES, MOST_TEXT = 20_000_000, 1 << 30, 256 << 20


def open_parquet(path: str | os.PathLike[str], *, nested: bool = False) -> Any:
    """A ``pyarrow.parquet.ParquetFile`` that reads texts as dictionaries.

    Args:
        path: the file; the caller closes what is returned.
        nested: whether columns of lists are expected.

    Raises:
        SpecError: more cells or bytes than are read, or a column of lists where none belongs.
        OSError, pyarrow.ArrowException: no such file, no Parquet.
    """
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    where = os.fspath(path)
    facts = pq.read_metadata(where)
    # Row groups alone: Arrow ends the process over damaged facts of a single column.
    groups = [facts.row_group(index) for index in range(facts.num_row_groups)]
    cells = max(facts.num_rows, sum(group.num_rows for group in groups)) * facts.num_columns
    size = sum(group.total_byte_size for group in groups)
    if cells > MOST_CELLS:
        raise SpecError(where, got=f"{cells} cells", expected=f"at most {MOST_CELLS}")
    if size > MOST_BYTES:
        raise SpecError(where, got=f"{size} bytes unpacked", expected=f"at most {MOST_BYTES}")
    leaves = [facts.schema.column(index) for index in range(facts.num_columns)]
    if not nested and any("." in leaf.path and leaf.max_repetition_level for leaf in leaves):
        raise SpecError(where, got="a column of lists", expected="columns of numbers and texts")
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    return pq.ParquetFile(where, read_dictionary=texts)


def plain(batch: Any, where: str) -> Any:
    """A batch or table with its dictionaries written out.

    Raises:
        SpecError: that would take more than `MOST_TEXT`.
    """
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.compute as pc  # type: ignore[import-untyped,unused-ignore]

    size = 0
    arrays = []
    for column in batch.columns:
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        for chunk in chunks:
            leaf = chunk.flatten() if pa.types.is_list(chunk.type) else chunk
            if pa.types.is_dictionary(leaf.type):
                lengths = pc.take(pc.binary_length(leaf.dictionary), leaf.indices)
                size += pc.sum(lengths).as_py() or 0
        if size > MOST_TEXT:
            raise SpecError(
                where, got=f"{size} bytes of text", expected=f"at most {MOST_TEXT} in a batch"
            )
        kind = column.type
        if pa.types.is_dictionary(kind):
            column = column.cast(kind.value_type)
        elif pa.types.is_list(kind) and pa.types.is_dictionary(kind.value_type):
            column = column.cast(pa.list_(kind.value_type.value_type))
        arrays.append(column)
    return type(batch).from_arrays(arrays, names=batch.schema.names)
