"""End-to-end check: real latency of networks against replays of their operators.

``measure`` runs small networks on this machine (needs torch, transformers, pydantic and networkx,
no TVM), each pass eager and on a GPU as a CUDA graph too, and writes what it saw; ``score`` replays
the operators, with the measured price of each and with predicted prices, and prints the errors:

    python -m foreplan.cost_models.passes.end_to_end measure --device cuda:0 --size large -o
    measured.json python -m foreplan.cost_models.passes.end_to_end score measured.json --zoo h200

With ``--executions graph`` alone passes are not run eagerly, and calls not timed in a queue unless
they cannot be recorded. A predicted price uses no measurement of the networks or of their
operators. What the host takes to issue a pass is priced by `HostPrices`, measured on single calls
and on networks that are none of the checked ones; the score is also given with a usual host's
(`gpu_host`) in their place. What an operator of a graph takes longer behind another one is measured
on small passes of those networks (`graph_switch`), beside chains of kernels (`graph_gaps`).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreplan.cost_models.execution import UNFUSED, Execution
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES, Phase
from foreplan.cost_models.passes.call_steps import call_steps
from foreplan.cost_models.passes.call_times import CallSeconds, Lost, LostDeviceError, time_calls
from foreplan.cost_models.passes.end_to_end_lowering import described, lowered_again
from foreplan.cost_models.passes.end_to_end_networks import (
    CALIBRATION,
    KNOWN,
    NETWORKS,
    SIZES,
    build,
    example,
    shapes_of,
)
from foreplan.cost_models.passes.end_to_end_passes import (
    Calibration,
    calibrations,
    captured,
    fitted_host,
    of_phases,
    passes,
    real_seconds,
    recorded_seconds,
)
from foreplan.cost_models.passes.host_prices import Issue, python_lines
from foreplan.datasets.storage import write_atomically
from foreplan.errors import ForeplanError, MissingDataError, SpecError

if TYPE_CHECKING:
    import torch

    from foreplan.cost_models.passes.call_operands import CallKey

SCHEMA = "foreplan.end_to_end/5"


def measure(
    device: str,
    *,
    size: str = "small",
    dtype: str = "fp32",
    networks: Iterable[str] = NETWORKS,
    phases: Iterable[Phase] = PHASES,
    executions: Iterable[Execution] = UNFUSED,
    seconds: float = 1.0,
    rounds: int = 3,
    calibration: Iterable[str] = CALIBRATION,
    before: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run networks and their operators on a torch device.

    Args:
        device: ``cpu`` or ``cuda:N``.
        size: of `SIZES`.
        dtype: of weights and activations.
        networks: of `NETWORKS`, or of `KNOWN` where the host has no part (graphs).
        phases: what to run.
        executions: ``graph`` takes part on GPUs alone, and times the calls of a pass from graphs.
        seconds: spent on each network and shape; an operator gets a twentieth.
        rounds: in which a network's passes take turns.
        calibration: networks that prices of the host are fitted to.
        before: document of a run that was stopped: its prices stay, its networks are left out.
        keep: gets the document before the first network and after each, so that a run that is
            stopped loses one.

    Returns:
        A document for `score`.

    Raises:
        SpecError: graphs alone, on a processor.
        MissingDataError: a pass that was recorded, or a call, failed in a way that leaves torch
            unusable; what was measured has been kept, and can go on in a new process, which does
            not run that call in that way again.
    """
    import torch

    from foreplan.cost_models.passes.call_timer import DTYPES

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    phases, executions = list(phases), list(executions)
    if executions == ["graph"] and not device.startswith("cuda"):
        raise SpecError(
            "--executions", got=f"graph on {device}", expected="a GPU: CPUs have no CUDA graphs"
        )
    gpu = device.startswith("cuda")
    runs: list[Execution] = [
        way for way in UNFUSED if way in executions and (gpu or way == "eager")
    ]
    document = _begun(device, size, dtype, list(calibration), seconds, runs, before)
    if keep is not None:
        keep(document)
    done = {case["network"] for case in document["cases"]}
    for name in networks:
        if name in done:
            continue
        with torch.device(device):
            module = build(name, size)
        modules = of_phases(module.to(device=device, dtype=DTYPES[dtype]))
        try:
            document["cases"] += _network(name, modules, document, phases, seconds, rounds)
        except LostDeviceError as error:
            document["lost"].append([*error.call, error.execution, str(error)])
            if keep is not None:
                keep(document)
            raise MissingDataError(
                f"{name}: torch is unusable after {error.call[0].target} ({error})",
                fix="measure again with --resume",
            ) from error
        del module, modules
        if keep is not None:
            keep(document)
        if "graph" in runs:
            _check_sound(device)
    return document


