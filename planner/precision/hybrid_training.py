"""Does less omega train better? The plan, uniform precision and random plans of equal step time.

    python -m foreplan.planner.precision.hybrid_training plan CLUSTER WORKLOAD -o hybrid.json
    foreplan verify hybrid.json -o verification.json              # step times, in real processes
    python -m foreplan.planner.precision.hybrid_training train hybrid.json -o losses.jsonl
    python -m foreplan.planner.precision.hybrid_training table losses.jsonl

``plan`` writes a plan whose alternatives are fp32, the fastest uniform precision, the workload's
lowest precision everywhere, and ``--draws`` random plans: random walks over plans that meet the
target, which end at one that uses it. ``train`` trains from
the same weights on the same batches, *emulated*: one process computes each rank as planned, one
after another, and averages gradients as DDP does. The learning rate decays to zero along a cosine,
so that the noise of single batches does not hide what is left of rounding. With ``--draws-a-seed``
every seed trains random plans of its own, so that differences to them are differences to all random
plans that take as long, not to a few. An arm ``NAME@3`` rounds
what the plan lowers to three bits instead (see `foreplan.datasets.kernels.training_recipe`), a
stand-in for smaller formats; the other arms compute in the formats of the plan.
``table`` gives paired differences to fp32 (or to ``--against``) with 95 % confidence intervals
(Student's t); ``--together`` takes the random plans of a seed as one arm, by their mean.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foreplan.cost_models.book import CostChoice
from foreplan.cost_models.quality.in_fp32 import in_fp32
from foreplan.errors import SpecError, told
from foreplan.planner.plan import Alternative, Plan, load_plan
from foreplan.planner.precision.indicator import omega_table
from foreplan.planner.precision.partial_plans import add_plan_arguments, planned
from foreplan.planner.precision.planner import PrecisionPlanner
from foreplan.planner.precision.search import PrecisionSearch
from foreplan.planner.precision.situation import Choices, Situation
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import training_task
from foreplan.planner.predict import Forecast

FP32, UNIFORM, LOWEST, PLAN = "uniform fp32", "fastest uniform", "lowest uniform", "plan"
#: What random plans are called, and together.
DRAW, DRAWS = "draw", "random plans"
#: Steps of a random walk, and random plans unless told otherwise.
_WALK, _WALKS = 600, 3
#: Share of the target that a random plan may leave: the 2 % by which step times count as equal.
_UNUSED = 0.02
#: Losses of a run.
_LOSSES = ("validation", "training")
#: Batches of held-out samples behind a validation loss.
_VALIDATION = 48


def hybrid_plan(
    cluster: str, workload: str, *, costs: CostChoice = "measured", seed: int = 0,
    draws: int = _WALKS,
) -> Plan:  # fmt: skip
    """The plan and what it is compared with; see the module, and `planned` for errors.

    Args:
        cluster: file of a profiled cluster, or its inline form.
        workload: file of a precision workload.
        costs: that plans are predicted from.
        seed: of plan and walks.
        draws: random plans; a walk is the same however many there are.
    """
    made, problem = planned(cluster, workload, costs, seed)
    situation, planner = Situation(problem), PrecisionPlanner()
    omega = omega_table(situation.task, situation.graph, problem.workload, seed)
    search = PrecisionSearch(situation, omega)
    lowest = problem.workload.precisions[-1]
    others: dict[str, Choices] = {
        FP32: [situation.uniform(k, "fp32") for k in range(len(situation.kinds))],
        UNIFORM: search.start,
        LOWEST: [situation.uniform(k, lowest) for k in range(len(situation.kinds))],
    }
    for number in range(draws):
        others[f"{DRAW} {number}"] = _walk(search, np.random.default_rng((seed, number)))
    alternatives = []
    for name, choices in others.items():
        met = search.meets(situation.replay.run(situation.each(choices)))
        decision = situation.decision(choices, omega, search.target_s, limits_met=met)
        alternatives.append(
            Alternative(
                name=name, decision=decision.model_dump(mode="json"), limits_met=met,
                predicted=Forecast.of(planner, problem, decision).prediction(),
            )
        )  # fmt: skip
    return made.model_copy(update={"alternatives": tuple(alternatives)})


def _walk(search: PrecisionSearch, random: np.random.Generator) -> Choices:
    """Change one operator at a time to any variant, as long as the limits are met.

    It goes on until the target is used, for four times as long where that is not to be had.
    """
    s, at = search.situation, list(search.start)
    least_s, taken_s = (1.0 - _UNUSED) * search.target_s, 0.0
    for step in range(4 * _WALK):
        if step >= _WALK and taken_s >= least_s:
            break
        k = int(random.integers(len(at)))
        tables = s.devices[k].tables
        i = int(random.choice(tables.graph.adjustable))
        text = str(random.choice([option.name for option in tables.options[i]]))
        names = {**tables.names(at[k]), tables.graph.operators[i].module: text}
        trial = [*at[:k], tables.choice(names), *at[k + 1 :]]
        replayed = s.replay.run(s.each(trial))
        if search.meets(replayed):
            at, taken_s = trial, replayed.iteration_s
    return at


def emulated_losses(
    workload: PrecisionWorkload, ranks: Sequence[Mapping[str, str]], steps: int, seed: int,
    *, decay: bool = True,
) -> dict[str, float]:  # fmt: skip
    """Train as planned in one process; imports torch.

    Args:
        workload: network, batch, optimizer and the learning rate at the start.
        ranks: variants by module, rank by rank.
        steps: of training.
        seed: of weights, batches and rounding.
        decay: let the learning rate fall to zero along a cosine.

    Returns:
        ``validation``: of the weights in fp32; ``training``: mean of all ranks over the last tenth.
    """
    import torch

    from foreplan.planner.precision.execution.modules import apply_variants, remove_precision
    from foreplan.planner.precision.execution.optimizers import make_optimizer

    task: Any = training_task(None, workload, seed)
    models = [
        apply_variants(task.module().train(), variants, seed=rank << 40)
        for rank, variants in enumerate(ranks)
    ]
    parameters = [list(model.parameters()) for model in models]
    optimizer = make_optimizer(models[0], workload.optimizer, workload.learning_rate)
    tail: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            share = (1 + math.cos(math.pi * step / steps)) / 2 if decay else 1.0
            group["lr"] = workload.learning_rate * share
        losses = []
        for rank, model in enumerate(models):
            inputs, target = task.batch(step, rank)
            model.zero_grad(set_to_none=True)
            loss = task.loss(in_fp32(model(*inputs)), target)
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
        with torch.no_grad():
            for same in zip(*parameters, strict=True):
                same[0].grad = sum(p.grad for p in same) / len(same)
        optimizer.step()
        with torch.no_grad():
            for same in zip(*parameters, strict=True):
                for other in same[1:]:
                    other.copy_(same[0])
        if step >= steps * 9 // 10:
            tail += losses
    plain = remove_precision(models[0]).eval()
    with torch.no_grad():
        found = [
            float(task.loss(plain(*inputs), target))
            for inputs, target in map(task.validation_batch, range(_VALIDATION))
        ]
    return {"validation": float(np.mean(found)), "training": float(np.mean(tail))}


def fewer_bits(variants: Mapping[str, str], bits: str) -> dict[str, str]:
    """The variants with every lowered product in so few bits; its backward pass if it was low."""

    def lowered(text: str) -> str:
        if text.startswith("fp32/fp32/") or "embedding" in text:
            return text
        back = "fp32" if text.endswith("+fp32") else "int8"
        return f"fp32/int8/torch.int_mm+{back}@bits{bits}"

    return {name: lowered(text) for name, text in variants.items()}


def difference_table(rows: Iterable[Mapping[str, Any]], against: str = FP32) -> str:
    """Markdown of paired differences.

    Args:
        rows: of `emulated_losses`, each with ``arm`` and ``seed``.
        against: the arm that the others are compared with.
    """
    from scipy.stats import t  # type: ignore[import-untyped]

    by_arm: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["seed"]] = row
    base = by_arm.get(against, {})
    lines = [f"| arm | seeds | validation loss | against {against} | training loss, likewise |",
             "|---|---|---|---|---|"]  # fmt: skip
    for arm, runs in by_arm.items():
        seeds = sorted(set(runs) & set(base))
        cells = [str(len(seeds)), f"{np.mean([runs[s]['validation'] for s in seeds]):.4f}"]
        for word in _LOSSES:
            apart = np.array([runs[s][word] - base[s][word] for s in seeds])
            if arm == against or len(apart) < 2:
                cells.append("")
                continue
            width = float(t.ppf(0.975, len(apart) - 1)) * apart.std(ddof=1) / len(apart) ** 0.5
            cells.append(f"{apart.mean():+.4f} ± {width:.4f}")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def together(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the random plans of each seed as one arm, at the mean of their losses."""
    kept: list[dict[str, Any]] = []
    drawn: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["arm"].startswith(f"{DRAW} "):
            drawn.setdefault(row["seed"], []).append(row)
        else:
            kept.append(dict(row))
    for seed, some in drawn.items():
        losses = {word: float(np.mean([row[word] for row in some])) for word in _LOSSES}
        kept.append({"arm": DRAWS, "seed": seed, **losses})
    return kept


