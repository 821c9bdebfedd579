"""What others would do: even, memory-proportional and min-max splits at one number of bits.

No straw men: every baseline uses the kernels that the planner found fastest on each device, the
best order of the devices, and the same search over micro-batch sizes. Baselines know nothing of
quality limits; one that misses them is run and shown with its bits, but cannot be the plan.

Where the planner may group devices, these splits are made of single devices, and once more of one
group of each type, as large as the model allows: a server's ``tensor_parallel_size``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from foreplan.planner.serving.chain import ServingChains
from foreplan.planner.serving.groups import widest
from foreplan.planner.serving.pricing import MicroBatches
from foreplan.planner.serving.spec import ServingDecision
from foreplan.solvers.chain_baselines import (
    even_split,
    memory_proportional_split,
    min_max_split,
)
from foreplan.solvers.chain_problem import ChainProblem
from foreplan.solvers.chain_score import ChainAssignment, evaluate

Split = Callable[[ChainProblem, Sequence[int]], ChainAssignment | None]

#: Micro-batch sizes that are replayed by the simulator, best by the solver's law first.
REPLAYS = 3


def serving_baselines(
    chains: ServingChains, total_s: Callable[[ServingDecision], float]
) -> dict[str, ServingDecision | str]:
    """Baselines by name, or why one has no feasible form.

    Args:
        chains: the chain problems of the plan.
        total_s: simulated time of a decision.
    """
    times: dict[str, float] = {}

    def once(decision: ServingDecision) -> float:
        # Splits, and numbers of bits, often come to the same decision.
        text = decision.model_dump_json()
        if text not in times:
            times[text] = total_s(decision)
        return times[text]

    if len(chains.groupings()) == 1:
        return _distinct(dict(_splits(chains, once)))
    alone = chains.restricted([kind for kind in chains.kinds if kind.degree == 1])
    wide = chains.restricted(widest(chains.kinds))
    made = dict(_splits(alone, once))
    made |= {f"tensor parallelism, {name}": d for name, d in _splits(wide, once)}
    return _distinct(made)


def _splits(
    chains: ServingChains, total_s: Callable[[ServingDecision], float]
) -> Iterator[tuple[str, ServingDecision | str]]:
    """Every baseline, by name."""
    every = list(range(len(chains.bits)))  # from the most bits to the fewest

    @functools.cache
    def at(split: Split, variant: int) -> ServingDecision | None:
        """Best micro-batch sizes for a split at one number of bits."""
        found = [
            answer for sizes in chains.sizes()
            if (answer := _answer(chains, sizes, split, variant)) is not None
        ]  # fmt: skip
        found.sort(key=lambda answer: answer[0])
        return min((decision for _, decision in found[:REPLAYS]), key=total_s, default=None)

    def best(split: Split) -> ServingDecision | None:
        """The same at the most bits that fit in memory."""
        return next((made for v in every if (made := at(split, v)) is not None), None)

    for name, split in (
        ("even split, most bits", even_split),
        ("memory-proportional split, most bits", memory_proportional_split),
        ("min-max split, most bits", min_max_split),
    ):
        yield name, best(split) or "fits at no number of bits"
    for name, split in (
        ("even split, fastest bits", even_split), ("min-max split, fastest bits", min_max_split)
    ):  # fmt: skip
        uniform = [d for v in every if (d := at(split, v)) is not None]
        yield name, min(uniform, key=total_s) if uniform else "fits at no number of bits"


def _answer(
    chains: ServingChains, sizes: MicroBatches, split: Split, variant: int
) -> tuple[float, ServingDecision] | None:
    """(latency by the law, decision) of a split at one number of bits."""
    problem = chains.problem(sizes)
    free = dataclasses.replace(problem, max_omega=None, max_cost2=None, theta=0.0)
    assignment = split(free, [variant])
    if assignment is None:
        return None
    latency = evaluate(free, assignment).latency_s
    if not math.isfinite(latency):
        return None
    # Times are judged by the simulator, see `ServingPlanner.judged`.
    met = not evaluate(problem, assignment).violations
    return latency, chains.decision(sizes, assignment, limits_met=met)


def _distinct(made: dict[str, ServingDecision | str]) -> dict[str, ServingDecision | str]:
    """The same decision under a second name becomes a remark."""
    kept: dict[str, ServingDecision | str] = {}
    for name, decision in made.items():
        twin = next(
            (n for n, d in kept.items() if d == decision and not isinstance(decision, str)), None
        )
        kept[name] = decision if twin is None else f"the same decision as {twin}"
    return kept
