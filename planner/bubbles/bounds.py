"""What is proven about a filling: every lower bound of its problem, the solver's own included.

LB0 to LB4 are those of `solvers.gap_fill_bounds`; LB5 is branch and bound's, for problems of a few
dozen units. All are about one order of the backbone and one size of units, and leave out what
follows the encoders' last backward pass (reductions, the optimizer).
"""

from __future__ import annotations

from dataclasses import fields

from foreplan.planner.bubbles.filling import Filled
from foreplan.solvers.gap_fill_bounds import lower_bounds

#: Units, over all micro-batches and both directions, up to which branch and bound is asked, and its
#: nodes: about a second.
MOST_UNITS, NODES = 96, 100
_GAP = 1e-3
#: Relative difference of sums that is none.
_ROUNDING = 1e-6


def proven(filled: Filled) -> tuple[dict[str, float], str]:
    """Lower bounds in seconds, ``LB0 backbone`` to ``LB5 solver``, and why one is missing.

    Args:
        filled: the answer whose problem is bounded.

    Returns:
        Bounds by name; without LB5 and with the reason where it is not computed.
    """
    problem = filled.problem
    bounds = lower_bounds(problem)
    found = {
        f"LB{k} {each.name.removesuffix('_s')}": float(getattr(bounds, each.name))
        for k, each in enumerate(fields(bounds))
    }
    units = problem.n_slots * (len(problem.forward) + len(problem.backward))
    if max(problem.slowdown(resource) for resource in (0, 1)) > 1.0:
        return found, "branch and bound does not know interference"
    if bounds.gap(filled.solution.objective) <= _GAP:
        found["LB5 solver"] = max(found.values())  # nothing is left to close
        return found, ""
    if units > MOST_UNITS:
        return found, f"{units} units, branch and bound is asked for {MOST_UNITS} at most"
    from foreplan.solvers.gap_fill_milp import solve_milp  # loads PuLP and HiGHS

    found["LB5 solver"] = solve_milp(problem, gap=_GAP, max_nodes=NODES).lower_bound
    return found, ""


def describe(filled: Filled) -> str:
    """One line about all bounds and the gap to the best."""
    bounds, missing = proven(filled)
    total, best = filled.solution.objective, max(bounds.values())
    shown = ", ".join(f"{name} {1e3 * value:.4g}" for name, value in bounds.items())
    # Below what times are shown to it is the rounding of sums.
    above = 0.0 if total <= best * (1.0 + _ROUNDING) else 100 * (total - best) / best
    left_out = f", LB5 not computed ({missing})" if missing else ""
    return (
        f"lower bounds in ms with this order of the backbone and units of this size, reductions "
        f"and optimizer not counted: {shown}{left_out}; the placement takes {1e3 * total:.4g}, "
        f"{above:.2g} % above the best"
    )
