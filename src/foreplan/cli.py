"""The command line: each command reads its arguments and calls the API; nothing is decided here.

With ``--json`` a command prints one JSON document on stdout and nothing else. Progress and tables
go to stderr. Exit codes: 0 done, 1 internal error, 2 bad input, 3 infeasible, 4 missing data, 5
verification outside tolerance, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from foreplan.errors import ForeplanError, SpecError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="foreplan",
    help="Predict how long tensor programs take on each device of a cluster, and plan with it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cluster_app = typer.Typer(help="Work with cluster descriptions.", no_args_is_help=True)
simulate_app = typer.Typer(help="Simulate schedules with given times.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")
app.add_typer(simulate_app, name="simulate")
dataset_app = typer.Typer(help="Measured operators and programs.", no_args_is_help=True)
app.add_typer(dataset_app, name="dataset")

INTERRUPTED = 130
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]
OutputFolder = Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")]


def main() -> NoReturn:
    """Run the command line; expected errors become one line and an exit code."""
    try:
        code = app(standalone_mode=False)
    except ForeplanError as error:
        _fail(str(error), error.exit_code, type(error).__name__)
    except typer.Exit as stop:
        code = stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        # Click's own errors of usage; everything else is a bug and keeps its traceback.
        code, text = getattr(error, "exit_code", None), getattr(error, "format_message", None)
        if code is None or text is None:
            raise
        _fail(text(), code, type(error).__name__)
    if code == INTERRUPTED:  # typer's own word for Ctrl-C
        _fail("interrupted; what was finished is kept", INTERRUPTED, "KeyboardInterrupt")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, kind: str) -> NoReturn:
    if "--json" in sys.argv:
        print(json.dumps({"error": {"type": kind, "message": message, "exit_code": code}}))
    print(f"foreplan: error: {message}", file=sys.stderr)
    sys.exit(code)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _print_json(document: Any) -> None:
    print(json.dumps(document, allow_nan=False))


def _version(wanted: bool) -> None:
    if wanted:
        import foreplan

        print(f"foreplan {foreplan.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Predict how long tensor programs take on each device of a mixed cluster, and plan with it."""


@app.command()
def devices(
    name: Annotated[str | None, typer.Argument(help="One device, with sources.")] = None,
    as_json: Json = False,
) -> None:
    """List the device zoo: published figures, and where each comes from."""
    from foreplan.datasets import device_zoo

    chosen = [device_zoo.device(n) for n in ([name] if name else device_zoo.names())]
    if as_json:
        _print_json([d.model_dump(mode="json", exclude_none=True) for d in chosen])
        return
    from foreplan.planner.report.tables import device_table, devices_table

    _console().print(device_table(chosen[0]) if name else devices_table(chosen))


@simulate_app.command("pipeline")
def simulate_pipeline(
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved-1f1b, zb-h1 or zb-h2.")],
    stages: Annotated[int, typer.Option(help="Pipeline stages.")],
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")],
    forward_ms: Annotated[float, typer.Option(help="Forward pass, per chunk.")],
    backward_input_ms: Annotated[float, typer.Option(help="Backward pass for the input.")],
    backward_weight_ms: Annotated[float, typer.Option(help="Backward pass for the weights.")],
    transfer_ms: Annotated[float, typer.Option(help="Sending an activation on.")] = 0.0,
    chunks: Annotated[int, typer.Option(help="Model chunks of a stage (interleaved).")] = 1,
    trace: Annotated[Path | None, typer.Option(help="Chrome trace to write.")] = None,
    as_json: Json = False,
) -> None:
    """Bubble rate, iteration time and peak activations of a pipeline schedule."""
    from foreplan.cost_models.pipeline_step import simulate_pipeline as run

    result = run(
        schedule, stages=stages, microbatches=microbatches, chunks=chunks,
        forward_s=forward_ms / 1e3, backward_input_s=backward_input_ms / 1e3,
        backward_weight_s=backward_weight_ms / 1e3, transfer_s=transfer_ms / 1e3,
    )  # fmt: skip
    if trace is not None:
        from foreplan.cost_models.timeline import chrome_trace
        from foreplan.datasets.storage import write_atomically

        write_atomically(trace, chrome_trace([(schedule, result.timeline)]))
    if as_json:
        _print_json(result.document())
        return
    from foreplan.planner.report.tables import pipeline_table

    _console().print(pipeline_table(result.document()))


