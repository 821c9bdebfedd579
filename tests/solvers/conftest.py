from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from foreplan.solvers.chain_partition import ChainProblem
from foreplan.solvers.gap_fill_problem import GapFillProblem, UnitChain


def random_problem(
    seed: int,
    *,
    n_layers: int | None = None,
    n_types: int | None = None,
    n_variants: int | None = None,
    identical: bool | None = None,
    budgets: bool | None = None,
    workspace: bool | None = None,
) -> ChainProblem:
    """A small instance that switches every feature of the problem on and off at random."""
    rng = np.random.default_rng(seed)
    drawn = (int(rng.integers(1, 4)), int(rng.integers(1, 6)), int(rng.integers(1, 4)))
    n_types, n_layers, n_variants = (
        n_types or drawn[0],
        n_layers or drawn[1],
        n_variants or drawn[2],
    )
    shape = (n_types, n_layers, n_variants)
    alike = rng.random() < 0.5
    rows = (n_types, 1, n_variants) if (alike if identical is None else identical) else shape

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
    cost2 = np.tile(-bits, (n_layers, 1))
    if rng.random() < 0.4:
        cost2 = rng.uniform(-1, 1, omega.shape)
    links = (n_types, n_types)
    linked, edges = rng.random() < 0.6, rng.random() < 0.5
    limited = rng.random(2) < 0.4 if budgets is None else np.array([budgets, budgets])
    k = (n_types,)
    link_decode = draw(0, 1.5, links) * linked
    if rng.random() < 0.1:
        link_decode[rng.integers(n_types), rng.integers(n_types)] = math.inf
    link_return = draw(0, 1.5, links, 0.7) * linked
    if rng.random() < 0.3:
        link_return[:] = link_return[:, :1]
    return ChainProblem(
        **_random_workspace(seed, shape, workspace),
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
        link_prefill_s=draw(0, 1.5, links) * linked,
        link_decode_s=link_decode,
        link_return_decode_s=link_return,
        prefill_microbatches=int(rng.integers(1, 6)),
        decode_microbatches=int(rng.integers(1, 5)),
        new_tokens=int(rng.integers(1, 6)),
        theta=float(draw(0, 5, (1,), 0.6)[0]),
        max_omega=float(rng.uniform(0.1, 0.7) * n_layers) if limited[0] else None,
        cost2=cost2,
        max_cost2=float(np.quantile(cost2.sum(axis=0), rng.random())) if limited[1] else None,
    )


def _random_workspace(
    seed: int, shape: tuple[int, int, int], wanted: bool | None
) -> dict[str, np.ndarray]:
    """What stages need once; drawn apart, so that the rest of an instance does not depend on it."""
    rng = np.random.default_rng([seed, 1])
    n_types, n_layers, n_variants = shape
    if not (rng.random() < 0.6 if wanted is None else wanted):
        return {}
    n_needs = int(rng.integers(1, 4))
    once = rng.uniform(0, 8, (n_types, n_needs, 1, 1))
    # By place and length, in any order; in half of the instances needs are nested.
    if rng.random() < 0.5:
        once = once + rng.uniform(0, 5, (n_types, n_needs, 4, n_layers))
    else:
        once = once + rng.uniform(0, 5, (n_types, 1, 4, n_layers))
    by_variant = rng.integers(0, n_needs, (1, n_variants))
    by_layer = rng.integers(0, n_needs, (n_layers, n_variants))
    needs = by_layer if rng.random() < 0.3 else np.tile(by_variant, (n_layers, 1))
    return {"workspace_bytes": once, "needs": needs}


@pytest.fixture
def make_problem() -> Callable[..., ChainProblem]:
    """The generator of random instances."""
    return random_problem


@pytest.fixture(scope="session")
def choice_instances() -> ModuleType:
    """Generators and oracle of the multiple-choice problem; benchmarks read the same file."""
    path = Path(__file__).with_name("choice_instances.py")
    spec = importlib.util.spec_from_file_location("choice_instances", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_gaps(
    seed: int,
    *,
    n_pipelines: int | None = None,
    n_stages: int | None = None,
    n_slots: int | None = None,
    links: bool | None = None,
    slowed: bool = False,
    capped: bool = False,
    per_pipeline: bool | None = None,
) -> GapFillProblem:
    """A small gap-filling instance of integer times, so that optima are integers."""
    rng = np.random.default_rng(seed)
    m = n_pipelines or int(rng.integers(1, 4))
    s = n_stages or int(rng.integers(1, 3))
    n = n_slots or int(rng.integers(1, 5))
    with_links = bool(rng.random() < 0.4) if links is None else links
    length = int(rng.integers(8, 30))

    def busy() -> np.ndarray:
        cuts = rng.choice(length + 1, 2 * int(rng.integers(0, min(5, length // 2))), replace=False)
        return np.sort(cuts).reshape(-1, 2).astype(float)

    def chain(sign: int) -> UnitChain:
        if rng.random() < 0.05:
            return UnitChain.empty()
        counts = rng.integers(0 if s > 1 else 1, 3, s)
        stage = np.repeat(np.arange(s), counts)[::sign]
        differ = bool(rng.random() < 0.3) if per_pipeline is None else per_pipeline
        return UnitChain(
            stage=stage,
            resource=rng.integers(0, 1 + with_links, len(stage)),
            duration_s=rng.integers(1, 5, (m, len(stage)) if differ else len(stage)),
        )

    lags = rng.random() < 0.5
    points = np.sort(rng.integers(0, length + 1, (n, 2)), axis=1)
    return GapFillProblem(
        backbone_s=float(length),
        busy_s=tuple((busy(), busy()) for _ in range(m * s + int(rng.integers(0, 2)))),
        stage_device=rng.permutation(m * s).reshape(m, s),
        forward=chain(1),
        backward=chain(-1),
        deadline_s=np.sort(points[:, 0]),
        release_s=np.sort(points[:, 1]),
        forward_lag_s=rng.integers(0, 3, (m, s)) * lags,
        backward_lag_s=rng.integers(0, 3, (m, s)) * lags,
        compute_slowdown=float(rng.uniform(1, 2)) if slowed else 1.0,
        link_slowdown=float(rng.uniform(1, 2)) if slowed else 1.0,
        max_live_jobs=int(rng.integers(1, 3)) if capped else None,
    )


@pytest.fixture
def make_gaps() -> Callable[..., GapFillProblem]:
    """The generator of random gap-filling instances."""
    return random_gaps
