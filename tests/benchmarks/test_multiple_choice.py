"""Time of the multiple-choice solvers on synthetic transformers; nothing here asserts a time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreplan.solvers.choice_frontier import solve_frontier
from foreplan.solvers.choice_heap import solve_heap
from foreplan.solvers.choice_milp import solve_milp
from foreplan.solvers.solution import SolutionStatus

_PATH = Path(__file__).parents[1] / "solvers" / "choice_instances.py"
_SPEC = importlib.util.spec_from_file_location("choice_instances", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
instances = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(instances)

CASES = {
    "BERT-base, 13 buckets": {},
    "BERT-base, 13 buckets, pre-norm": {"pre_norm": True},
    "BERT-base, 13 buckets, 16 bits do not fit": {"memory": 0.5, "seed": 3},
    "24 blocks, 25 buckets": {"blocks": 24, "buckets": 25},
    "96 blocks, 97 buckets, shared": {"blocks": 96, "buckets": 97, "shared": True},
    "96 blocks, 97 buckets, shared, pre-norm": {
        "blocks": 96,
        "buckets": 97,
        "shared": True,
        "pre_norm": True,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_programme(benchmark: Callable[..., Any], name: str) -> None:
    problem = instances.TransformerInstance(**CASES[name]).problem
    assert benchmark(solve_milp, problem).status == SolutionStatus.OPTIMAL


@pytest.mark.parametrize("name", CASES)
def test_heap(benchmark: Callable[..., Any], name: str) -> None:
    problem = instances.TransformerInstance(**CASES[name]).problem
    benchmark(solve_heap, problem)


@pytest.mark.parametrize("blocks", [2, 6])
def test_frontier(benchmark: Callable[..., Any], blocks: int) -> None:
    problem = instances.TransformerInstance(blocks, 1, pre_norm=True).problem
    start = solve_heap(problem).value
    assert benchmark(solve_frontier, problem, start=start).status == SolutionStatus.OPTIMAL
