"""`score`: what the end-to-end check measured, replayed; and its tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.costs import CostBook, Segment, Work
from foreplan.cost_models.execution import UNFUSED, Execution
from foreplan.cost_models.lowering.graph_step import PHASES, Step
from foreplan.cost_models.lowering.host_call import HostCall
from foreplan.cost_models.passes.graph_switch import SwitchRow, switch_seconds
from foreplan.cost_models.passes.host_prices import MODES, HostPrices, Issue, fit_host
from foreplan.cost_models.rates.gpu_host import gpu_host_s
from foreplan.cost_models.replay import replay, replay_book, replay_steps
from foreplan.cost_models.replayed_pass import Replay
from foreplan.datasets.operators import OPERATORS
from foreplan.datasets.program import Program, Variant
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from foreplan.cost_models.predictor import Predictor
    from foreplan.datasets.device import Device


def score(document: Mapping[str, Any], device: Device, *, weights: str = "pretrained:ops") -> Any:
    """Replay what `end_to_end.measure` saw.

    Args:
        document: from `end_to_end.measure`.
        device: figures for the predicted prices.
        weights: of the predictor.

    Returns:
        ``cases`` by execution with the real latency and, for each way to replay, the latency and
        its error, of a graph against the board at rest before each pass (``rested_s``); ``mape``
        by execution, phase and way; ``not_recorded``: passes that no graph was made of, and why;
        ``not_timed``: how many calls of a network were timed in a queue because they could not be
        recorded, by why. Ways: ``measured`` (operators timed one by one, of a graph from graphs;
        host, or what an operator takes longer behind another one than behind itself, measured),
        ``sum`` (the same operators, added up), ``predicted`` (host, or gaps of a graph, measured),
        and from figures of the device alone ``predicted_published``, on a processor ``unseen``,
        without what was timed on its chip, and ``roofline``.
    """
    predictors = _predictors(device, weights)
    rows: list[dict[str, Any]] = []
    failed = []
    queued: Counter[tuple[str, str, str]] = Counter()
    for case in document["cases"]:
        if case["real_s"] is not None:
            rows.append(_row(case, case, "eager", _eager(case, document, device, predictors)))
        queued.update(
            (case["network"], row[0], row[-1]) for row in case["alone"] if row[-1] is not None
        )
        recorded = case["graph"]
        if recorded and "failed" in recorded:
            failed.append([case["network"], case["shape"], case["phase"], recorded["failed"]])
        elif recorded:
            replays = _graph(case, document, device, predictors)
            rows.append(_row(case, recorded, "graph", replays))
    return {
        **{key: document[key] for key in ("device", "board", "size", "dtype")},
        "training_mode": document.get("training_mode", False),
        "gaps": document["gaps"]
        and {k: v for k, v in document["gaps"].items() if k not in ("alone", "passes")},
        "mape": {
            execution: {phase: _mape(rows, execution, phase) for phase in PHASES}
            for execution in UNFUSED
        },
        "not_recorded": failed,
        "not_timed": [[*which, count] for which, count in queued.items()],
        "cases": rows,
    }  # fmt: skip


def _predictors(device: Device, weights: str) -> dict[str, Predictor]:
    """What prices from figures of the device alone, by way."""
    from foreplan.cost_models.predictor import Predictor

    shipped = Predictor.load(weights)
    predictors = {"predicted_published": shipped}
    if device.kind == "cpu":
        predictors["unseen"] = shipped.unseen(device.chip)
    return predictors


def _books(
    steps: Sequence[Step], device: Device, predictors: Mapping[str, Predictor]
) -> dict[str, CostBook]:
    """Prices of a pass from figures of the device alone, by way."""
    books = {
        way: replay_book(device, predictor=each, steps=steps) for way, each in predictors.items()
    }
    return books | {"roofline": replay_book(device, "roofline")}


def tables(scored: Mapping[str, Any]) -> str:
    """A Markdown table for each execution and one of mean errors; errors in %.

    Args:
        scored: from `score`.
    """
    lines: list[str] = []
    mode = f"steps in {'training' if scored['training_mode'] else 'evaluation'} mode"
    for execution in UNFUSED:
        rows = [row for row in scored["cases"] if row["execution"] == execution]
        if not rows:
            continue
        ways = list(rows[0]["error"])
        named = ["network", "shape", "phase", "ms", "rounds", "limit", *ways]
        lines += [f"{execution}, {scored['board']}, {scored['dtype']}, {mode}", "", _line(named),
                  _line(["---"] * len(named))]  # fmt: skip
        for row in rows:
            errors = [f"{100 * row['error'][way]:+.1f}" for way in ways]
            real = row.get("rested_s", row["real_s"])
            lines.append(_line([
                row["network"], " x ".join(map(str, row["shape"])), row["phase"],
                f"{1e3 * real:.3f}", f"{100 * row['rounds']:.0f}", row["limit"], *errors,
            ]))  # fmt: skip
        lines += ["", _line(["mean of abs(error)", "cases", *ways]),
                  _line(["---"] * (2 + len(ways)))]  # fmt: skip
        for phase in PHASES:
            for limit in (None, "host", "device"):
                part = [r for r in rows if r["phase"] == phase and limit in (None, r["limit"])]
                if part:
                    means = [np.mean([abs(row["error"][way]) for row in part]) for way in ways]
                    name = phase if limit is None else f"- limited by the {limit}"
                    lines.append(
                        _line([name, str(len(part)), *(f"{100 * mean:.1f}" for mean in means)])
                    )
        lines.append("")
    for network, shape, phase, why in scored["not_recorded"]:
        lines.append(f"not recorded: {network} {shape} {phase}: {why}")
    for network, target, why, count in scored["not_timed"]:
        lines.append(f"timed in a queue: {network} {target} ({count}): {why}")
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mape(rows: Iterable[Mapping[str, Any]], execution: str, phase: str) -> dict[str, float]:
    """Mean absolute error by way; empty without a case."""
    errors = [r["error"] for r in rows if (r["execution"], r["phase"]) == (execution, phase)]
    ways = list(errors[0]) if errors else []
    return {way: float(np.mean([abs(error[way]) for error in errors])) for way in ways}


def _row(
    case: Mapping[str, Any], times: Mapping[str, Any], execution: str,
    replays: tuple[Replay, dict[str, float]],
) -> dict[str, Any]:  # fmt: skip
    """One case of the score: as measured, and as its replays say."""
    measured, found = replays
    real = float(times["real_s"])
    against = float(times.get("rested_s") or real)
    return {
        "network": case["network"], "shape": case["shape"], "phase": case["phase"],
        "execution": execution, "real_s": real,
        "spread": (times["real_high_s"] - times["real_low_s"]) / real,
        "rounds": (max(times["rounds_s"]) - min(times["rounds_s"])) / real,
        "limit": measured.limit,
        **{key: times[key] for key in ("rested_s", "kernels", "clock_hz", "power_w")
           if key in times},
        "latency_s": found, "error": {key: value / against - 1 for key, value in found.items()},
    }  # fmt: skip


def _eager(
    case: Mapping[str, Any],
    document: Mapping[str, Any],
    device: Device,
    predictors: Mapping[str, Predictor],
) -> tuple[Replay, dict[str, float]]:
    """The measured replay of an eager pass, and latencies by way."""
    host = HostPrices.load(document["host"])
    steps, issue = _steps(case["steps"]), _issue(case)
    books = _books(steps, device, predictors)
    launch = host.launches(steps, issue, case["phase"])
    # Steps of a document do not hold their calls; a processor's passes are its own host.
    gpu = document["figures"] is None
    usual = gpu_host_s(steps, issue.calls)[:, 0].tolist() if gpu else None
    single, given = _measured(case, document, "eager")
    single_launch = _single_launches(case, document, host, issue, single, given)
    measured = replay(
        single, replay_book(device, "roofline", given=given), device, launch_s=single_launch
    )
    return measured, {
        "measured": measured.latency_s,
        "sum": measured.device_s,
        "predicted": replay_steps(
            steps, books["predicted_published"], device, launch_s=launch
        ).latency_s,
        **{
            way: replay_steps(steps, book, device, launch_s=usual).latency_s
            for way, book in books.items()
        },
    }


def _graph(
    case: Mapping[str, Any],
    document: Mapping[str, Any],
    device: Device,
    predictors: Mapping[str, Predictor],
) -> tuple[Replay, dict[str, float]]:
    """The measured replay of a recorded pass, and latencies by way."""
    steps, gaps = _steps(case["steps"]), document["gaps"]
    # Documents of before passes were measured for it have what chains lose.
    rows = [SwitchRow(*row) for row in gaps.get("passes", [])]
    found_s = switch_seconds(rows, case["phase"])
    switch_s = gaps["switch_s"] if found_s is None else found_s
    books = _books(steps, device, predictors)
    single, given = _measured(case, document, "graph")
    # A call was timed behind its own kind; views are no kernels.
    between = [switch_s if given[step.work] > 0 else 0.0 for step in single]
    measured = replay(
        single, replay_book(device, "roofline", given=given), device, execution="graph",
        gap_s=between,
    )  # fmt: skip
    return measured, {
        "measured": measured.latency_s,
        "sum": sum(given[step.work] for step in single),
        "predicted": replay_steps(
            steps, books["predicted_published"], device, execution="graph", gap_s=switch_s
        ).latency_s,
        **{
            way: replay_steps(steps, book, device, execution="graph").latency_s
            for way, book in books.items()
        },
    }


def _issue(case: Mapping[str, Any]) -> Issue:
    calls, lines, tensors = case["issue"]
    return Issue([HostCall(*call) for call in calls], lines, tensors)


def _left_to_host(
    document: Mapping[str, Any],
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """What calls of a pass take longer by mode on a CPU, and seconds of a line of Python.

    Calls' times hold what issuing them takes. Of forward calls it is a share of their time, of
    gradients seconds of each node of autograd.
    """
    networks = [
        ({**alone, "backward": _nodes(calls)}, lines,
         {mode: whole[mode] - alone[mode] for mode in MODES}, whole)
        for _, lines, whole, alone, _, calls in document["calibration"]
    ]  # fmt: skip
    return fit_host(networks)


def _nodes(calls: Iterable[Sequence[Any]]) -> float:
    """Nodes that autograd goes through for a pass: calls, views and sums with gradients."""
    return float(sum(1 + views + sums for _, views, gradients, sums in calls if gradients))


def _measured(
    case: Mapping[str, Any], document: Mapping[str, Any], execution: Execution
) -> tuple[list[Step], dict[Work, float]]:
    """Steps of a case as calls timed alone, and their seconds; 0 of what did not run."""
    cpu = document["figures"] is not None
    steps, given = [], dict[Work, float]()
    for place, part, view in case["calls"]:
        target, *_, mode, device_s, _, recorded_s, _ = case["alone"][place]
        work = Segment(f"{mode} {place} {target}")
        # What could not be recorded was timed in a queue.
        in_turn = (device_s, recorded_s) if execution == "eager" else (recorded_s, device_s)
        known = next((seconds for seconds in in_turn if seconds is not None), 0.0)
        given[work] = 0.0 if view and not cpu else known
        steps.append(Step(target, target, part, work))
    return steps, given


def _single_launches(
    case: Mapping[str, Any], document: Mapping[str, Any], host: HostPrices, issue: Issue,
    steps: Sequence[Step], given: Mapping[Work, float],
) -> list[float]:  # fmt: skip
    """Seconds of the host before each call of an eager pass; on a CPU with what calls lose."""
    if document["figures"] is None:
        return host.launches(steps, issue, case["phase"])
    lost, line_s = _left_to_host(document)
    mode = "inference" if case["phase"] == "inference" else "forward"
    seconds = {
        "forward": line_s[mode] * issue.lines, "backward": lost["backward"] * _nodes(issue.calls),
    }  # fmt: skip
    count = Counter(step.part for step in steps)
    share = {"forward": lost[mode]}
    return [
        seconds.get(step.part, 0.0) / count[step.part]
        + share.get(step.part, 0.0) * given[step.work]
        for step in steps
    ]


def _work(text: str, count: int) -> Work:
    op, sizes, variant = json.loads(text)
    if op not in OPERATORS or len(sizes) != len(OPERATORS[op].dims):
        raise SpecError(
            "document: steps", got=text, expected="work in today's words",
            fix="lower the document again: python -m foreplan.cost_models.passes.end_to_end lower",
        )  # fmt: skip
    work = Program(op, tuple(sizes), Variant.parse(variant))
    return work if count == 1 else Segment("attention backward", ((work, count),))


def _steps(rows: Iterable[Any]) -> list[Step]:
    return [
        Step(kind, target, part, _work(*words), calls) for kind, target, part, words, calls in rows
    ]
