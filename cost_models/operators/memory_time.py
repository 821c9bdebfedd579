"""`memory_time`: seconds to move an operator's bytes, from memory or from L2.

Shape legend: ``N`` rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork
from foreplan.datasets.sweeps.operator_table import OperatorTable, includes_launch

Floats = NDArray[np.float64]


def memory_time(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> Floats:
    """Seconds to move a row's bytes (N,), those that stay in L2 from call to call at its rate.

    The step from L2 to memory (half of the bytes at 0.75 of L2) is fitted by eye on the elementwise
    rows of an A100, and so is the share of the memory's bandwidth that is reached, 0.85. An L2
    gives 32 bytes a clock to each multiprocessor (theory), of which 0.7 is reached (assumed).
    """
    from_memory = share_from_memory(table, work, offer)
    cached = np.nan_to_num(work.bytes / (0.7 * 32 * work.units * offer["clock"]))
    moved = work.bytes / (0.85 * work.bandwidth)
    return np.asarray(moved * from_memory + np.minimum(cached, moved) * (1 - from_memory))


def share_from_memory(
    table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]
) -> Floats:
    """Share of a row's bytes (N,) that no cache keeps from call to call."""
    # NeuSight's loop repeats a call on the same buffers; aiconfigurator's GEMM loop goes round
    # several copies (fitted on L40S, whose step comes at a fifth of its L2).
    graphs = np.array([not includes_launch(name) for name in table.library])
    copies = np.where(graphs & (table.kind == "linear"), 5.0, 1.0)
    filled = np.nan_to_num(copies * work.bytes / offer["l2"], nan=np.inf)
    return np.asarray(1 / (1 + (0.75 / np.maximum(filled, 1e-9)) ** 6))
