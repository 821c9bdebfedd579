"""Commands about measured operators and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreplan.cli._app import (
    Json,
    Output,
    OutputFolder,
    console,
    dataset_app,
    print_json,
    resumable,
    show,
)
from foreplan.cli._words import formats, networks, words


@dataset_app.command("build")
def dataset_build(
    output: OutputFolder,
    network: Annotated[
        list[str] | None,
        typer.Option(
            help="Network of the workload zoo; all by default.", autocompletion=words(networks)
        ),
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="Tasks that an earlier run wrote.")] = None,
    programs: Annotated[
        Path | None, typer.Option(help="Folder of measured programs, to be timed on this device.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("-d", "--device", help="cpu:threads=1,isa=... or cuda:0")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Programs of a task in a round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all tasks.")] = 1,
    builders: Annotated[int, typer.Option(min=1, help="Processes that build.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin nothing later than this.")
    ] = None,
    slow_s: Annotated[float, typer.Option(min=0, help="Run programs slower than this once.")] = 1.0,
    chip: Annotated[str | None, typer.Option(help="Name of the silicon.")] = None,
    ray: Annotated[
        str | None, typer.Option(help="Measure on a Ray cluster: HOST:PORT, auto or local.")
    ] = None,
    rpc: Annotated[
        str | None, typer.Option(help="Measure on boards of TVM's tracker: HOST:PORT/KEY.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="TVM's target of the boards, JSON.")] = None,
    compiler: Annotated[
        str | None, typer.Option(help="C++ compiler that links for the boards.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of tasks.")] = 0,
    extract_only: Annotated[bool, typer.Option(help="Stop when the tasks are written.")] = False,
    as_json: Json = False,
) -> None:
    """Build and time scheduled programs of networks (TVM). Killed, it resumes where it was."""
    from foreplan.datasets.tir.build_dataset import build_dataset
    from foreplan.datasets.tir.measure import MeasureOptions

    with resumable(output):
        result = build_dataset(
            output, networks=network or [], tasks=tasks, programs=programs,
            devices=device or ["cpu:threads=1"],
            options=MeasureOptions(
                samples=samples, rounds=rounds, builders=builders, minutes=minutes, slow_s=slow_s,
                compiler=compiler,
            ),
            chip=chip, ray=ray, rpc=rpc, target=target, seed=seed, extract_only=extract_only,
            progress=console().print,
        )  # fmt: skip
    if as_json:
        print_json(result)
    else:
        console().print(f"{output}: {result.get('rows', 0)} programs of {result['tasks']} tasks")


@dataset_app.command("import")
def dataset_import(
    data: Annotated[Path, typer.Argument(metavar="FILE")],
    output: Output,
    format_name: Annotated[
        str,
        typer.Option(
            "--format", help="neusight, aiconfigurator, helix.", autocompletion=words(formats)
        ),
    ],
    device: Annotated[str | None, typer.Option(help="What every row ran on.")] = None,
    as_json: Json = False,
) -> None:
    """Turn public latency data into an operator table (Parquet)."""
    from foreplan.cost_models.commands import import_operators

    result = import_operators(data, format_name, output, device=device)
    if as_json:
        print_json(result)
    else:
        console().print(f"{output}: {result['rows']} rows")


@dataset_app.command("stats")
def dataset_stats(
    data: Annotated[Path, typer.Argument(metavar="FILE", help="Or a folder of programs.")],
    format_name: Annotated[
        str, typer.Option("--format", help="As evaluate.", autocompletion=words(formats))
    ] = "foreplan",
    as_json: Json = False,
) -> None:
    """Count rows by device and operator, and name devices that the zoo lacks."""
    from foreplan.cost_models.commands import operator_stats

    result = operator_stats(data, format_name)
    if as_json:
        print_json(result)
        return
    from foreplan.planner.report.operator_tables import stats_table

    show(stats_table(result))
