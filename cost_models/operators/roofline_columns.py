"""Features of operators whose structure is the roofline alone: collectives and decoder layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]


def collective_columns(
    table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]
) -> tuple[dict[str, Floats], Floats]:
    """Columns by name and structural seconds (N,) of collectives.

    Args:
        table: the rows (N,).
        work: what each has to do.
        offer: figures of each row's device (N,).
    """
    d = table.dims
    columns = {
        "log_message": np.log(d["message_bytes"]),
        "ranks": d["ranks"],
        **{f"pattern_{i}": (d["pattern"] == i).astype(np.float64) for i in range(1, 5)},
        "log_message_per_rank": np.log(d["message_bytes"] / d["ranks"]),
    }
    return columns, work.roofline_s


def layer_columns(
    table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]
) -> tuple[dict[str, Floats], Floats]:
    """The same of whole decoder layers, as published tables time them."""
    d = table.dims
    columns = {
        "log_tokens": np.log(d["tokens"]), "is_decode": (d["context"] > 0).astype(np.float64),
        "log_hidden": np.log(d["hidden"]), "shards": d["shards"],
        "log_waves": np.log(np.ceil(d["tokens"] / 128) * d["hidden"] / 128 / work.units),
    }  # fmt: skip
    return columns, work.roofline_s
