"""`plan`: from descriptions to a checked plan document; the same road for every kind of planner.

decide → schedule → simulate → check memory → baselines, each simulated too → confidence → `Plan`.
If a baseline that meets every limit is simulated to be faster than the decision, it becomes the
decision and the plan says so.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import foreplan
from foreplan.cost_models.book import LAYER_TABLE, Profiles, cost_book, cost_choice_or_file
from foreplan.cost_models.roofline import instead_of_bf16, without_bf16
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.specs import StrictModel
from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.base import Choice, Planner, Problem
from foreplan.planner.confidence import Contender, confidence
from foreplan.planner.host_note import host_note
from foreplan.planner.load_workload import load_workload
from foreplan.planner.pace_choice import pace_of_ranks
from foreplan.planner.plan import (
    CHOSEN,
    Alternative,
    Plan,
    Provenance,
    ProvenBound,
    Rejected,
    VerifyHints,
)
from foreplan.planner.planned_for import planned_for
from foreplan.planner.predict import Forecast
from foreplan.planner.registry import planner as find_planner
from foreplan.planner.times import Times
from foreplan.planner.what_if import what_if

#: Largest relative error of a real run's total that passes unless the caller says otherwise.
TOLERANCE = 0.10
#: Kinds of plans that ``foreplan profile --for`` knows.
PROFILED = ("serving", "precision", "bubbles")
#: The alternative that the solver decided for, where another decision became the plan.
SOLVER = "solver"


def load_cluster(source: str | Path | Cluster, *, where: str = "cluster") -> tuple[Cluster, Path]:
    """A cluster and the folder that its profile paths start from.

    Args:
        source: a cluster, a YAML or JSON file (a `Path`, or text that ends like one), or the inline
            form ``2xa100-80g,4xt4``.
        where: what to call it in an error.

    Raises:
        SpecError: the file or the inline form is wrong.
    """
    if isinstance(source, Cluster):
        return source, Path()
    if not isinstance(source, (str, Path)):  # from a notebook, which no type checker has seen
        pair = isinstance(source, tuple) and any(isinstance(part, Cluster) for part in source)
        raise SpecError(
            where, got="the pair that load_cluster returns" if pair else source,
            expected="a file, an inline cluster such as '2xt4', or a Cluster",
            fix="give its first part" if pair else None,
        )  # fmt: skip
    if isinstance(source, Path) or source.lower().endswith((".yaml", ".yml", ".json")):
        if not os.path.exists(source):
            _refuse_inline(str(source))
        return Cluster.load(source), Path(source).parent
    return parse_devices(source, where), Path()


def _refuse_inline(text: str) -> None:
    """Say so where what should be a cluster's file is devices by name.

    Raises:
        SpecError: it is.
    """
    try:
        parse_devices(text, "cluster")
    except SpecError:
        return
    raise SpecError(
        "--cluster", got=text, expected="a file, and there is none of that name",
        fix=f"devices by their names are --devices {text}",
    )  # fmt: skip


def _costs_of(chosen: Planner[Any, Any], word: str, where: str) -> str:
    """A source of costs that can price plans of this kind.

    Raises:
        SpecError: no such source, or a table of layers for a plan of smaller parts.
    """
    if cost_choice_or_file(word, where).startswith(LAYER_TABLE) and not chosen.whole_layers:
        raise SpecError(
            where, got=word, expected=f"prices of single operators, of which {chosen.kind} plans "
            "are made: measured, predicted or roofline",
        )  # fmt: skip
    return word


def plan(
    kind: str,
    model: str | Path | Model | None,
    cluster: str | Path | Cluster,
    workload: str | Path | Mapping[str, Any] | StrictModel | None,
    *,
    costs: str = "measured",
    beside: Sequence[str] = (),
    relax: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Decide, replay the decision in the simulator, and describe it as a plan document.

    Args:
        kind: a planner: ``serving``, ``replicas``, ``precision``, ``bubbles`` or an installed one.
        model: a Hugging Face folder, a zoo name, a described model, or ``None`` where the planner
            needs none.
        cluster: a cluster, its file, or the inline form.
        workload: the planner's workload, its fields, or a file.
        costs: ``measured`` uses profiles and falls back on published figures, ``predicted`` leaves
            profiles out, ``predicted:FOLDER`` asks weights of your own, ``roofline`` uses published
            figures alone, ``helix:FILE`` a table of whole layers.
        beside: decide from these costs too and keep the decisions among the alternatives, priced
            and held to every limit by ``costs``; a verification then says what each source of costs
            is worth.
        relax: decide again with each binding limit relaxed by 10 %, one at a time, and say what it
            would bring (``what_if`` of the plan); takes as long again for each.
        seed: of every random choice.
        progress: hears one line at each step.

    Returns:
        The plan, replayed by the simulator and within every device's memory.

    Raises:
        SpecError: a description is wrong.
        InfeasibleError: nothing fits.
        MissingDataError: a cost is not known.
    """
    # From a notebook, unseen by a type checker; ``True`` is an int to Python alone.
    if not isinstance(seed, Integral) or isinstance(seed, bool) or seed < 0:
        raise SpecError("seed", got=seed, expected="a whole number of at least 0")
    seed = int(seed)  # of numpy
    chosen = find_planner(kind)
    costs = _costs_of(chosen, costs, "--costs")
    if isinstance(beside, str):
        raise SpecError("beside", got=beside, expected=f"a list, as in [{beside!r}]")
    if not isinstance(beside, Sequence):
        raise SpecError("beside", got=beside, expected="a list, as in ['roofline'], or ()")
    if progress is not None and not callable(progress):
        raise SpecError("progress", got=progress, expected="a function of one text, such as print")
    beside = [_costs_of(chosen, word, "--beside") for word in beside]
    described = None
    if model is not None:
        described = model if isinstance(model, Model) else load_model(model)
    elif chosen.needs_model:
        raise SpecError("model", got=None, expected=f"a model, because {kind} plans one")
    where, folder = load_cluster(cluster)
    profiles = Profiles.of(where, folder)
    where = profiles.completed(where)
    asked = load_workload(kind, workload)
    problem: Problem[Any] = Problem(
        model=described,
        cluster=where,
        workload=asked,
        costs=cost_book(
            where,
            profiles,
            costs,
            given=chosen.given(asked),
            issued=chosen.issues,
            profiling=_profiling(kind, model, workload),
        ),
        seed=seed,
    )
    say = progress or (lambda text: None)
    count = len(where.ranks())
    say(f"deciding: {kind} on {count} device{'s' if count > 1 else ''}")
    choice: Choice[Any] = chosen.decide(problem)
    forecast = _checked(chosen, problem, choice.decision)
    theirs = {word: _decide(chosen, problem, profiles, word) for word in beside if word != costs}
    rivals, called = _named(_judged(chosen, problem, theirs))
    say("comparing with other plans")
    others, rejected = _others(chosen, problem, choice.decision, rivals)
    assumptions = [
        *where.assumptions,
        *profiles.assumptions,
        *(
            f"no bf16 on {', '.join(names)}: what is called bf16 is {instead_of_bf16(dtype)}"
            for dtype, names in without_bf16(where.ranks()).items()
        ),
    ]
    about = choice.about
    decision, bound = choice.decision, choice.bound
    eligible = _eligible(others)
    worth = {n: chosen.objective(problem, others[n][0], f.total_s) for n, f in eligible.items()}
    best = min(worth, key=lambda name: worth[name], default=None)
    mine = chosen.objective(problem, decision, forecast.total_s)
    decided = {costs: CHOSEN} | {
        other: CHOSEN if rivals[name] == decision else name for other, name in called.items()
    }
    if best is not None and worth[best] < mine - 1e-9 * abs(mine):
        assumptions.append(
            f"the plan is the {f'one {best}' if best in rivals else f'baseline {best!r}'}: the "
            "simulator prefers it to the solver's decision"
        )
        about = tuple(f"of the solver's decision: {line}" for line in about)
        swapped = (decision, forecast)
        decision, forecast = others.pop(best)
        others = {SOLVER: swapped, **others}
        if best in rivals:  # what other costs decided; a baseline is these costs' own plan
            taken = {other for other, name in decided.items() if name == best}
            decided = {
                other: CHOSEN if other in taken else SOLVER if name == CHOSEN else name
                for other, name in decided.items()
            }
        eligible = _eligible(others)
        bound = bound.of_another(forecast.total_s, timed=mine == swapped[1].total_s)
    assumptions += [*about, *chosen.remarks(problem, decision), *choice.assumptions]
    assumptions += host_note(chosen, problem, forecast)
    say("drawing prices to see how sure the choice is")
    rated = confidence(
        chosen,
        problem,
        Contender("this plan", decision, forecast),
        [
            *(Contender(name, others[name][0], f) for name, f in eligible.items()),
            *_near(chosen, problem, choice.near, [decision, *(d for d, _ in others.values())]),
        ],
        seed=seed,
    )
    predicted = forecast.prediction()
    eased = None
    if relax:
        say("deciding again with each binding limit relaxed")
        eased = what_if(chosen, problem, decision, predicted, forecast.total_s)
    cuda = all(rank.kernel_kind == "cuda" for rank in where.ranks())
    made = Plan(
        kind=kind,
        model=described,
        cluster=where.rebase(folder, Path()),  # as the plan's other paths, from the current folder
        workload=problem.workload.model_dump(mode="json"),
        decision=decision.model_dump(mode="json"),
        predicted=predicted,
        times=Times.of(forecast.timeline),
        alternatives=tuple(
            Alternative(
                name=name,
                decision=d.model_dump(mode="json"),
                limits_met=getattr(d, "limits_met", True),
                predicted=f.prediction(),
            )
            for name, (d, f) in sorted(others.items(), key=lambda item: item[1][1].total_s)
        ),
        rejected=tuple(Rejected(name=name, reason=reason) for name, reason in rejected.items()),
        confidence=rated,
        what_if=eased,
        bound=ProvenBound(
            # The law lets decoding begin when all of prefill is over, the simulator a round before:
            # what a decision was seen to take is no bound on all of them.
            status=bound.status, gap=bound.gap, solver=bound.solver, evaluations=bound.evaluations,
            lower_s=None if bound.lower_s is None else min(bound.lower_s, forecast.total_s),
        ),
        verify=VerifyHints(
            backend="nccl" if cuda else "gloo", tolerance=TOLERANCE,
            ranks=chosen.processes(problem, decision),
            pace=pace_of_ranks(chosen, problem, decision, forecast, profiles.by_label)
            if costs == "measured" else (),
        ),
        assumptions=tuple(dict.fromkeys(assumptions)),
        provenance=Provenance(
            foreplan=foreplan.__version__, costs=costs, seed=seed,
            source_share=forecast.source_share(), profiles=profiles.digests(), decided=decided,
        ),
    )  # fmt: skip
    kept = made.provenance.model_copy(update={"planned_for": planned_for(made)})
    return made.model_copy(update={"provenance": kept})


