"""End-to-end check: real latency of networks against replays of their operators.

``measure`` runs small networks on this machine (needs torch, transformers, pydantic and networkx,
no TVM) and writes what it saw; ``score`` replays the operators, with the measured price of each and
with predicted prices, and prints the errors:

    python -m foreplan.cost_models.end_to_end measure --device cuda:0 --size large -o measured.json
    python -m foreplan.cost_models.end_to_end score measured.json --zoo h200

A predicted price uses no measurement of the networks or of their operators. What the host takes to
issue a pass is priced by `HostPrices`, measured on single calls and on networks that are none of
the checked ones; the score is also given with the published launch overhead in its place.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.call_steps import call_steps
from foreplan.cost_models.costs import Segment, Work
from foreplan.cost_models.end_to_end_networks import (
    CALIBRATION,
    IMAGE,
    NETWORKS,
    SIZES,
    build,
    example,
)
from foreplan.cost_models.end_to_end_passes import (
    calibrations,
    fitted_host,
    passes,
    real_seconds,
    single_seconds,
    time_calls,
)
from foreplan.cost_models.graph_programs import PHASES, Phase, Step, lower
from foreplan.cost_models.host_call import HostCall
from foreplan.cost_models.host_prices import MODES, HostPrices, Issue, fit_host, python_lines
from foreplan.datasets.program import Program, Variant
from foreplan.datasets.storage import write_atomically
from foreplan.errors import ForeplanError, SpecError

if TYPE_CHECKING:
    from foreplan.cost_models.call_timer import CallKey
    from foreplan.datasets.device import Device

SCHEMA = "foreplan.end_to_end/3"


def measure(
    device: str,
    *,
    size: str = "small",
    dtype: str = "fp32",
    networks: Iterable[str] = NETWORKS,
    phases: Iterable[Phase] = PHASES,
    seconds: float = 1.0,
    rounds: int = 3,
    calibration: Iterable[str] = CALIBRATION,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run networks and their operators on a torch device.

    Args:
        device: ``cpu`` or ``cuda:N``.
        size: of `SIZES`.
        dtype: of weights and activations.
        networks: of `NETWORKS`.
        phases: what to run.
        seconds: spent on each network and shape; an operator gets a twentieth.
        rounds: in which a network's passes take turns.
        calibration: networks that prices of the host are fitted to.
        keep: gets the document after every network, so that a run that is stopped loses one.

    Returns:
        A document for `score`.
    """
    import torch
    import transformers

    from foreplan.cost_models.call_timer import DTYPES
    from foreplan.datasets.capture import capture

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kind, gpu = SIZES[size], device.startswith("cuda")
    cases: list[dict[str, Any]] = []
    seen = list(calibrations(device, DTYPES[dtype], calibration, alone=True, seconds=seconds / 2))
    document = {
        "schema": SCHEMA, "device": device, "size": size, "dtype": dtype,
        "board": torch.cuda.get_device_name(device) if gpu else "cpu",
        "threads": torch.get_num_threads(),
        "host": fitted_host(device, DTYPES[dtype], seen).document(),
        "calibration": [
            [part.name, part.issue.lines, part.whole, part.device, part.host,
             [list(call) for call in part.issue.calls]]
            for part in seen
        ],
        "software": {"torch": torch.__version__, "transformers": transformers.__version__},
        "figures": None if gpu else _cpu_figures(torch.get_num_threads()),
        "cases": cases,
    }  # fmt: skip
    for name in networks:
        with torch.device(device):
            module = build(name, size)
        module = module.to(device=device, dtype=DTYPES[dtype]).eval()
        shapes = [list(parameter.shape) for parameter in module.parameters()]
        made, runs = [], []
        for shape in kind["image" if name in IMAGE else "text"]:
            inputs = example(name, size, shape, device, DTYPES[dtype])
            graph = capture(module, inputs, name=name, eager=True, observe=True)
            infer = passes(module, inputs, "inference")
            issue = Issue.of(
                lower(graph), tensors=len(graph.parameters), lines=python_lines(infer[0])
            )
            for phase in phases:
                single = call_steps(graph.calls, phase, shapes)
                made.append((shape, phase, lower(graph, phase), issue, single))
                runs.append(passes(module, inputs, phase))
        found = [real_seconds(runs, device, seconds / rounds) for _ in range(rounds)]
        rested = single_seconds(runs, device) if gpu else [None] * len(runs)
        del module, runs
        known: dict[tuple[CallKey, str], tuple[float, float] | None] = {}
        for index, (shape, phase, steps, issue, single) in enumerate(made):
            missing = [step for step in single if (step.key, step.mode) not in known]
            known |= time_calls(missing, device, seconds / 40)
            low, median, high = (
                float(np.median([part[index][q] for part in found])) for q in range(3)
            )
            print(f"{name} {shape} {phase}: {1e3 * median:.3f} ms", file=sys.stderr)
            places: dict[tuple[CallKey, str], int] = {}
            rows = [
                [places.setdefault((s.key, s.mode), len(places)), s.part, s.view] for s in single
            ]
            cases.append({
                "network": name, "shape": list(shape), "phase": phase,
                "real_s": median, "real_low_s": low, "real_high_s": high,
                "rounds_s": [part[index][1] for part in found], "single_s": rested[index],
                "steps": [[s.kind, s.target, s.part, _words(s.work), s.calls] for s in steps],
                "issue": [[list(call) for call in issue.calls], issue.lines, issue.tensors],
                "alone": [[*at[0], at[1], *(known[at] or (None, None))] for at in places],
                "calls": rows,
            })  # fmt: skip
            if keep is not None:
                keep(document)
    return document


