from __future__ import annotations

import math

import numpy as np
import pytest

from foreplan.solvers.chain_partition import ChainProblem, evaluate, solve
from foreplan.solvers.enumerate import brute_force
from foreplan.solvers.solution import SolutionStatus


def random_problem(
    seed: int, *, identical: bool | None = None, max_layers: int = 5
) -> ChainProblem:
    """A small instance that switches every feature of the problem on and off at random."""
    rng = np.random.default_rng(seed)
    n_types = int(rng.integers(1, 4))
    n_layers = int(rng.integers(1, max_layers + 1))
    n_variants = int(rng.integers(1, 4))
    shape = (n_types, n_layers, n_variants)
    if identical is None:
        identical = bool(rng.random() < 0.5)
    rows = (n_types, 1, n_variants) if identical else shape

    def draw(low: float, high: float, size: tuple[int, ...], chance: float = 1.0) -> np.ndarray:
        return rng.uniform(low, high, size) * (rng.random() < chance)

    prefill = np.broadcast_to(draw(0.5, 2.0, rows), shape).copy()
    decode = np.broadcast_to(draw(0.1, 1.0, rows), shape).copy()
    if rng.random() < 0.3:
        prefill[rng.random(shape) < 0.15] = math.inf
    if rng.random() < 0.2:
        decode[rng.integers(n_types), :, rng.integers(n_variants)] = math.inf
    memory = np.broadcast_to(rng.integers(1, 8, rows).astype(float), shape)
    omega = rng.uniform(0.0, 1.0, (n_layers, n_variants))
    bits = rng.choice([3.0, 4.0, 8.0, 16.0], n_variants)
    cost2 = np.tile(-bits, (n_layers, 1)) if rng.random() < 0.6 else rng.uniform(-1, 1, omega.shape)
    links = rng.random() < 0.6
    edges = rng.random() < 0.5
    k = (n_types,)
    return ChainProblem(
        counts=rng.integers(1 if rng.random() < 0.8 else 0, 3, n_types),
        prefill_s=prefill,
        decode_s=decode,
        memory_bytes=memory,
        capacity_bytes=rng.uniform(4, 7 * n_layers, n_types),
        omega=omega,
        first_prefill_s=draw(0, 1, k) * edges,
        first_decode_s=draw(0, 1, k) * edges,
        first_memory_bytes=draw(0, 3, k) * edges,
        last_prefill_s=draw(0, 1, k) * edges,
        last_decode_s=draw(0, 1, k) * edges,
        last_memory_bytes=draw(0, 3, k) * edges,
        fixed_memory_bytes=draw(0, 2, k, 0.4),
        link_prefill_s=draw(0, 1.5, (n_types, n_types)) * links,
        link_decode_s=draw(0, 1.5, (n_types, n_types)) * links,
        link_return_decode_s=draw(0, 1.5, (n_types, n_types), 0.7) * links,
        prefill_microbatches=int(rng.integers(1, 6)),
        decode_microbatches=int(rng.integers(1, 5)),
        new_tokens=int(rng.integers(1, 6)),
        theta=float(draw(0, 5, (1,), 0.6)[0]),
        max_omega=float(rng.uniform(0.1, 0.7) * n_layers) if rng.random() < 0.4 else None,
        cost2=cost2,
        max_cost2=float(np.quantile(cost2.sum(axis=0), rng.random()))
        if rng.random() < 0.4
        else None,
    )


@pytest.mark.parametrize("seed", range(250))
def test_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    expected = brute_force(problem)
    got = solve(problem, gap=0.0)
    assert got.status == expected.status
    assert got.lower_bound <= got.objective
    if expected.value is not None:
        assert got.value is not None
        assert got.objective == pytest.approx(expected.objective, rel=1e-9)
        assert got.lower_bound == pytest.approx(expected.objective, rel=1e-9)
        score = evaluate(problem, got.value)
        assert score.feasible
        assert score.objective == got.objective


def test_cutoff_reports_that_nothing_is_better() -> None:
    problem = random_problem(next(s for s in range(99) if brute_force(random_problem(s)).found))
    best = solve(problem)
    assert best.status == SolutionStatus.OPTIMAL
    again = solve(problem, cutoff=best.objective)
    assert again.status == SolutionStatus.CUTOFF
    assert again.value is None
    assert again.lower_bound <= best.objective
    assert solve(problem, cutoff=best.objective * 1.1).status == SolutionStatus.OPTIMAL
