"""What LLM-PQ would decide: its quality-only plan, its transfer heuristic and its programme.

All three get this project's kernels, prices, memory and search over prefill micro-batches, and are
timed by the same simulator. As published they fix the decode micro-batch to ``ceil(batch /
devices)``; here the nearest divisor of the batch below it. They are held to the plan's quality
limit, where LLM-PQ itself weighs quality by ``theta``.

Source: the method's description and behaviour (Zhao et al., LLM-PQ, 2024), not its code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from foreplan.planner.serving.chain import ServingChains
from foreplan.planner.serving.pricing import MicroBatches
from foreplan.planner.serving.spec import ServingDecision
from foreplan.solvers.chain_partition import ChainAssignment, evaluate, make_stage, solve
from foreplan.solvers.chain_problem import ChainProblem

#: Gap at which a programme counts as solved; LLM-PQ's own searches stop at a time limit.
GAP = 1e-4
#: (bits that a fast stage gives up in one layer, bits of what it has instead, most such layers).
TRANSFERS = ((16, 8, 2), (8, 8, 1), (16, 4, 4), (8, 4, 2), (4, 4, 1))

Rule = Callable[[ServingChains, ChainProblem], ChainAssignment | None]


def llm_pq_baselines(
    chains: ServingChains, total_s: Callable[[ServingDecision], float]
) -> dict[str, ServingDecision | str]:
    """Decisions of LLM-PQ's three methods by name, or why one has none.

    Args:
        chains: the chain problems of the plan.
        total_s: simulated time of a decision.
    """
    made: dict[str, ServingDecision | str] = {}
    rules: tuple[tuple[str, Rule], ...] = (
        ("quality alone (adabits)", _adabits),
        ("LLM-PQ transfer heuristic", _transfers),
        ("LLM-PQ programme, its own law", _programme),
    )
    for name, rule in rules:
        found: list[ServingDecision] = []
        for sizes in _sizes(chains):
            problem = chains.problem(sizes)
            answer = rule(chains, problem)
            if answer is not None and math.isfinite(evaluate(problem, answer).latency_s):
                met = not evaluate(problem, answer).violations
                found.append(chains.decision(sizes, answer, limits_met=met))
        # One that meets every limit is preferred to a faster one that does not.
        kept = [d for d in found if d.limits_met] or found
        made[name] = min(kept, key=total_s) if kept else "fits at no number of bits"
    return made


def _sizes(chains: ServingChains) -> list[MicroBatches]:
    """Every prefill size with the one decode size that LLM-PQ takes."""
    batch = chains.pricing.workload.batch
    devices = sum(len(ranks) for ranks in chains.types)
    most = max(1, -(-batch // devices))
    decode = max(s.decode for s in chains.sizes() if s.decode <= most)
    return [s for s in chains.sizes() if s.decode == decode]


def _adabits(chains: ServingChains, problem: ChainProblem) -> ChainAssignment | None:
    """The most bits that fit, whatever they cost in time; equal answers by chance of the search."""
    missing = max(chains.bits) - np.array(chains.bits, dtype=float)
    still = {
        name: np.where(np.isfinite(getattr(problem, name)), 0.0, math.inf)
        for name in (
            "prefill_s", "decode_s", "first_prefill_s", "first_decode_s", "last_prefill_s",
            "last_decode_s", "link_prefill_s", "link_decode_s", "link_return_decode_s",
        )
    }  # fmt: skip
    quality = dataclasses.replace(
        problem, **still, prefill_microbatches=1, decode_microbatches=1, new_tokens=1, theta=1.0,
        omega=np.tile(missing, (problem.n_layers, 1)), max_omega=None, max_cost2=None,
    )  # fmt: skip
    found = solve(quality, gap=GAP).value
    if found is None:
        return None
    # The time of its stages is the real problem's.
    return ChainAssignment(
        tuple(make_stage(problem, s.device_type, s.start, s.end, s.variants) for s in found.stages)
    )


def _programme(chains: ServingChains, problem: ChainProblem) -> ChainAssignment | None:
    """Optimum of LLM-PQ's law: ``(m - 1)(n - 1)`` decode rounds instead of ``m (n - 1)``.

    Written as the project's law with as many tokens as give these rounds; what is left out is one
    token's sum of decode stages, the same for every split of equal layers at equal bits.
    """
    m = problem.decode_microbatches
    tokens = 1 + round((m - 1) * (problem.new_tokens - 1) / m)
    return solve(dataclasses.replace(problem, new_tokens=tokens), gap=GAP).value


def _transfers(chains: ServingChains, problem: ChainProblem) -> ChainAssignment | None:
    """From the quality-only plan, let fast stages take layers over as long as that helps.

    A fast stage gives up precision in one layer to make room for layers of the slowest one, which
    move over the boundaries between them; judged by the exact law, under the quality limit.
    """
    best = _adabits(chains, problem)
    if best is None:
        return None
    value = evaluate(problem, best).objective
    improved = True
    while improved:
        improved = False
        for candidate in _moves(chains, problem, best):
            score = evaluate(problem, candidate)
            if score.feasible and score.objective < value * (1 - 1e-9):
                best, value, improved = candidate, score.objective, True
                break
    return best


def _moves(
    chains: ServingChains, problem: ChainProblem, base: ChainAssignment
) -> Iterator[ChainAssignment]:
    """Every transfer from the slowest stage of either phase to another stage."""
    stages = base.stages
    slow = {
        max(range(len(stages)), key=lambda j: stages[j].decode_s),
        max(range(len(stages)), key=lambda j: stages[j].prefill_s),
    }
    index = {bits: v for v, bits in enumerate(chains.bits)}
    for source in sorted(slow):
        for target in range(len(stages)):
            for given, taken, most in TRANSFERS:
                if target == source or not {given, taken} <= index.keys():
                    continue
                # Caches move too, so that fewer layers may fit where the most do not.
                for count in range(most - (given != taken), 0, -1):
                    moved = _transfer(
                        problem, base, source, target, index[given], index[taken], count
                    )
                    if moved is not None:
                        yield moved


def _transfer(
    problem: ChainProblem, base: ChainAssignment, source: int, target: int, given: int,
    taken: int, count: int,
) -> ChainAssignment | None:  # fmt: skip
    """Shift every boundary between two stages by ``count`` layers; ``None`` if there are too few.

    The layers that change hands keep their place in the chain; those that the target gains, and
    one more of its own where it gives up bits, get the variant ``taken``.
    """
    variants = list(base.variants)
    ends = [stage.end for stage in base.stages]
    start, end = base.stages[target].start, base.stages[target].end
    if given != taken:
        own = next((i for i in range(start, end) if variants[i] == given), None)
        if own is None:
            return None
        variants[own] = taken
    if base.stages[source].end - base.stages[source].start <= count:
        return None
    if source < target:
        ends[source:target] = [cut - count for cut in ends[source:target]]
        gained = range(start - count, start)
    else:
        ends[target:source] = [cut + count for cut in ends[target:source]]
        gained = range(end, end + count)
    for i in gained:
        variants[i] = taken
    starts = [0, *ends[:-1]]
    if any(a >= b for a, b in zip(starts, ends, strict=True)):
        return None
    return ChainAssignment(
        tuple(
            make_stage(problem, stage.device_type, a, b, variants[a:b])
            for stage, a, b in zip(base.stages, starts, ends, strict=True)
        )
    )
