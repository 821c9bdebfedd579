"""Format ``foreplan``: what `operator_table.write_operators` wrote."""

from __future__ import annotations

import numpy as np

from foreplan.datasets.importers._columns import Columns
from foreplan.datasets.operator_table import DIMS, KINDS, UNKNOWN, OperatorTable, operator_table
from foreplan.errors import SpecError


def convert(columns: Columns) -> OperatorTable:
    """Read the table back.

    Raises:
        SpecError: a missing column, an unknown kind, a latency that is not positive.
    """
    kind = columns.texts("kind")
    for name in sorted(set(kind)):
        if name not in KINDS and name != UNKNOWN:
            raise SpecError(
                f"{columns.where}: column kind", got=name, expected="one of " + ", ".join(KINDS)
            )
    return operator_table(
        op=columns.texts("op"),
        kind=kind,
        dtype=columns.texts("dtype"),
        library=columns.texts("library"),
        device=columns.texts("device"),
        dims={name: columns.numbers(name, default=0.0) for name in DIMS},
        latency_s=columns.milliseconds("latency_s") * 1e3,
        source_row=columns.numbers("source_row", default=0.0).astype(np.int64),
        kernel=columns.texts("kernel", default=""),
    )