def _train(
    made: Plan, arms: Sequence[str], seeds: Sequence[int], steps: int, out: Path, draws: int
) -> None:
    """Append a line a run; runs that are there already are left out, and arms that repeat one.

    Raises:
        SpecError: a seed without ``draws`` random plans of its own.
    """
    there = sum(a.name.startswith(f"{DRAW} ") for a in made.alternatives)
    if draws * (max(seeds) + 1) > there:
        raise SpecError(
            "--draws-a-seed", got=draws, expected=f"at most {there // (max(seeds) + 1)}: "
            f"the plan has {there} random plans for seeds up to {max(seeds)}",
            fix=f"plan with --draws {draws * (max(seeds) + 1)}",
        )  # fmt: skip
    decisions = {PLAN: made.decision} | {a.name: a.decision for a in made.alternatives}
    strange = [arm for arm in arms if arm.partition("@")[0] not in decisions]
    if strange:
        raise SpecError("--arms", got=strange[0], expected=f"one of {', '.join(decisions)}")
    first = {json.dumps(decisions[arm.partition("@")[0]]["workers"]): arm for arm in reversed(arms)}
    arms = [arm for arm in arms if "@" in arm or arm in first.values()]
    workload = PrecisionWorkload.model_validate_json(json.dumps(made.workload))
    lines = out.read_text().splitlines() if out.exists() else []
    done = {(row["seed"], row["arm"]) for row in map(json.loads, lines)}
    for seed in seeds:
        own = [f"{DRAW} {number}" for number in range(draws * seed, draws * (seed + 1))]
        for arm in [*arms, *own]:
            if (seed, arm) in done:
                continue
            name, _, bits = arm.partition("@")
            ranks = [worker["operators"] for worker in decisions[name]["workers"]]
            if bits:
                ranks = [fewer_bits(variants, bits) for variants in ranks]
            row = {"seed": seed, "arm": arm, "steps": steps}
            row |= emulated_losses(workload, ranks, steps, seed)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _losses(path: Path) -> list[dict[str, Any]]:
    """What ``train`` wrote, a line a seed and arm."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise SpecError(str(path), got=got, expected="the losses that `train` wrote") from error
    needed = {"arm", "seed", *_LOSSES}
    if not rows or not all(isinstance(row, dict) and needed <= row.keys() for row in rows):
        raise SpecError(
            str(path), got=f"{len(rows)} lines", expected=f"lines with {', '.join(sorted(needed))}"
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The commands of the module's docstring."""
    parser = argparse.ArgumentParser(description="train with a plan and with what it beats")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("plan")
    add_plan_arguments(one)
    one.add_argument("--draws", type=int, default=_WALKS)
    two = commands.add_parser("train")
    two.add_argument("plan", type=Path)
    two.add_argument("-o", "--output", type=Path, required=True)
    two.add_argument("--steps", type=int, default=150)
    two.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    draws = [f"{DRAW} {number}" for number in range(_WALKS)]
    two.add_argument("--arms", nargs="+", default=[FP32, UNIFORM, LOWEST, PLAN, *draws])
    two.add_argument("--draws-a-seed", type=int, default=0)
    three = commands.add_parser("table")
    three.add_argument("losses", type=Path)
    three.add_argument("--against", default=FP32)
    three.add_argument("--together", action="store_true")
    given = parser.parse_args(arguments)
    if given.command == "plan":
        made = hybrid_plan(
            given.cluster, given.workload, costs=given.costs, seed=given.seed, draws=given.draws
        )
        made.save(given.output)
    elif given.command == "train":
        made = load_plan(given.plan)
        if made.kind != "precision":
            raise SpecError(str(given.plan), got=f"a {made.kind} plan", expected="a precision plan")
        _train(made, given.arms, given.seeds, given.steps, given.output, given.draws_a_seed)
    else:
        rows = _losses(given.losses)
        print(difference_table(together(rows) if given.together else rows, given.against))


if __name__ == "__main__":
    with told():
        main()