def _profiling(kind: str, model: object, workload: object) -> str:
    """The command that measures what a plan is made of, as far as the caller's words are known."""
    if kind not in PROFILED:
        return "foreplan profile"
    words = ["foreplan", "profile", "--for", kind]
    words += ["--model", str(model)] if isinstance(model, (str, Path)) else []
    words += ["--workload", str(workload) if isinstance(workload, (str, Path)) else "FILE"]
    return shlex.join([*words, "-o", "profiles"])


def _checked(chosen: Planner[Any, Any], problem: Problem[Any], decision: Any) -> Forecast:
    """Simulate a decision and check every rank's memory."""
    forecast = Forecast.of(chosen, problem, decision)
    for rank, ledger in enumerate(forecast.ledgers):
        ledger.check(rank)
    return forecast


def _decide(
    chosen: Planner[Any, Any], problem: Problem[Any], profiles: Profiles, costs: str
) -> Any:
    """The decision from other costs, or the reason why there is none."""
    given = chosen.given(problem.workload)
    book = cost_book(problem.cluster, profiles, costs, given=given, issued=chosen.issues)
    try:
        return chosen.decide(dataclasses.replace(problem, costs=book)).decision
    except (InfeasibleError, MissingDataError, SpecError) as error:
        return str(error)


def _judged(
    chosen: Planner[Any, Any], problem: Problem[Any], decided: Mapping[str, Any]
) -> dict[str, Any]:
    """Decisions held to the problem's limits by its own prices; reasons stay what they are."""
    held = dict(decided)
    for name, decision in decided.items():
        if isinstance(decision, str):
            continue
        try:
            held[name] = chosen.judged(problem, decision)
        except (MissingDataError, SpecError) as error:  # a kernel that has no price here
            held[name] = str(error)
    return held


