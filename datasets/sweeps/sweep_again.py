"""`SweptProducts`: products of a sweep's table that are timed again, and put in their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreplan.datasets.sweeps.operator_case import Case
from foreplan.datasets.sweeps.product_cases import product_again
from foreplan.errors import SpecError

#: What a product's row has to say.
_COLUMNS = ("op", "dtype", "b", "m", "n", "k", "turned", "latency_s")


@dataclass(frozen=True)
class SweptProducts:
    """Products of a table of a sweep inside CUDA graphs.

    Attributes:
        table: a ``pyarrow.Table``.
        places: rows of products, those first that did most FLOP/s.
    """

    table: Any
    places: tuple[int, ...]

    @classmethod
    def read(cls, path: Path, least: float = 0.0) -> SweptProducts:
        """Read a table.

        Args:
            path: Parquet.
            least: FLOP/s that a product did at least; others are left out.

        Raises:
            SpecError: it is no table of such a sweep.
        """
        import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

        try:
            table = pq.read_table(path)
            columns = {name: table.column(name).to_numpy() for name in _COLUMNS}
        except (OSError, ValueError, KeyError) as error:
            raise SpecError(
                str(path), got=str(error).splitlines()[0][:200],
                expected="a table of a sweep inside CUDA graphs",
            ) from error  # fmt: skip
        rate = 2 * np.prod([columns[name] for name in "bmnk"], axis=0) / columns["latency_s"]
        products = np.isin(columns["op"].astype(str), ["linear", "bmm"])
        chosen = np.flatnonzero(products & (rate >= least))
        order = chosen[np.argsort(-rate[chosen], kind="stable")]
        return cls(table, tuple(int(at) for at in order))

    def cases(self) -> Iterator[Case]:
        """The products, in the order of `places`."""
        return (product_again(self.table.slice(at, 1).to_pylist()[0]) for at in self.places)

    def write(self, times: Mapping[int, float], path: Path) -> int:
        """Write the table with new times in the places of its own; returns how many.

        Args:
            times: seconds by index of `places`; an index behind their end is left out.
            path: the table to write.
        """
        import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
        import pyarrow.parquet as pq

        found = {at: times[index] for index, at in enumerate(self.places) if index in times}
        latency_s = self.table.column("latency_s").to_numpy().copy()
        latency_s[list(found)] = list(found.values())
        column = self.table.schema.get_field_index("latency_s")
        part = path.with_suffix(".part")
        pq.write_table(
            self.table.set_column(column, "latency_s", pa.array(latency_s)), part,
            compression="zstd",
        )  # fmt: skip
        part.replace(path)
        return len(found)
