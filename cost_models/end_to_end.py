"""End-to-end check: real latency of networks against replays of their operators.

``measure`` runs small networks on this machine (needs torch, transformers, pydantic and networkx,
no TVM) and writes what it saw; ``score`` replays the operators, with the measured price of each and
with predicted prices, and prints the errors:

    python -m foreplan.cost_models.end_to_end measure --device cuda:0 --size large -o measured.json
    python -m foreplan.cost_models.end_to_end score measured.json --zoo h200

A predicted price uses no measurement of the networks or of their operators. One figure of the host
is measured, by a small GPT-NeoX that is none of the networks: what an ATen call costs the host in
eager execution, Python and autograd included (``launch_s``, in inference and by part of a training
step); the score is also given with the published launch overhead in its place.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.costs import Segment, Work
from foreplan.cost_models.end_to_end_networks import IMAGE, NETWORKS, SIZES, build, example
from foreplan.cost_models.end_to_end_passes import host_seconds, real_seconds
from foreplan.cost_models.graph_programs import (
    PHASES,
    Part,
    Phase,
    Step,
    lower,
    programs,
)
from foreplan.datasets.program import Program, Variant
from foreplan.datasets.storage import write_atomically
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from foreplan.datasets.device import Device

SCHEMA = "foreplan.end_to_end/1"


def measure(
    device: str,
    *,
    size: str = "small",
    dtype: str = "fp32",
    networks: Iterable[str] = NETWORKS,
    phases: Iterable[Phase] = PHASES,
    seconds: float = 1.0,
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
        keep: gets the document after every network, so that a run that is stopped loses one.

    Returns:
        A document for `score`.
    """
    import torch
    import transformers

    from foreplan.cost_models.program_timer import DTYPES, ProgramTimer
    from foreplan.datasets.capture import capture

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kind = SIZES[size]
    calls_s = host_seconds(device, DTYPES[dtype])
    cases: list[dict[str, Any]] = []
    document = {
        "schema": SCHEMA, "device": device, "size": size, "dtype": dtype,
        "board": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(), "launch_s": calls_s,
        "software": {"torch": torch.__version__, "transformers": transformers.__version__},
        "figures": None if device.startswith("cuda") else _cpu_figures(torch.get_num_threads()),
        "cases": cases,
    }  # fmt: skip
    for name in networks:
        module = build(name, size).to(device=device, dtype=DTYPES[dtype]).eval()
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        known: dict[Program, tuple[float, float]] = {}
        for shape in kind["image" if name in IMAGE else "text"]:
            inputs = example(name, size, shape, device, DTYPES[dtype])
            graph = capture(module, inputs, name=name, eager=True)
            for phase in phases:
                steps = lower(graph, phase)
                timer = ProgramTimer(device, weight_bytes=weights, seconds=seconds / 20)
                for program in programs(steps):
                    if program not in known:
                        known[program] = timer.time(program)
                real = real_seconds(module, inputs, phase, seconds)
                print(f"{name} {shape} {phase}: {1e3 * real[1]:.3f} ms", file=sys.stderr)
                cases.append({
                    "network": name, "shape": list(shape), "phase": phase,
                    "real_s": real[1], "real_low_s": real[0], "real_high_s": real[2],
                    "steps": [[s.kind, s.target, s.part, _words(s), s.calls] for s in steps],
                    "programs": {
                        _text(p): list(known[p]) for p in programs(steps)
                    },
                })  # fmt: skip
        del module
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
    from foreplan.cost_models.costs import CostBook
    from foreplan.cost_models.predictor import Predictor
    from foreplan.cost_models.replay import replay, replay_book, replay_steps

    host = document["launch_s"]
    cpu = device.kind == "cpu"
    predictor = None if cpu else Predictor.load(weights)
    rows = []
    for case in document["cases"]:
        steps = _steps(case["steps"])
        launch: Mapping[Part, float] = host[case["phase"]]
        given: dict[Work, float] = {_program(t): s[0] for t, s in case["programs"].items()}
        measured = CostBook((), given=given)
        book = replay_book(device, "predicted", predictor=predictor)
        found = {
            "measured": replay(steps, measured, device, launch_s=launch).latency_s,
            "sum": replay(steps, measured, device, launch_s=0.0).device_s,  # no host
            "predicted": replay_steps(steps, book, device, launch_s=launch).latency_s,
            "predicted_published_launch": replay_steps(steps, book, device).latency_s,
        }
        real = float(case["real_s"])
        rows.append({
            "network": case["network"], "shape": case["shape"], "phase": case["phase"],
            "real_s": real, "spread": (case["real_high_s"] - case["real_low_s"]) / real,
            "limit": replay(steps, measured, device, launch_s=launch).limit,
            "latency_s": found, "error": {key: value / real - 1 for key, value in found.items()},
        })  # fmt: skip
    keys = list(rows[0]["error"]) if rows else []
    return {
        **{key: document[key] for key in ("device", "board", "size", "dtype", "launch_s")},
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


def _text(program: Program) -> str:
    return json.dumps([program.op, list(program.sizes), str(program.variant)])


def _program(text: str) -> Program:
    op, sizes, variant = json.loads(text)
    return Program(op, tuple(sizes), Variant.parse(variant))


def _words(step: Step) -> list[Any]:
    if isinstance(step.work, Program):
        return [_text(step.work), 1]
    ((part, count),) = step.work.parts  # type: ignore[union-attr]
    assert isinstance(part, Program)
    return [_text(part), count]


def _steps(rows: Iterable[Any]) -> list[Step]:
    steps = []
    for kind, target, part, (text, count), calls in rows:
        work: Work = _program(text)
        if count > 1:
            work = Segment("attention backward", ((work, count),))
        steps.append(Step(kind, target, part, work, calls))
    return steps


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
    taking.add_argument("-o", "--output", type=Path, required=True)
    scoring = commands.add_parser("score")
    scoring.add_argument("measured", type=Path)
    scoring.add_argument("--zoo", help="zoo name of the device; a processor brings its figures")
    scoring.add_argument("--weights", default="pretrained:ops")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.command == "measure":
        document = measure(
            options.device, size=options.size, dtype=options.dtype, networks=options.networks,
            phases=options.phases, seconds=options.seconds,
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
    main()