def score(document: Mapping[str, Any], device: Device, *, weights: str = "pretrained:ops") -> Any:
    """Replay what `measure` saw.

    Args:
        document: from `measure`.
        device: figures for the predicted prices.
        weights: of the predictor.

    Returns:
        ``cases`` with the real latency and, for each way to replay, the latency and its error;
        ``mape`` by way. Ways: ``measured`` (operators timed one by one, host measured),
        ``sum`` (the same operators, added up), ``predicted`` (host measured) and
        ``predicted_published_launch``.
    """
    from foreplan.cost_models.predictor import Predictor
    from foreplan.cost_models.replay import replay, replay_book, replay_steps

    host = HostPrices.load(document["host"])
    cpu = device.kind == "cpu"
    predictor = None if cpu else Predictor.load(weights)
    rows = []
    for case in document["cases"]:
        steps = _steps(case["steps"])
        calls, lines, tensors = case["issue"]
        issue = Issue([HostCall(*call) for call in calls], lines, tensors)
        launch = host.launches(steps, issue, case["phase"])
        single, given, single_launch = _measured(case, document, host, issue)
        measured = replay_book(device, "roofline", given=given)
        book = replay_book(device, "predicted", predictor=predictor)
        found = {
            "measured": replay(single, measured, device, launch_s=single_launch).latency_s,
            "sum": replay(single, measured, device, launch_s=0.0).device_s,  # no host
            "predicted": replay_steps(steps, book, device, launch_s=launch).latency_s,
            "predicted_published_launch": replay_steps(steps, book, device).latency_s,
        }
        real = float(case["real_s"])
        rows.append({
            "network": case["network"], "shape": case["shape"], "phase": case["phase"],
            "real_s": real, "spread": (case["real_high_s"] - case["real_low_s"]) / real,
            "rounds": (max(case["rounds_s"]) - min(case["rounds_s"])) / real,
            "limit": replay(single, measured, device, launch_s=single_launch).limit,
            "latency_s": found, "error": {key: value / real - 1 for key, value in found.items()},
        })  # fmt: skip
    keys = list(rows[0]["error"]) if rows else []
    return {
        **{key: document[key] for key in ("device", "board", "size", "dtype")},
        "mape": {
            phase: {
                key: float(np.mean([abs(r["error"][key]) for r in rows if r["phase"] == phase]))
                for key in keys
            }
            for phase in sorted({r["phase"] for r in rows})
        },
        "cases": rows,
    }  # fmt: skip


def _cpu_figures(threads: int) -> dict[str, Any]:
    """Measured peak rates, bandwidth and launch overhead of this processor."""
    import tempfile

    from foreplan.datasets.device_name import DeviceName
    from foreplan.datasets.profiling import measure_profile

    with tempfile.TemporaryDirectory() as folder:
        name = DeviceName.parse(f"cpu:threads={threads}")
        profile = measure_profile(name, [], Path(folder) / "cpu.json")
    found: dict[str, Any] = profile.device.model_dump(mode="json", exclude_none=True)
    return found