@app.command()
def profile(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DEVICE]...", help="cpu:threads=1,isa=avx2 or cuda:0/sms=32 ..."),
    ] = None,
    output: OutputFolder = Path("profiles"),
    model: Annotated[
        list[str] | None, typer.Option(help="Also measure this model's exact shapes.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option("-w", "--workload", help="Workload of these shapes.")
    ] = None,
    purpose: Annotated[
        str, typer.Option("--for", help="Plans to measure for: serving, precision or bubbles.")
    ] = "serving",
    memory: Annotated[
        list[str] | None, typer.Option(help="DEVICE=SIZE: cap to write into the cluster.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer shapes and repetitions.")] = False,
    host: Annotated[str, typer.Option(help="Name of this host in the cluster.")] = "localhost",
    serve: Annotated[
        str | None, typer.Option(help="HOST:PORT: wait there for another host's --link.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="HOST:PORT of a host that runs profile --serve.")
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="With --serve and --link: the other host's name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: one file a device and cluster.yaml. Killed, it resumes where it was."""
    from foreplan.planner.profile_command import profile_host, profile_link

    if serve is not None or link is not None:
        if peer is None:
            raise SpecError("--peer", got=None, expected="the other host's name in the cluster")
        result = profile_link(
            output, host=host, peer=peer, serve=serve, link=link, console=_console()
        )
    else:
        result = profile_host(
            names or [], output, models=model or [], workload=workload, purpose=purpose,
            memory=memory or [], quick=quick, host=host, console=_console(),
        )  # fmt: skip
    if as_json:
        _print_json(result)


@cluster_app.command("merge")
def cluster_merge(
    files: Annotated[list[Path], typer.Argument(metavar="A.yaml B.yaml ...")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Join the clusters of several hosts, and the links measured between them, into one."""
    from foreplan.planner.merge_command import merge_files

    merged = merge_files(files, output)
    if as_json:
        _print_json(merged.model_dump(mode="json", exclude_defaults=True))
    else:
        _console().print(f"{output}: {len(merged.ranks())} devices of {len(merged.hosts())} hosts")


@app.command("plan")
def plan_command(
    kind: Annotated[str, typer.Argument(help="What to plan: serving, or an installed planner.")],
    output: Output = Path("plan.json"),
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Hugging Face folder or zoo name.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("-c", "--cluster", help="Cluster file (YAML or JSON).")
    ] = None,
    devices: Annotated[
        str | None, typer.Option("-d", "--devices", help='Inline cluster: "2xa100-80g,4xt4".')
    ] = None,
    workload: Annotated[
        str | None, typer.Option("-w", "--workload", help="File, or batch=8,prompt_tokens=64,...")
    ] = None,
    costs: Annotated[str, typer.Option(help="measured, predicted or roofline.")] = "measured",
    beside: Annotated[
        list[str] | None,
        typer.Option(help="Decide from these costs too, to be verified beside the plan."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    as_json: Json = False,
) -> None:
    """Decide, and write a plan that a launcher can read and `foreplan verify` can check."""
    from foreplan.planner.plan_command import plan_files

    if cluster is None or devices is not None:
        if cluster is not None or devices is None:
            both = "both" if cluster else "neither"
            raise SpecError("plan", got=both, expected="one of --cluster and --devices")
        source: str | Path = devices
    else:
        source = Path(cluster)
    made = plan_files(
        kind, model, source, workload, costs=costs, beside=beside or [], seed=seed, output=output
    )
    if as_json:
        print(made.to_json(), end="")
        return
    from foreplan.planner.report.tables import plan_tables

    _console().print(plan_tables(made))
    _console().print(f"wrote {output}")


@app.command()
def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json")],
    output: Output = Path("verification.json"),
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error of the total that passes.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Timed runs of each decision, interleaved.")] = 5,
    thorough: Annotated[
        bool, typer.Option(help="Also run random plans predicted within 10 % of the best.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Chrome trace of predicted and measured.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML report to write.")] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT where several hosts meet.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Which host of the cluster this one is.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would run; start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run a plan and its baselines for real, and compare with what was predicted."""
    from foreplan.planner.verify.command import verify_command

    code = verify_command(
        plan, output, tolerance=tolerance, rounds=rounds, thorough=thorough, trace=trace,
        report=report, rdzv_endpoint=rdzv_endpoint, host=host, dry_run=dry_run, as_json=as_json,
        console=_console(),
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def report(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json")],
    output: Output = Path("report.html"),
    verification: Annotated[
        Path | None, typer.Option(help="verification.json of a run of this plan.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Chrome trace to write as well.")] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about a plan and, if there is one, its real run."""
    from foreplan.planner.report.files import write_report

    written = write_report(plan, output, verification=verification, trace=trace)
    if as_json:
        _print_json({"written": [str(path) for path in written]})
    else:
        _console().print("wrote " + ", ".join(str(path) for path in written))


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json")],
    target: Annotated[
        str, typer.Option("--to", help="vllm, sglang, tensorrt-llm, llama.cpp or torchrun.")
    ],
    output: OutputFolder,
    as_json: Json = False,
) -> None:
    """Write a plan as a launcher's own files, or say what the launcher cannot express."""
    from foreplan.planner.export import export_plan
    from foreplan.planner.plan import load_plan

    written = export_plan(load_plan(plan), target, output)
    names = sorted(written.files)
    if as_json:
        _print_json(
            {
                "written": [str(output / name) for name in names],
                "not_expressed": list(written.not_expressed),
            }
        )
        return
    console = _console()
    console.print("wrote " + ", ".join(str(output / name) for name in names))
    for line in written.not_expressed:
        console.print(f"- {target} decides itself: {line}")


@app.command("evaluate")
def evaluate_command(
    model: Annotated[
        str,
        typer.Option(
            "-m", "--model", help="pretrained:ops or :programs, a trained folder, roofline."
        ),
    ],
    data: Annotated[Path, typer.Option(help="Measured operators or programs.")],
    format_name: Annotated[
        str, typer.Option("--format", help="foreplan, neusight, aiconfigurator, helix, tir-jsonl.")
    ] = "foreplan",
    device: Annotated[
        str | None, typer.Option(help="What every row ran on, where the file does not say.")
    ] = None,
    device_file: Annotated[
        list[Path] | None, typer.Option(help="Figures (YAML) of a device that the zoo lacks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Error of a model on measured latencies, by device and operator."""
    from foreplan.cost_models.commands import evaluate_file

    result = evaluate_file(model, data, format_name, device=device, device_files=device_file or [])
    if as_json:
        _print_json(result)
        return
    from foreplan.planner.report.operator_tables import error_table

    _console().print(error_table(result))


@app.command()
def train(
    data: Annotated[
        list[Path], typer.Option(help="Measured operators or programs; may be given again.")
    ],
    output: OutputFolder,
    format_name: Annotated[
        list[str] | None,
        typer.Option("--format", help="Format of each --data, or one of all; see evaluate."),
    ] = None,
    hold_out: Annotated[
        list[str] | None,
        typer.Option(help="Chip, device or family to leave out; may be given again."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="What every row ran on, where the file does not say.")
    ] = None,
    torch_device: Annotated[str, typer.Option(help="Where networks are trained.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Train the predictor of library operators or of programs; write its weights and card."""
    from foreplan.cost_models.commands import train_files

    card = train_files(
        data, format_name or ["foreplan"], output, hold_out=hold_out or [], seed=seed,
        device=device, torch_device=torch_device,
    )  # fmt: skip
    if as_json:
        _print_json(card)
    else:
        _console().print(f"wrote {output}")


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="Hugging Face folder or zoo name.")],
    device: Annotated[
        list[str] | None,
        typer.Option("-d", "--device", "--devices", help="Zoo names, with commas; or all."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="New tokens of each sequence.")] = 128,
    phase: Annotated[str, typer.Option(help="inference or training.")] = "inference",
    rank_by: Annotated[str, typer.Option(help="latency.")] = "latency",
    costs: Annotated[str, typer.Option(help="measured, predicted or roofline.")] = "predicted",
    weights: Annotated[str, typer.Option(help="As evaluate --model.")] = "pretrained:ops",
    profile: Annotated[
        Path | None, typer.Option(help="Profile of the device, for --costs measured.")
    ] = None,
    device_file: Annotated[
        list[Path] | None, typer.Option(help="Figures (YAML) of a device that the zoo lacks.")
    ] = None,
    launch_us: Annotated[
        float | None, typer.Option(help="Host time of one operator call, in microseconds.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Chrome trace to write, one device.")] = None,
    as_json: Json = False,
) -> None:
    """Latency of a model's pass on devices that need not be here, fastest first."""
    from foreplan.cost_models.predict_command import predict_model

    result = predict_model(
        model, device or [], batch=batch, sequence_length=sequence_length, phase=phase,
        costs=costs, weights=weights, profile=profile, device_files=device_file or [],
        launch_s=None if launch_us is None else launch_us / 1e6, rank_by=rank_by, trace=trace,
    )  # fmt: skip
    if as_json:
        _print_json(result)
        return
    from foreplan.planner.report.predict_tables import predict_tables

    _console().print(predict_tables(result))


@dataset_app.command("build")
def dataset_build(
    output: OutputFolder,
    network: Annotated[
        list[str] | None, typer.Option(help="Network of the workload zoo; all by default.")
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="Tasks that an earlier run wrote.")] = None,
    device: Annotated[
        list[str] | None, typer.Option("-d", "--device", help="cpu:threads=1,isa=... or cuda:0")
    ] = None,
    samples: Annotated[int, typer.Option(help="Programs of a task in a round.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds over all tasks.")] = 1,
    builders: Annotated[int, typer.Option(help="Processes that build.")] = 1,
    minutes: Annotated[float | None, typer.Option(help="Begin nothing later than this.")] = None,
    slow_s: Annotated[float, typer.Option(help="Run programs slower than this once.")] = 1.0,
    chip: Annotated[str | None, typer.Option(help="Name of the silicon.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of tasks.")] = 0,
    extract_only: Annotated[bool, typer.Option(help="Stop when the tasks are written.")] = False,
    as_json: Json = False,
) -> None:
    """Build and time scheduled programs of networks (TVM). Killed, it resumes where it was."""
    from foreplan.datasets.tir.build_dataset import build_dataset
    from foreplan.datasets.tir.measure import MeasureOptions

    result = build_dataset(
        output, networks=network or [], tasks=tasks, devices=device or ["cpu:threads=1"],
        options=MeasureOptions(
            samples=samples, rounds=rounds, builders=builders, minutes=minutes, slow_s=slow_s
        ),
        chip=chip, seed=seed, extract_only=extract_only, progress=_console().print,
    )  # fmt: skip
    if as_json:
        _print_json(result)
    else:
        _console().print(f"{output}: {result.get('rows', 0)} programs of {result['tasks']} tasks")


@dataset_app.command("import")
def dataset_import(
    data: Annotated[Path, typer.Argument(metavar="FILE")],
    output: Output,
    format_name: Annotated[str, typer.Option("--format", help="neusight, aiconfigurator, helix.")],
    device: Annotated[str | None, typer.Option(help="What every row ran on.")] = None,
    as_json: Json = False,
) -> None:
    """Turn public latency data into an operator table (Parquet)."""
    from foreplan.cost_models.commands import import_operators

    result = import_operators(data, format_name, output, device=device)
    if as_json:
        _print_json(result)
    else:
        _console().print(f"{output}: {result['rows']} rows")


@dataset_app.command("stats")
def dataset_stats(
    data: Annotated[Path, typer.Argument(metavar="FILE")],
    format_name: Annotated[str, typer.Option("--format", help="As evaluate.")] = "foreplan",
    as_json: Json = False,
) -> None:
    """Count rows by device and operator, and name devices that the zoo lacks."""
    from foreplan.cost_models.commands import operator_stats

    result = operator_stats(data, format_name)
    if as_json:
        _print_json(result)
        return
    from foreplan.planner.report.operator_tables import stats_table

    _console().print(stats_table(result))


if __name__ == "__main__":
    main()
