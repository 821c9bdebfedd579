"""A chain problem in the form that the search works on: flat arrays and which parts of the law act.

Everything that is the same for every box of the search is worked out here once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foreplan.solvers._chain_devices import CountedDevices, counted_devices, vectors
from foreplan.solvers._stage_modes import StageModes, modes_of
from foreplan.solvers.chain_problem import ChainProblem, FloatArray, IntArray

ALL_COUNTED = 4_000_000
"""Nodes up to which tables of completions count all devices from the start."""
MOST_COUNTED = 40_000_000
"""Nodes up to which they count those of which chains use too many (8 bytes each, a few copies)."""


@dataclass(frozen=True, slots=True)
class ChainModel:
    """Derived constants of one problem; see :func:`model_of`.

    Attributes:
        problem: the instance.
        counts: ``[K]`` devices a type, at most L of each.
        devices: what tables of completions count at first; `cheapest_path` counts on its own.
        nodes: of such a table, for each vector of used devices.
        prefill_rounds: ``Mp - 1``, weight of max P.
        decode_rounds: ``n - 1``, weight of the decode round.
        caps_prefill: whether max P acts.
        caps_decode: whether max D acts.
        sums_decode: whether sum D can exceed ``m * max D``.
        by_first: whether return hops depend on the first type, not only on the last.
        link_decode_s: ``[K, K]`` decode hop, zero where finite if there is no decode.
        back_decode_s: ``[K, K]`` return hop (last type, first type), likewise.
        codes: ``[L, V]`` uint64, equal rows for layers with equal costs.
        least: ``[2, L+1]`` least omega and cost2 of the layers from a boundary on.
        ceiling_s: above every feasible objective.
        modes: what stages may be by what they leave room for.
        omega_apart: whether omega counts on its own, not only by its price.
    """

    problem: ChainProblem
    counts: IntArray
    devices: CountedDevices
    nodes: int
    prefill_rounds: int
    decode_rounds: int
    caps_prefill: bool
    caps_decode: bool
    sums_decode: bool
    by_first: bool
    link_decode_s: FloatArray
    back_decode_s: FloatArray
    codes: np.ndarray[tuple[int, int], np.dtype[np.uint64]]
    least: FloatArray
    ceiling_s: float
    modes: StageModes
    omega_apart: bool


def model_of(problem: ChainProblem) -> ChainModel:
    """Work out which parts of the law act, and the constants of the search.

    Sum D can only exceed ``m * max D`` if more than m stages and hops lie on the round trip, so
    with enough micro-batches the decode round is the bottleneck alone.
    """
    decode_rounds = problem.new_tokens - 1
    link, back = problem.link_decode_s, problem.link_return_decode_s
    if decode_rounds == 0:
        link, back = (np.where(np.isfinite(x), 0.0, x) for x in (link, back))
    by_first = bool(np.any(back != back[:, :1]))
    counts = np.minimum(problem.counts, problem.n_layers)
    nodes = problem.n_types * (problem.n_layers + 1) * (problem.n_types if by_first else 1)
    most = min(int(counts.sum()), problem.n_layers)
    on_the_way = most
    if most > 1:
        on_the_way += (most - 1) * bool(np.any(link > 0)) + bool(np.any(back > 0))
    m = problem.decode_microbatches
    least = np.zeros((2, problem.n_layers + 1))
    for row, cost in zip(least, (problem.omega, problem.cost2), strict=True):
        row[:-1] = np.cumsum(cost.min(axis=1)[::-1])[::-1]
    return ChainModel(
        problem=problem,
        counts=counts,
        devices=counted_devices(counts, every=vectors(counts) * nodes <= ALL_COUNTED),
        nodes=nodes,
        prefill_rounds=problem.prefill_microbatches - 1,
        decode_rounds=decode_rounds,
        caps_prefill=problem.prefill_microbatches > 1,
        caps_decode=decode_rounds > 0 and m > 1,
        sums_decode=decode_rounds > 0 and (m == 1 or m < on_the_way),
        by_first=by_first,
        link_decode_s=link,
        back_decode_s=back,
        codes=_codes(problem),
        least=least,
        ceiling_s=_ceiling(problem, on_the_way),
        modes=modes_of(problem),
        omega_apart=problem.max_omega is not None,
    )


def _codes(problem: ChainProblem) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Random words by (layer class, variant); sums of them identify counts."""
    rows = np.concatenate(
        [
            np.moveaxis(x, 1, 0).reshape(problem.n_layers, -1)
            for x in (
                problem.prefill_s,
                problem.decode_s,
                problem.memory_bytes,
                problem.cost2[None],
            )
        ],
        axis=1,
    )
    _, classes = np.unique(rows, axis=0, return_inverse=True)
    words = np.random.default_rng(20240607).integers(
        0, 2**64, (int(classes.max()) + 1, problem.n_variants), dtype=np.uint64
    )
    codes: np.ndarray[tuple[int, int], np.dtype[np.uint64]] = words[classes.reshape(-1)]
    return codes


def _ceiling(problem: ChainProblem, on_the_way: int) -> float:
    """Objective that no feasible assignment exceeds, seconds."""

    def largest(x: FloatArray) -> float:
        finite = x[np.isfinite(x)]
        return float(finite.max()) if finite.size else 0.0

    def total(layers: FloatArray, first: FloatArray, last: FloatArray, link: FloatArray) -> float:
        chain = sum(largest(layers[:, i]) for i in range(problem.n_layers))
        return chain + largest(first) + largest(last) + on_the_way * largest(link)

    prefill = total(
        problem.prefill_s, problem.first_prefill_s, problem.last_prefill_s, problem.link_prefill_s
    )
    hops = np.concatenate([problem.link_decode_s, problem.link_return_decode_s])
    decode = total(problem.decode_s, problem.first_decode_s, problem.last_decode_s, hops)
    ceiling = prefill * problem.prefill_microbatches
    ceiling += (problem.new_tokens - 1) * problem.decode_microbatches * decode
    ceiling += problem.theta * float(problem.omega.max(axis=1).sum())
    return ceiling * (1 + 1e-6) + 1e-30


class Tally(NamedTuple):
    """A chain summed up: seconds, omega, cost2."""

    objective: float
    prefill_max_s: float
    decode_sum_s: float
    decode_max_s: float
    omega: float
    cost2: float


def tally(model: ChainModel, types: list[int], rows: list[list[float]]) -> Tally:
    """Apply the law to stage rows; the quick twin of ``evaluate`` for use inside the search.

    Args:
        model: the problem.
        types: type of each stage.
        rows: (prefill_s, decode_s, memory_bytes, omega, cost2) of each stage, edges included.
    """
    problem = model.problem
    prefill = [row[0] for row in rows]
    decode = [row[1] for row in rows]
    for k, following in itertools.pairwise(types):
        prefill.append(float(problem.link_prefill_s[k, following]))
        decode.append(float(model.link_decode_s[k, following]))
    if len(types) > 1:
        decode.append(float(model.back_decode_s[types[-1], types[0]]))
    prefill_max, decode_sum, decode_max = max(prefill), sum(decode), max(decode)
    omega = sum(row[3] for row in rows)
    objective = sum(prefill) + problem.theta * omega
    if model.prefill_rounds:
        objective += model.prefill_rounds * prefill_max
    if model.decode_rounds:
        round_s = max(decode_sum, problem.decode_microbatches * decode_max)
        objective += model.decode_rounds * round_s
    cost2 = sum(row[4] for row in rows)
    return Tally(objective, prefill_max, decode_sum, decode_max, omega, cost2)
