"""Decisions close to a plan: would any of them be better, in a real run or at other prices?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from foreplan.planner.serving.chain import ServingChains
from foreplan.planner.serving.pricing import MicroBatches
from foreplan.planner.serving.spec import ServingDecision
from foreplan.solvers.chain_problem import ChainProblem
from foreplan.solvers.chain_score import ChainAssignment, evaluate, make_stage

#: Predicted times within this share of the plan's count as close.
WITHIN = 0.10
#: Random changes tried for each decision wanted.
TRIES = 400


def serving_rivals(
    chains: ServingChains,
    decision: ServingDecision,
    count: int,
    *,
    seed: int,
    total_s: Callable[[ServingDecision], float],
) -> dict[str, ServingDecision]:
    """Decisions that meet every limit and are predicted within 10 % of ``decision``.

    Made by random walks from the decision: a cut moves, a layer gets other bits, two layers swap
    bits, two devices swap places, or micro-batches change.

    Args:
        chains: the chain problems of the plan.
        decision: where the walks start.
        count: how many to find; fewer come back where fewer exist.
        seed: of the walks.
        total_s: simulated time of a decision.

    Returns:
        Decisions by name (``random 1`` ...), all different and none equal to ``decision``.
    """
    rng = np.random.default_rng(seed)
    limit = total_s(decision) * (1 + WITHIN)
    sizes = chains.sizes()
    start = _state(chains, decision)
    seen = {start}
    found: dict[str, ServingDecision] = {}
    for _ in range(TRIES * count):
        if len(found) >= count:
            break
        state = start
        for _ in range(int(rng.integers(1, 4))):
            state = _step(rng, state, sizes, len(chains.bits))
        if state in seen:
            continue
        seen.add(state)
        size, kinds, ends, chosen = state
        assignment = _assign(chains.problem(size), kinds, ends, chosen)
        if assignment is None or evaluate(chains.problem(size), assignment).violations:
            continue
        rival = chains.decision(size, assignment)
        if total_s(rival) <= limit:
            found[f"random {len(found) + 1}"] = rival
    return found


def serving_near(
    chains: ServingChains, decision: ServingDecision, *, seed: int, tries: int = 160, count: int = 6
) -> dict[str, ServingDecision]:
    """Decisions one change away from ``decision`` that the solver's law puts next to it.

    Args:
        chains: the chain problems of the plan.
        decision: what they are close to.
        seed: of the changes tried.
        tries: changes tried; they are judged by the law alone, which is quick.
        count: how many to keep.

    Returns:
        The best by the law, named by what differs; all meet every limit.
    """
    rng = np.random.default_rng(seed)
    sizes = chains.sizes()
    start = _state(chains, decision)
    seen = {start}
    ranked: list[tuple[float, int, MicroBatches, ChainAssignment]] = []
    for turn in range(tries):
        state = _step(rng, start, sizes, len(chains.bits))
        if state in seen:
            continue
        seen.add(state)
        size, kinds, ends, chosen = state
        problem = chains.problem(size)
        assignment = _assign(problem, kinds, ends, chosen)
        if assignment is None:
            continue
        judged = evaluate(problem, assignment)
        if not judged.violations:
            ranked.append((judged.objective, turn, size, assignment))
    best = [chains.decision(s, a) for _, _, s, a in sorted(ranked, key=lambda r: r[:2])[:count]]
    named: dict[str, ServingDecision] = {}
    for found in best:
        name = _difference(decision, found)
        number = sum(other.startswith(name) for other in named)
        named[f"{name} ({number + 1})" if number else name] = found
    return named


def _difference(base: ServingDecision, other: ServingDecision) -> str:
    """What makes a decision another one, in a few words."""
    sizes = (other.prefill_microbatch, other.decode_microbatch)
    if sizes != (base.prefill_microbatch, base.decode_microbatch):
        return f"micro-batches of {sizes[0]} and {sizes[1]}"
    if [s.ranks for s in other.stages] != [s.ranks for s in base.stages]:
        return "other order of devices"
    if [s.end for s in other.stages] != [s.end for s in base.stages]:
        return "layers " + " + ".join(str(s.end - s.start) for s in other.stages)
    return "other bits"


_State = tuple[MicroBatches, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Micro-batches, types along the chain, where stages but the last end, a variant a layer."""


def _state(chains: ServingChains, decision: ServingDecision) -> _State:
    return (
        MicroBatches(
            decision.prefill_microbatch, decision.decode_microbatch, chains.leaner(decision)
        ),
        tuple(chains.kind_of(stage) for stage in decision.stages),
        tuple(stage.end for stage in decision.stages[:-1]),
        tuple(chains.bits.index(b) for b in decision.bits),
    )


def _step(rng: np.random.Generator, state: _State, sizes: list[MicroBatches], bits: int) -> _State:
    """A state one random change away."""
    size, order, cuts, variants = state[0], *map(list, state[1:])
    layers = len(variants)
    move = int(rng.integers(0, 5))
    if move == 0 and cuts:
        i = int(rng.integers(len(cuts)))
        cuts[i] += int(rng.choice([-2, -1, 1, 2]))
    elif move == 1:
        variants[int(rng.integers(layers))] = int(rng.integers(bits))
    elif move == 2:
        a, b = (int(rng.integers(layers)) for _ in range(2))
        variants[a], variants[b] = variants[b], variants[a]
    elif move == 3 and len(order) > 1:
        a, b = (int(rng.integers(len(order))) for _ in range(2))
        order[a], order[b] = order[b], order[a]
    else:
        size = sizes[int(rng.integers(len(sizes)))]
    return size, tuple(order), tuple(cuts), tuple(variants)


def _assign(
    problem: ChainProblem, order: Sequence[int], cuts: Sequence[int], variants: Sequence[int]
) -> ChainAssignment | None:
    ends = [0, *cuts, problem.n_layers]
    if any(a >= b for a, b in itertools.pairwise(ends)):
        return None
    return ChainAssignment(
        tuple(
            make_stage(problem, kind, a, b, variants[a:b])
            for kind, a, b in zip(order, ends[:-1], ends[1:], strict=True)
        )
    )
