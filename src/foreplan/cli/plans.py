"""Commands about plans: make, run for real, show, hand over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreplan.cli._app import Json, Output, OutputFolder, app, console, print_json, show
from foreplan.cli._words import costs as cost_choices
from foreplan.cli._words import devices as device_names
from foreplan.cli._words import kinds, listed, models, targets, words
from foreplan.errors import SpecError


@app.command("plan")
def plan_command(
    kind: Annotated[
        str,
        typer.Argument(
            help="serving, replicas, precision, bubbles, or an installed planner.",
            autocompletion=words(kinds),
        ),
    ],
    output: Output = Path("plan.json"),
    model: Annotated[
        str | None,
        typer.Option(
            "-m", "--model", help="Hugging Face folder or zoo name.", autocompletion=words(models)
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("-c", "--cluster", help="Cluster file (YAML or JSON).")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--devices",
            help='Inline cluster: "2xa100-80g,4xt4".',
            autocompletion=listed(device_names),
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            "-w", "--workload", help="File, or batch=8,prompt_tokens=64,...; --fields lists them."
        ),
    ] = None,
    fields: Annotated[
        bool, typer.Option("--fields", help="List what a workload of this kind may say; no plan.")
    ] = False,
    costs: Annotated[
        str,
        typer.Option(
            help="measured, predicted, roofline, predicted:FOLDER (own weights), or helix:FILE, a "
            "table of layers.",
            autocompletion=words(cost_choices),
        ),
    ] = "measured",
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="Decide from these costs too, to be verified beside the plan.",
            autocompletion=words(cost_choices),
        ),
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Decide again with each binding limit relaxed.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    as_json: Json = False,
) -> None:
    """Decide, and write a plan that a launcher can read and `foreplan verify` can check."""
    from foreplan.planner.registry import planner

    chosen = planner(kind)  # an unknown kind is said before what such a plan would lack
    if fields:
        from foreplan.planner.report.field_tables import fields_table, workload_fields

        workload_type = chosen.workload_type
        if as_json:
            print_json(workload_fields(workload_type))
        else:
            show(fields_table(kind, workload_type))
        return
    from foreplan.planner.plan_command import plan_files

    if cluster is None or devices is not None:
        if cluster is not None or devices is None:
            both = "both" if cluster else "neither"
            raise SpecError("plan", got=both, expected="one of --cluster and --devices")
        source: str | Path = devices
    else:
        source = Path(cluster)
    made = plan_files(
        kind, model, source, workload, costs=costs, beside=beside or [], relax=what_if, seed=seed,
        output=output, console=console(),
    )  # fmt: skip
    if as_json:
        from foreplan.planner.plan_paths import folder_of

        print(made.to_json(folder_of(output)), end="")
        return
    from foreplan.planner.report.tables import plan_tables

    show(plan_tables(made))
    console().print(f"wrote {output}")


@app.command()
def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json")],
    output: Output = Path("verification.json"),
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest relative error of the total that passes; the plan's own if left out."
        ),
    ] = None,
    traffic: Annotated[
        Path | None,
        typer.Option(
            help="Serve these requests (YAML, JSON, CSV) as they come, instead of full batches."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests of --traffic a second, instead of the file's.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Timed runs of each decision, interleaved (5); of the requests of --traffic (3)."
        ),
    ] = None,
    thorough: Annotated[
        bool, typer.Option(help="Also run random plans predicted within 10 % of the best.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run this alternative alone; repeatable, chosen for none."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Chrome trace of predicted and measured.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML report to write.")] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT where several hosts meet.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Which host of the cluster this one is.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would run; start nothing.")] = False,
    trust_paths: Annotated[
        bool,
        typer.Option("--trust-paths", help="Follow the plan's paths out of its own folder."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a plan and its baselines for real, and compare with what was predicted."""
    if traffic is not None:
        unused = {
            "--thorough": thorough, "--only": only, "--report": report,
            "--rdzv-endpoint": rdzv_endpoint, "--host": host, "--dry-run": dry_run,
        }  # fmt: skip
        for name, value in unused.items():
            if value:
                raise SpecError(name, got=value, expected="nothing beside --traffic")
        from foreplan.planner.traffic_command import verify_traffic

        code = verify_traffic(
            plan, traffic, output, rate_per_s=rate, tolerance=tolerance,
            rounds=3 if rounds is None else rounds, trace=trace, trust_paths=trust_paths,
            as_json=as_json, console=console(), show=show,
        )  # fmt: skip
        raise typer.Exit(code)
    if rate is not None:
        raise SpecError("--rate", got=rate, expected="nothing without --traffic")
    from foreplan.planner.verify.command import verify_command

    code = verify_command(
        plan, output, tolerance=tolerance, rounds=5 if rounds is None else rounds,
        thorough=thorough, only=only, trace=trace, report=report,
        rdzv_endpoint=rdzv_endpoint, host=host, dry_run=dry_run, trust_paths=trust_paths,
        as_json=as_json, console=console(), show=show,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def report(
    plan: Annotated[list[Path], typer.Argument(metavar="PLAN.json...")],
    output: Output = Path("report.html"),
    verification: Annotated[
        list[Path] | None, typer.Option(help="verification.json of a run; one for each plan.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Chrome trace to write as well.")] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about a plan and, if there is one, its real run.

    Several plans, each with its run, share a page and a table that compares sources of costs.
    """
    runs = verification or []
    if len(plan) > 1:
        _overview(plan, runs, output, trace, as_json)
        return
    from foreplan.planner.report.files import write_report

    if len(runs) > 1:
        raise SpecError("--verification", got=len(runs), expected="at most one for one plan")
    written = write_report(plan[0], output, verification=runs[0] if runs else None, trace=trace)
    if as_json:
        print_json({"written": [str(path) for path in written]})
    else:
        console().print("wrote " + ", ".join(str(path) for path in written))


def _overview(
    plans: list[Path], runs: list[Path], output: Path, trace: Path | None, as_json: bool
) -> None:
    from foreplan.datasets.storage import refuse_overwriting
    from foreplan.planner.report.overview import load_results, overview_table, write_overview

    if trace is not None:
        raise SpecError("--trace", got=str(trace), expected="one plan")
    refuse_overwriting(output, *plans, *runs)
    results = load_results(plans, runs)
    write_overview(results, output)
    if as_json:
        found = [result.document() for result in results]
        print_json({"written": [str(output)], "plans": found})
    else:
        show(overview_table(results))
        console().print(f"wrote {output}")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Plan, verification, profile.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another one of its sort.")],
    as_json: Json = False,
) -> None:
    """What differs between two plans, two verifications or two profiles."""
    from foreplan.planner.compare import compare as run

    found = run(first, second)
    if as_json:
        print_json(found.document())
        return
    from foreplan.planner.report.compare_tables import compare_tables

    show(compare_tables(found))


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json")],
    target: Annotated[
        str,
        typer.Option(
            "--to",
            help="vllm, sglang, tensorrt-llm, llama.cpp, torchrun, torchtitan, megatron, autocast "
            "or torchao.",
            autocompletion=words(targets),
        ),
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
        print_json(
            {
                "written": [str(output / name) for name in names],
                "not_expressed": list(written.not_expressed),
            }
        )
        return
    screen = console()
    screen.print("wrote " + ", ".join(str(output / name) for name in names))
    for line in written.not_expressed:
        screen.print(f"- {target} decides itself: {line}")
