"""How sure a plan's choice is and what is proven, as names and values for terminal and page."""

from __future__ import annotations

from foreplan.planner.plan import Plan
from foreplan.planner.report.text import number, percent, plain, seconds, words
from foreplan.planner.sureness import Measurement

#: Shares below this are not worth a line.
_LEAST = 0.005
#: Differences between law and simulation up to this share of the total are not worth a word.
_LAW = 0.01


def certainty(plan: Plan) -> list[tuple[str, str]]:
    """How often the choice is the best, what beats it, and what to measure next."""
    sure = plan.confidence
    if not sure.draws:
        return []
    best = percent(sure.probability_best)
    if sure.in_time is None:
        pairs = [("best choice", f"in {best} of {sure.draws} draws")]
    else:
        # The plan is made to just meet its limit: with other prices it often misses it, or leaves
        # room for a better one, and that says little against it.
        pairs = [
            (
                "in its time limit",
                f"in {percent(sure.in_time)} of {sure.draws} draws of all prices",
            ),
            ("and the best", f"in {best}; else it is late, or a better one is in time too"),
        ]
    beaten = sorted(sure.share.items(), key=lambda item: (-item[1], item[0]))
    if not beaten and sure.runner_up:
        pairs.append(("otherwise", plain(sure.runner_up)))
    shown = [f"{plain(name)} ({percent(share)})" for name, share in beaten if share >= _LEAST]
    if shown:
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        pairs.append(("otherwise", "; ".join(shown[:3]) + more))
    late = 1.0 - sure.probability_best - sum(sure.share.values())
    if sure.share and late >= _LEAST:
        pairs.append(("none in time", f"in {percent(late)} of draws"))
    if not sure.measure_next and sure.share and sure.probability_best < 1 - _LEAST:
        pairs.append(("measure next", "no single price would settle it: the doubt is spread"))
    pairs += [
        ("measure next" if k == 0 else "then", measurement(item))
        for k, item in enumerate(sure.measure_next)
    ]
    return pairs


def proof(plan: Plan) -> list[tuple[str, str]]:
    """How the plan was searched, what no decision can be faster than, and the gap.

    The gap is of what the planner seeks, by its solver's law; the simulated total may lie further
    from the bound than that, and then the line says so.
    """
    bound, total_s = plan.bound, plan.predicted.total_s
    pairs = [("search", f"{words(bound.status)}, {plain(bound.solver)}")]
    if bound.lower_s == 0:  # every decision takes longer than nothing
        return [*pairs, ("proven bound", "none")]
    if bound.lower_s is not None:
        text = f"no plan takes less than {seconds(bound.lower_s)}, by the solver's law"
        above = 1 - bound.lower_s / total_s if total_s > 0 else 0.0
        if bound.lower_s > 0 and above > (bound.gap or 0.0) + _LAW:
            text += f"; simulated, this one takes {percent(total_s / bound.lower_s - 1)} more"
        pairs.append(("proven bound", text))
    if bound.gap is not None:
        pairs.append(("proven gap", percent(bound.gap)))
    return pairs


def close_decisions(plan: Plan) -> list[tuple[str, float]]:
    """Decisions of the search that are no alternatives of the plan, and what they win."""
    known = {other.name for other in plan.alternatives}
    near = [(n, share) for n, share in plan.confidence.share.items() if n not in known]
    return sorted(near, key=lambda item: (-item[1], item[0]))


def measurement(item: Measurement) -> str:
    """``linear@bf16 on t4 (roofline, ×0.55 to ×3.5): right in 48 % of draws``."""
    return (
        f"{plain(item.program)} on {plain(item.device)} ({plain(item.source)}, "
        f"×{number(round(item.low, 3))} to ×{number(round(item.high, 3))}): best choice in "
        f"{percent(item.probability_best)} once known"
    )
