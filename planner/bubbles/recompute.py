"""Recomputation left open by a workload (``recompute: auto``): candidates, search and answer.

What is kept of a pass costs memory from its forward to its backward pass, what is computed again
costs time in the backward pass (Korthikanti et al. 2022, "Reducing activation recomputation"). The
less a micro-batch holds, the more of the encoders' work may be in flight, so that neither keeping
everything nor keeping little is best in general. Every candidate is planned as if a user had asked
for it, unless its lower bound says that it cannot be faster than what was found.

A decision states what was chosen (`BubblesDecision.recompute`); `settled` puts that into the
workload for whoever prices, simulates or runs the decision.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from foreplan.errors import InfeasibleError
from foreplan.planner.base import Choice, Problem
from foreplan.planner.bubbles.arithmetic import Arithmetic
from foreplan.planner.bubbles.decision import BubblesDecision, Recomputation
from foreplan.planner.bubbles.spec import BubblesWorkload, Recompute

#: Encoders whose recomputation is searched one by one; more of them are treated alike.
_APART = 3
#: Steps that differ by less, relatively, are as long as each other: the one that keeps more counts.
_ALIKE = 1e-6


def is_open(workload: BubblesWorkload) -> bool:
    """Whether a workload leaves recomputation to the planner anywhere."""
    return "auto" in (workload.recompute, *(encoder.recompute for encoder in workload.encoders))


def candidates(problem: Problem[BubblesWorkload]) -> tuple[list[Recomputation], dict[str, str]]:
    """Every recomputation that a workload allows, what keeps most first; reasons against others.

    Frozen encoders keep nothing, so that there is nothing to compute again.
    """
    w, lost = problem.workload, dict[str, str]()
    backbone: list[Recompute] = list(get_args(Recompute))
    if w.recompute != "auto":
        backbone = [w.recompute]
    elif Arithmetic.of(problem.cluster).measurable:
        backbone.remove("none")
        lost["recompute: backbone none"] = (
            "the fused attention of a real run never keeps its inside, which selective leaves out"
        )
    free = [
        k for k, e in enumerate(w.encoders) if e.recompute == "auto" and not e.frozen
    ]  # fmt: skip
    fixed = [e.recompute is True for e in w.encoders]
    ways = list(itertools.product((False, True), repeat=len(free)))
    if len(free) > _APART:
        lost[f"recompute: some of {len(free)} encoders"] = (
            f"above {_APART} encoders they are computed again all or none"
        )
        ways = [ways[0], ways[-1]]
    found = []
    for kind, way in itertools.product(backbone, ways):
        encoders = list(fixed)
        for k, again in zip(free, way, strict=True):
            encoders[k] = again
        found.append(Recomputation(backbone=kind, encoders=tuple(encoders)))
    order: tuple[Recompute, ...] = get_args(Recompute)
    found.sort(key=lambda r: (order.index(r.backbone) + sum(r.encoders), order.index(r.backbone)))
    return found, lost


def under(
    problem: Problem[BubblesWorkload], chosen: Recomputation | None
) -> Problem[BubblesWorkload]:
    """The problem of a workload that asks for just this recomputation; as it is for ``None``."""
    if chosen is None:
        return problem
    w = problem.workload
    pairs = zip(w.encoders, chosen.encoders, strict=True)
    encoders = tuple(e.model_copy(update={"recompute": again}) for e, again in pairs)
    update = {"recompute": chosen.backbone, "encoders": encoders}
    return replace(problem, workload=w.model_copy(update=update))


def settled(
    problem: Problem[BubblesWorkload], decision: BubblesDecision
) -> Problem[BubblesWorkload]:
    """The problem with the recomputation that a decision states, if it states one."""
    return under(problem, decision.recompute)


def described(problem: Problem[BubblesWorkload], chosen: Recomputation) -> str:
    """A recomputation in words, ``recompute: backbone selective, vit full``."""
    pairs = zip(problem.workload.encoders, chosen.encoders, strict=True)
    words = [f"{e.name} {'full' if again else 'selective'}" for e, again in pairs if not e.frozen]
    return "recompute: " + ", ".join([f"backbone {chosen.backbone}", *words])


def search(
    problem: Problem[BubblesWorkload],
    plan: Callable[[Problem[BubblesWorkload]], tuple[float, Choice[BubblesDecision]]],
    floor_s: Callable[[Problem[BubblesWorkload]], float],
) -> Choice[BubblesDecision]:
    """The best answer under any recomputation that the workload allows.

    Args:
        problem: with recomputation left open.
        plan: simulated seconds and answer of a problem without anything open.
        floor_s: no step of such a problem is shorter.

    Returns:
        The fastest answer; of equally fast ones that which keeps most.

    Raises:
        InfeasibleError: nothing fits under any; the message is that of what keeps least.
    """
    open_, lost = candidates(problem)
    best: tuple[float, Recomputation, Choice[BubblesDecision]] | None = None
    lower, evaluations, tried = float("inf"), 0, []
    failure: InfeasibleError | None = None
    for chosen in open_:
        posed, name = under(problem, chosen), described(problem, chosen)
        try:
            floor = floor_s(posed)
            if best is not None and floor >= best[0]:
                lower = min(lower, floor)
                lost[name] = f"no step of it is shorter than {floor:.4g} s, found {best[0]:.4g} s"
                continue
            total, choice = plan(posed)
        except InfeasibleError as error:
            lost[name], failure = str(error), error
            continue
        lower = min(lower, total if choice.bound.lower_s is None else choice.bound.lower_s)
        evaluations += choice.bound.evaluations
        tried.append((name, total))
        if best is None or total < best[0] * (1.0 - _ALIKE):
            best = total, chosen, choice
    if best is None:
        assert failure is not None
        raise failure
    total, chosen, choice = best
    lower, name = min(lower, total), described(problem, chosen)
    others = [f"{other} {seconds:.4g} s" for other, seconds in tried if other != name]
    notes = [f"{name} (searched)" + (f": {total:.4g} s; {'; '.join(others)}" if others else "")]
    notes += [f"not taken: {other}: {reason}" for other, reason in lost.items()]
    return replace(
        choice,
        decision=stamped(choice.decision, chosen),
        bound=replace(choice.bound, lower_s=lower, gap=(total - lower) / total,
                      evaluations=evaluations),
        assumptions=(*choice.assumptions, *notes[1:]),
        about=(notes[0], *choice.about),
        near={k: stamped(decision, chosen) for k, decision in choice.near.items()},
    )  # fmt: skip


def stamped(decision: BubblesDecision, chosen: Recomputation | None) -> BubblesDecision:
    """The decision with what it computes again written into it."""
    return decision.model_copy(update={"recompute": chosen})
