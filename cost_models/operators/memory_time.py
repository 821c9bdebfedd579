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
    return _moved_s(work, offer, share_from_memory(table, work, offer))


def kept_time(work: OperatorWork, offer: Mapping[str, Floats], first: Floats) -> Floats:
    """As `memory_time` (N,), of work of which all stays in L2 as far as ``first`` bytes of it do.

    Args:
        work: of the rows (N,).
        offer: figures of the rows' devices by name, ``clock`` and ``l2`` among them (N,) each.
        first: bytes that every call reads again (N,).
    """
    return _moved_s(work, offer, _overflow(np.full(len(first), _HELD), first, offer["l2"]))


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
    of_weights, of_rest = (_overflow(held, filled, offer["l2"]) for filled in (around, work.bytes))
    share = np.nan_to_num(weights / work.bytes)
    return np.asarray(np.where(cold, 1.0, share * of_weights + (1 - share) * of_rest))


def _moved_s(work: OperatorWork, offer: Mapping[str, Floats], from_memory: Floats) -> Floats:
    """Seconds to move a row's bytes (N,), of which a share comes from memory."""
    cached = np.nan_to_num(work.bytes / (0.7 * 32 * work.units * offer["clock"]))
    moved = work.bytes / (0.85 * work.bandwidth)
    return np.asarray(moved * from_memory + np.minimum(cached, moved) * (1 - from_memory))


def _overflow(held: Floats, filled: Floats, l2: Floats) -> Floats:
    """Share of bytes (N,) that comes from memory, by how much of L2 holds how many of them."""
    full = np.maximum(np.nan_to_num(filled / l2, nan=np.inf), 1e-9)
    return np.asarray(1 / (1 + (held / full) ** 6))


def _copies(library: str) -> float:
    """Weights of a product that its loop goes round, as the code that measured it has it."""
    if library.startswith(RECORDED):
        return np.inf
    return 1.0 if includes_launch(library) else _COPIES.get(library, 1.0)
