"""Time of the chain solver on synthetic roofline costs; nothing here asserts a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreplan.datasets.specs import load_document
from foreplan.solvers.chain_family import solve_family
from foreplan.solvers.chain_partition import ChainProblem, solve

_FILE = load_document(Path(__file__).with_name("chain_instances.yaml"))
#: Peak FLOP/s, bytes/s and usable GiB by kind.
DEVICES: dict[str, list[float]] = _FILE["devices"]
BATCH, PROMPT, TOKENS = 32, 512, 100


@dataclass(frozen=True)
class Instance:
    """A decoder of equal layers on a mixed cluster."""

    devices: dict[str, int]
    layers: int
    width: int
    bits: tuple[int, ...] = (3, 4, 8, 16)
    theta: float = 0.0
    average_bits: float | None = None
    max_omega: float | None = None
    linked: bool = False
    noise: float = 0.0
    gap: float = 1e-4
    max_evaluations: int = 20_000
    status: str = "optimal"

    def problem(
        self, prefill_microbatches: int = 8, decode_microbatches: int | None = None
    ) -> ChainProblem:
        """Roofline costs with seeded noise; omega falls with bits and differs by layer.

        Decoding has as many micro-batches as devices unless told otherwise.
        """
        rng = np.random.default_rng(0)
        k, n, v = len(self.devices), self.layers, len(self.bits)
        peak, speed, room = (np.array(x) for x in zip(*map(DEVICES.get, self.devices), strict=True))
        m = decode_microbatches or sum(self.devices.values())
        tokens, batch = BATCH / prefill_microbatches * PROMPT, BATCH / m
        bits = np.array(self.bits, dtype=float)
        parameters = 12.0 * self.width**2
        weight = parameters * (bits + np.where(bits < 16, 0.25, 0.0)) / 8
        unpack = np.where(bits < 16, 4 * parameters, 0.0)
        cache = 4.0 * self.width * (PROMPT + TOKENS)
        per_type = peak[:, None], speed[:, None]
        prefill = 2 * parameters * tokens / (0.55 * per_type[0]) + (unpack + weight) / per_type[1]
        decode = np.maximum(
            weight * np.where(bits < 8, 1.15, 1.0) / (0.75 * per_type[1]),
            2 * parameters * batch / (0.3 * per_type[0]),
        )
        decode = decode + batch * cache / (0.7 * per_type[1]) + 2e-5
        jitter = 1 + self.noise * rng.standard_normal((k, n, v))
        loss = rng.lognormal(0, 0.7, n) * np.linspace(0.6, 1.6, n)
        head = 50_000 * self.width * 2.0
        link = np.where(np.eye(k), 50e9, 1.2e9)
        payload = 2.0 * self.width * self.linked
        return ChainProblem(
            counts=np.array(list(self.devices.values())),
            prefill_s=prefill[:, None] * jitter,
            decode_s=decode[:, None] * jitter,
            memory_bytes=np.broadcast_to(weight + BATCH * cache, (k, n, v)) * jitter,
            capacity_bytes=room * 2**30,
            omega=np.outer(loss, 1 / (2 ** (bits - 1) - 1) ** 2) * rng.uniform(0.8, 1.25, (n, v)),
            first_memory_bytes=np.full(k, head),
            last_memory_bytes=np.full(k, head),
            last_prefill_s=head * tokens / (0.5 * peak),
            last_decode_s=head / (0.8 * speed),
            link_prefill_s=self.linked * 2e-5 + payload * tokens / link,
            link_decode_s=self.linked * 2e-5 + payload * batch / link,
            link_return_decode_s=np.full((k, k), self.linked * 2e-5),
            prefill_microbatches=prefill_microbatches,
            decode_microbatches=m,
            new_tokens=TOKENS,
            theta=self.theta,
            cost2=np.tile(-bits, (n, 1)),
            max_omega=self.max_omega,
            max_cost2=None if self.average_bits is None else -self.average_bits * n,
        )


CASES = {name: Instance(**fields) for name, fields in _FILE["cases"].items()}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the solver's loops before anything is timed."""
    for name in ("24 layers, 1+1, average bits", "48 layers, 1+3"):
        solve(CASES[name].problem(), gap=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_solve(benchmark: Callable[..., Any], name: str) -> None:
    instance = CASES[name]
    limits = {"gap": instance.gap, "max_evaluations": instance.max_evaluations}
    solution = benchmark(solve, instance.problem(), **limits)
    assert solution.status == instance.status
    assert solution.gap < max(1.001 * instance.gap, 0.05 * (instance.status == "feasible"))


@pytest.mark.parametrize(
    "name", ["24 layers, 1+1, average bits", "48 layers, 1+3", "96 layers, 4+4", "96 layers, 4+4+8"]
)
def test_search_over_microbatches(benchmark: Callable[..., Any], name: str) -> None:
    instance = CASES[name]
    problems = [instance.problem(b) for b in (1, 2, 4, 8, 16, 32)]

    def search() -> float:
        best = float("inf")
        for problem in problems:
            best = min(best, solve(problem, gap=instance.gap, cutoff=best).objective)
        return best

    assert benchmark(search) < float("inf")


@pytest.mark.parametrize("name", ["96 layers, 4+4", "96 layers, 4+4, links", "96 layers, 4+4+8"])
def test_search_over_pairs(benchmark: Callable[..., Any], name: str) -> None:
    """Every pair of prefill and decode micro-batches: the planner's whole search."""
    instance = CASES[name]
    sizes = (1, 2, 4, 8, 16, 32)
    problems = [instance.problem(*pair) for pair in itertools.product(sizes, sizes)]
    found = benchmark(solve_family, problems, gap=instance.gap)
    best = min(solution.objective for solution in found)
    assert min(solution.lower_bound for solution in found) >= best * (1 - 1.001 * instance.gap)
