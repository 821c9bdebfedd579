"""`memory_time`: seconds to move an operator's bytes, from memory or from L2.

Shape legend: ``N`` rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork, widths
from foreplan.datasets.sweeps.operator_cases import RECORDED
from foreplan.datasets.sweeps.operator_table import OperatorTable, includes_launch

Floats = NDArray[np.float64]

#: Weights that loops over products go round: NeuSight's, and SGLang's of aiconfigurator at the time
#: of its table, repeat a call on the same buffers, TensorRT-LLM's takes five in turn
#: (aiconfigurator, ``collector/*/collect_gemm.py``), and this project's own graphs as many as no
#: cache holds (`cold_operands`).
_COPIES = MappingProxyType({"trtllm": 5.0, "sglang": 1.0})
#: Share of L2 up to which the bytes of all else stay there, by half of them (``fitted`` by eye on
#: the elementwise rows of an A100).
_HELD = 0.75


def memory_time(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> Floats:
    """Seconds to move a row's bytes (N,), those that stay in L2 from call to call at its rate.

    The share of the memory's bandwidth that is reached, 0.85, is fitted by eye on the elementwise
    rows of an A100, as is the step from L2 to memory. An L2 gives 32 bytes a clock to each
    multiprocessor (theory), of which 0.7 is reached (assumed).
    """
    from_memory = share_from_memory(table, work, offer)
    cached = np.nan_to_num(work.bytes / (0.7 * 32 * work.units * offer["clock"]))
    moved = work.bytes / (0.85 * work.bandwidth)
    return np.asarray(moved * from_memory + np.minimum(cached, moved) * (1 - from_memory))


def share_from_memory(
    table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]
) -> Floats:
    """Share of a row's bytes (N,) that no cache keeps from call to call."""
    d, products = table.dims, table.kind == "linear"
    copies = np.where(products, [_copies(name) for name in table.library], 1.0)
    graphs = np.array([not includes_launch(name) for name in table.library])
    # Weights that go round are read in full before the first comes again, so that all of L2 counts.
    held = np.where(graphs & products, 1.0, _HELD)
    cold = np.isinf(copies)
    weights = np.where(products, d["n"] * d["k"] * widths(table)[1], 0.0)
    # All else is the same in every call: weights of other calls do not push it out.
    around = work.bytes + (np.where(cold, 1.0, copies) - 1) * weights
    of_weights, of_rest = (
        1 / (1 + (held / np.maximum(np.nan_to_num(filled / offer["l2"], nan=np.inf), 1e-9)) ** 6)
        for filled in (around, work.bytes)
    )
    share = np.nan_to_num(weights / work.bytes)
    return np.asarray(np.where(cold, 1.0, share * of_weights + (1 - share) * of_rest))


def _copies(library: str) -> float:
    """Weights of a product that its loop goes round, as the code that measured it has it."""
    if library.startswith(RECORDED):
        return np.inf
    return 1.0 if includes_launch(library) else _COPIES.get(library, 1.0)