def _eligible(others: Mapping[str, tuple[Any, Forecast]]) -> dict[str, Forecast]:
    """What may become the plan, and counts where it did not: whatever meets every limit."""
    return {name: f for name, (d, f) in others.items() if getattr(d, "limits_met", True)}


def _named(decided: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Decisions, or reasons why there is none, by name, and names by source; equal ones are one."""
    alike: list[tuple[list[str], Any]] = []
    for costs, decision in decided.items():
        sources = next((sources for sources, other in alike if other == decision), None)
        if sources is None:
            alike.append(([costs], decision))
        else:
            sources.append(costs)
    names = [f"decided from {' and '.join(sources)} costs" for sources, _ in alike]
    return (
        {name: each for name, (_, each) in zip(names, alike, strict=True)},
        {costs: name for name, (sources, _) in zip(names, alike, strict=True) for costs in sources},
    )


_PLANS = "the same decision as the plan's"


def _others(
    chosen: Planner[Any, Any],
    problem: Problem[Any],
    decision: Any,
    rivals: Mapping[str, Any],
) -> tuple[dict[str, tuple[Any, Forecast]], dict[str, str]]:
    """Baselines and rivals that fit and have prices, with their forecasts; of others the reason."""
    kept: dict[str, tuple[Any, Forecast]] = {}
    rejected: dict[str, str] = {}
    usual = _judged(chosen, problem, chosen.baselines(problem))
    for name, other in {**usual, **rivals}.items():
        if isinstance(other, str):
            rejected[name] = other
            continue
        if other == decision:
            rejected[name] = _PLANS
            continue
        try:
            kept[name] = (other, _checked(chosen, problem, other))
        except (InfeasibleError, MissingDataError) as error:
            rejected[name] = str(error)
    plans = {f"the same decision as {name}" for name, why in rejected.items() if why == _PLANS}
    return kept, {name: _PLANS if why in plans else why for name, why in rejected.items()}


def _near(
    chosen: Planner[Any, Any], problem: Problem[Any], near: Mapping[str, Any], known: list[Any]
) -> list[Contender]:
    """Close decisions that fit, can be priced, and are not among the known ones."""
    found: list[Contender] = []
    for name, decision in near.items():
        if any(decision == other for other in known):
            continue
        known.append(decision)
        try:
            found.append(Contender(name, decision, _checked(chosen, problem, decision)))
        except (InfeasibleError, MissingDataError):
            continue
    return found