def _begun(
    device: str, size: str, dtype: str, calibration: list[str], seconds: float,
    executions: list[Execution], before: Mapping[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """The document without cases, or the one that is to be gone on with."""
    import torch
    import transformers

    from foreplan.cost_models.passes.call_timer import DTYPES

    if before is not None:
        asked: dict[str, Any] = {
            "device": device, "size": size, "dtype": dtype, "executions": executions,
            "training_mode": True,
        }  # fmt: skip
        for key, wanted in asked.items():
            if before.get(key) != wanted:
                raise SpecError(f"--resume: {key}", got=before.get(key), expected=wanted)
        return {**before, "cases": list(before["cases"]), "lost": list(before["lost"])}
    gpu, gaps, host, seen = device.startswith("cuda"), None, None, list[Calibration]()
    if "eager" in executions:
        alone = None if gpu else size
        seen += calibrations(device, DTYPES[dtype], calibration, alone=alone, seconds=seconds / 2)
        host = fitted_host(device, DTYPES[dtype], seen).document()
    if "graph" in executions:
        from foreplan.cost_models.passes.graph_gaps import measured_gaps
        from foreplan.cost_models.passes.graph_switch import switch_rows

        gaps = measured_gaps(device, DTYPES[dtype])
        rows = switch_rows(device, DTYPES[dtype], calibration)
        gaps["passes"] = [list(row) for row in rows]
    return {
        "schema": SCHEMA, "device": device, "size": size, "dtype": dtype,
        "board": torch.cuda.get_device_name(device) if gpu else "cpu",
        "threads": torch.get_num_threads(), "executions": executions,
        "training_mode": True,  # of steps; documents without it have them in evaluation mode
        "host": host,
        "gaps": gaps,
        "calibration": [
            [part.name, part.issue.lines, part.whole, part.device, part.host,
             [list(call) for call in part.issue.calls]]
            for part in seen
        ],
        "software": {"torch": torch.__version__, "transformers": transformers.__version__},
        "figures": None if gpu else _cpu_figures(torch.get_num_threads()),
        "lost": [],
        "cases": [],
    }  # fmt: skip


def _network(
    name: str, modules: Mapping[Phase, torch.nn.Module], document: Mapping[str, Any],
    phases: list[Phase], seconds: float, rounds: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Cases of one network."""
    from foreplan.cost_models.passes.call_timer import DTYPES

    size, device, dtype = document["size"], document["device"], DTYPES[document["dtype"]]
    executions = document["executions"]
    eager = "eager" in executions
    shapes = [list(parameter.shape) for parameter in modules["training"].parameters()]
    made, asked = [], []
    for shape in shapes_of(name, size):
        inputs = example(name, size, shape, device, dtype)
        plain, _ = graphs = captured(modules["inference"], inputs, name)
        infer = passes(modules["inference"], inputs, "inference")
        lines = python_lines(infer[0]) if eager else 0
        issue = Issue.of(lower(plain), tensors=len(plain.parameters), lines=lines)
        for phase in phases:
            graph, observed = graphs
            if phase == "training":
                graph, observed = captured(modules[phase], inputs, name, training=True)
            single = call_steps(graph.calls, phase, shapes, code=device == "cpu")
            made.append((shape, observed, lower(graph, phase), issue, single))
            asked.append((inputs, phase))
    runs = [passes(modules[phase], inputs, phase) for inputs, phase in asked if eager]
    found = [real_seconds(runs, device, seconds / rounds) for _ in range(rounds if eager else 0)]
    del runs
    known: dict[tuple[CallKey, str], CallSeconds | None] = {}
    cases: list[dict[str, Any]] = []
    for index, (shape, observed, steps, issue, single) in enumerate(made):
        missing = [step for step in single if (step.key, step.mode) not in known]
        known |= time_calls(missing, device, seconds / 40, executions, _lost(document))
        phase = asked[index][1]
        print(f"{name} {shape} {phase}: {len(missing)} calls", file=sys.stderr)
        real = dict.fromkeys(("real_s", "real_low_s", "real_high_s", "rounds_s"))
        if eager:
            low, median, high = (
                float(np.median([part[index][q] for part in found])) for q in range(3)
            )
            real = {
                "real_s": median,
                "real_low_s": low,
                "real_high_s": high,
                "rounds_s": [part[index][1] for part in found],
            }
            print(f"{name} {shape} {phase}: {1e3 * median:.3f} ms", file=sys.stderr)
        places: dict[tuple[CallKey, str], int] = {}
        rows = [[places.setdefault((s.key, s.mode), len(places)), s.part, s.view] for s in single]
        cases.append({
            "network": name, "shape": list(shape), "phase": phase, "observed": observed,
            **real, "graph": None,
            "steps": described(steps),
            "issue": [[list(call) for call in issue.calls], issue.lines, issue.tensors],
            "alone": [[*at[0], at[1], *(known[at] or CallSeconds(None, None))] for at in places],
            "calls": rows,
        })  # fmt: skip
    if "graph" in executions:
        gc.collect()
        for case, times in zip(
            cases, recorded_seconds(modules, asked, device, seconds, rounds), strict=True
        ):
            case["graph"] = times
            if "real_s" in times:
                shown = f"{name} {case['shape']} {case['phase']} as a graph"
                print(f"{shown}: {1e3 * times['real_s']:.3f} ms", file=sys.stderr)
    return cases


def _lost(document: Mapping[str, Any]) -> Lost:
    """Calls that left the device unusable, the way, and why."""
    from foreplan.cost_models.passes.call_operands import CallKey

    found: dict[tuple[CallKey, str], dict[Execution, str]] = {}
    for (target, arguments, *parts), mode, execution, why in document["lost"]:
        gradients, parameters, ages = map(tuple, parts[:3])
        key = CallKey(target, arguments, gradients, parameters, ages, *parts[3:])
        found.setdefault((key, mode), {})[execution] = why
    return found


def _check_sound(device: str) -> None:
    """Refuse to go on where a recording that failed has left torch's own state behind."""
    import torch

    gc.collect()
    try:
        torch.cuda.empty_cache()
        torch.rand(1, device=device).add_(1.0)
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise MissingDataError(
            f"the other networks: torch is unusable after a recording that failed "
            f"({str(error).splitlines()[0]})",
            fix="measure again with --resume",
        ) from error


def _cpu_figures(threads: int) -> dict[str, Any]:
    """Measured peak rates, bandwidth and launch overhead of this processor."""
    import tempfile

    from foreplan.datasets.device_name import DeviceName
    from foreplan.datasets.timing.profiling import measure_profile

    with tempfile.TemporaryDirectory() as folder:
        name = DeviceName.parse(f"cpu:threads={threads}")
        profile = measure_profile(name, [], Path(folder) / "cpu.json")
    found: dict[str, Any] = profile.device.model_dump(mode="json", exclude_none=True)
    return found


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
    taking.add_argument("--networks", nargs="+", choices=KNOWN, default=list(NETWORKS))
    taking.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    taking.add_argument(
        "--executions", nargs="+", choices=UNFUSED, default=list(UNFUSED),
        help="graph: passes as CUDA graphs too, on a GPU",
    )  # fmt: skip
    taking.add_argument("--seconds", type=float, default=1.0)
    taking.add_argument("--rounds", type=int, default=3)
    taking.add_argument("-o", "--output", type=Path, required=True)
    taking.add_argument(
        "--resume", action="store_true", help="go on with what a stopped run left in the output"
    )
    lowering = commands.add_parser("lower", help="networks of a document by today's lowering")
    lowering.add_argument("measured", type=Path)
    lowering.add_argument("-o", "--output", type=Path, required=True)
    scoring = commands.add_parser("score")
    scoring.add_argument("measured", type=Path)
    scoring.add_argument("--zoo", help="zoo name of the device; a processor brings its figures")
    scoring.add_argument("--weights", default="pretrained:ops")
    scoring.add_argument("--json", action="store_true", help="one JSON document, no tables")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.command == "measure":
        _check_device(options.device)
        resumed = options.resume and options.output.exists()
        document = measure(
            options.device, size=options.size, dtype=options.dtype, networks=options.networks,
            phases=options.phases, executions=options.executions, seconds=options.seconds,
            rounds=options.rounds,
            before=_read(options.output) if resumed else None,
            keep=lambda part: write_atomically(options.output, json.dumps(part)),
        )  # fmt: skip
        write_atomically(options.output, json.dumps(document))
        return
    if options.command == "lower":
        again = lowered_again(_read(options.measured))
        write_atomically(options.output, json.dumps(again))
        return
    from foreplan.cost_models.passes.end_to_end_score import score, tables
    from foreplan.datasets import device_zoo
    from foreplan.datasets.device import Device
    from foreplan.datasets.specs import validate

    document = _read(options.measured)
    figures = document["figures"]
    own = validate(Device, figures, str(options.measured)) if figures else None
    device = own or device_zoo.device(options.zoo or document["board"], "--zoo")
    scored = score(document, device, weights=options.weights)
    print(json.dumps(scored, indent=1) if options.json else tables(scored))


def _read(path: Path) -> dict[str, Any]:
    """A document of `measure`."""
    from foreplan.datasets.specs import load_document

    document: dict[str, Any] = load_document(path)
    if document.get("schema") != SCHEMA:
        raise SpecError(f"{path}: schema", got=document.get("schema"), expected=SCHEMA)
    return document


if __name__ == "__main__":
    try:
        main()
    except ForeplanError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
