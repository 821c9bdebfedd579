"""Which benchmarks run as tests too: those that take a few seconds at most."""

from __future__ import annotations

import pytest

#: Five to sixteen seconds each on one core; smaller ones of their kind run in every test run.
LONG = (
    "test_chain_partition.py::test_solve[96 layers, 4+4, both budgets, more omega, unequal layers]",
    "test_chain_partition.py::test_solve[96 layers, 4+4, both budgets, omega between, "
    "unequal layers]",
    "test_chain_partition.py::test_search_over_pairs[96 layers, 4+4+8]",
    "test_chain_partition.py::test_search_over_microbatches[96 layers, 4+4+8]",
    "test_chain_partition.py::test_solve[96 layers, 8 kinds]",
    "test_confidence.py::test_confidence_of_a_plan[long]",
    "test_gap_fill.py::test_solve[N=16, at most 4 live jobs]",
    "test_groups.py::test_groupings_of_a_cluster[3-1]",
    "test_groups.py::test_groupings_of_a_cluster[10-1]",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long ones to ``--benchmark-enable``, and to whoever names one."""
    if not config.getoption("benchmark_disable") or config.getoption("benchmark_enable"):
        return
    if any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.nodeid.endswith(LONG)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
