"""Limits on the time to the first token and per token, for the solver and for simulated runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from foreplan.datasets.quantity import format_bound, format_seconds
from foreplan.errors import InfeasibleError
from foreplan.planner.serving.spec import ServingWorkload
from foreplan.solvers.chain_limits import TimeLimits, least_first_s, soonest_first_s, soonest_step_s
from foreplan.solvers.chain_problem import ChainProblem

#: Relative slack of simulated times and rates: rounding.
SLACK = 1e-9
#: Over the soonest time by the solver's law, what is simulated soon enough: links and hosts make
#: it up to 0.05 % longer (nine limits of drawn clusters).
_ENOUGH = 1.005


def time_limits(workload: ServingWorkload) -> TimeLimits:
    """The workload's limits, as the solver takes them."""
    return TimeLimits(
        first_s=workload.max_time_to_first_token_s or math.inf,
        step_s=workload.max_time_per_output_token_s or math.inf,
    )


def missed(workload: ServingWorkload, metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Limits that simulated figures miss, each in words."""
    return tuple(
        f"{name.removesuffix('_s').replace('_', ' ')} {_above(metrics[name], limit)}"
        for name, limit in _missed(workload, metrics)
    )


def _above(seconds: float, limit: float) -> str:
    """Both in words, or by how much where they would read alike."""
    if format_seconds(seconds) != format_seconds(limit):
        return f"{format_seconds(seconds)} above {format_seconds(limit)}"
    return f"{format_seconds(seconds - limit)} above {format_seconds(limit)}"


def late(workload: ServingWorkload, metrics: Mapping[str, float]) -> InfeasibleError:
    """Why the best by the solver's law will not do, with limits that would be met."""
    enough = " and ".join(
        f"max_{name} of {format_bound(metrics[name], 4, above=True)} or more"
        for name, _ in _missed(workload, metrics)
    )
    return InfeasibleError(
        "the best split by the solver's law has "
        f"{'; '.join(missed(workload, metrics))} when simulated",
        fix=f"{enough}, or fewer requests a batch",
    )


def _missed(workload: ServingWorkload, metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for name, limit in (
        ("time_to_first_token_s", workload.max_time_to_first_token_s),
        ("time_per_output_token_s", workload.max_time_per_output_token_s),
    ):
        if limit is not None and metrics.get(name, 0.0) > limit * (1 + SLACK):
            yield name, limit


def too_short(
    workload: ServingWorkload, problems: Iterable[ChainProblem]
) -> InfeasibleError | None:
    """Why no assignment of these problems meets the limits; ``None`` if the limits do not hinder.

    Args:
        workload: with the limits.
        problems: of every pair of micro-batch sizes.
    """
    limits = time_limits(workload)
    if limits.none:
        return None
    several = list(problems)
    limited: list[str] = []
    for what, field, limit, soonest in (
        ("first tokens", "max_time_to_first_token_s", limits.first_s, soonest_first_s),
        ("tokens", "max_time_per_output_token_s", limits.step_s, soonest_step_s),
    ):
        if limit == math.inf:
            continue
        limited.append(field)
        least = reached = math.inf
        for problem in several:
            bound, known = soonest(problem)
            least, reached = min(least, bound), min(reached, known)
            if reached <= limit:  # as many solves again would not make it a hindrance
                break
        if math.isfinite(reached) and reached > limit:
            # What is proven is a little less than what is known to be possible.
            told = (
                f"no split of these devices has its {what} sooner than {format_seconds(least)}"
                if least > limit
                else f"no split was found that has its {what} sooner than {format_seconds(reached)}"
            )
            return InfeasibleError(
                f"{told}; {field} is {format_seconds(limit)}",
                fix=f"{field} of {format_bound(_ENOUGH * reached, 3, above=True)} or more, fewer "
                "requests a batch, or faster devices",
            )
    # Any answer will do, however far from the best.
    if all(math.isfinite(least_first_s(problem, gap=1.0)) for problem in several):
        return InfeasibleError(
            "no split was found that meets every time limit together with the others",
            fix="relax " + " or ".join(limited),
        )
    return None