def _left_to_host(document: Mapping[str, Any]) -> tuple[Mapping[str, float], float]:
    """Seconds of a line of Python by mode, and of a node of autograd, on a CPU.

    Calls' times hold what issuing them takes, so that this is left.
    """
    networks = [
        ({"inference": 0.0, "forward": 0.0, "backward": _nodes(calls)}, lines,
         {mode: whole[mode] - alone[mode] for mode in MODES}, whole)
        for _, lines, whole, alone, _, calls in document["calibration"]
    ]  # fmt: skip
    factor, line_s = fit_host(networks)
    return line_s, factor["backward"]


def _nodes(calls: Iterable[Sequence[Any]]) -> float:
    """Nodes that autograd goes through for a pass: calls, views and sums with gradients."""
    return float(sum(1 + views + sums for _, views, gradients, sums in calls if gradients))


def _measured(
    case: Mapping[str, Any], document: Mapping[str, Any], host: HostPrices, issue: Issue
) -> tuple[list[Step], dict[Work, float], list[float]]:
    """Steps of a case as calls timed alone, their seconds, and those of the host before each."""
    cpu = document["figures"] is not None
    steps, given = [], dict[Work, float]()
    for place, part, view in case["calls"]:
        target, *_, mode, device_s, _ = case["alone"][place]
        work = Segment(f"{mode} {place} {target}")
        given[work] = 0.0 if device_s is None or (view and not cpu) else device_s
        steps.append(Step(target, target, part, work))
    if not cpu:
        return steps, given, host.launches(steps, issue, case["phase"])
    line_s, node_s = _left_to_host(document)
    mode = "inference" if case["phase"] == "inference" else "forward"
    seconds = {"forward": line_s[mode] * issue.lines, "backward": node_s * _nodes(issue.calls)}
    count = Counter(step.part for step in steps)
    return steps, given, [seconds.get(step.part, 0.0) / count[step.part] for step in steps]


def _words(work: Work) -> list[Any]:
    """A step's work as text, and how often it runs: once but for an attention's gradients."""
    ((part, count),) = work.parts if isinstance(work, Segment) else ((work, 1),)
    assert isinstance(part, Program)
    return [json.dumps([part.op, list(part.sizes), str(part.variant)]), count]


def _work(text: str, count: int) -> Work:
    op, sizes, variant = json.loads(text)
    work = Program(op, tuple(sizes), Variant.parse(variant))
    return work if count == 1 else Segment("attention backward", ((work, count),))


def _steps(rows: Iterable[Any]) -> list[Step]:
    return [
        Step(kind, target, part, _work(*words), calls) for kind, target, part, words, calls in rows
    ]


def _check_device(word: str) -> None:
    """Refuse what is no processor or GPU of this machine."""
    import torch

    here = ["cpu", *(f"cuda:{k}" for k in range(torch.cuda.device_count()))]
    if word not in here and (word != "cuda" or len(here) == 1):
        raise SpecError("--device", got=word, expected=f"one of {', '.join(here)}")


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure here, or score a document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("measure")
    taking.add_argument("--device", default="cpu")
    taking.add_argument("--size", choices=list(SIZES), default="small")
    taking.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    taking.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    taking.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    taking.add_argument("--seconds", type=float, default=1.0)
    taking.add_argument("--rounds", type=int, default=3)
    taking.add_argument("-o", "--output", type=Path, required=True)
    scoring = commands.add_parser("score")
    scoring.add_argument("measured", type=Path)
    scoring.add_argument("--zoo", help="zoo name of the device; a processor brings its figures")
    scoring.add_argument("--weights", default="pretrained:ops")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.command == "measure":
        _check_device(options.device)
        document = measure(
            options.device, size=options.size, dtype=options.dtype, networks=options.networks,
            phases=options.phases, seconds=options.seconds, rounds=options.rounds,
            keep=lambda part: write_atomically(options.output, json.dumps(part)),
        )  # fmt: skip
        write_atomically(options.output, json.dumps(document))
        return
    from foreplan.datasets import device_zoo
    from foreplan.datasets.device import Device
    from foreplan.datasets.specs import load_document, validate

    document = load_document(options.measured)
    if document.get("schema") != SCHEMA:
        raise SpecError(f"{options.measured}: schema", got=document.get("schema"), expected=SCHEMA)
    figures = document["figures"]
    own = validate(Device, figures, str(options.measured)) if figures else None
    device = own or device_zoo.device(options.zoo or document["board"], "--zoo")
    print(json.dumps(score(document, device, weights=options.weights), indent=1))


if __name__ == "__main__":
    try:
        main()
    except ForeplanError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
