"""Commands about machines: what there is, what this one can do, what its hosts measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreplan.cli._app import (
    Json,
    Output,
    OutputFolder,
    app,
    cluster_app,
    console,
    print_json,
    resumable,
    show,
)
from foreplan.cli._words import devices as device_names
from foreplan.cli._words import purposes, words
from foreplan.errors import MissingDataError, SpecError


@app.command()
def profile(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DEVICE]...", help="cpu:threads=1,isa=avx2 or cuda:0/sms=32 ..."),
    ] = None,
    output: OutputFolder = Path("profiles"),
    model: Annotated[
        list[str] | None,
        typer.Option(help="This model's own shapes, in place of the general ones."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option("-w", "--workload", help="Workload of these shapes.")
    ] = None,
    purpose: Annotated[
        str,
        typer.Option(
            "--for",
            help="Plans to measure for: serving, precision or bubbles.",
            autocompletion=words(purposes),
        ),
    ] = "serving",
    memory: Annotated[
        list[str] | None,
        typer.Option(
            help="SIZE or DEVICE=SIZE that plans may use of a device; may be given again."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="One round of measurements, not two.")] = False,
    fit: Annotated[
        bool, typer.Option(help="Time a few of the shapes and fit the predictor to each device.")
    ] = False,
    tasks: Annotated[
        int | None, typer.Option(help="With --fit: how many shapes to time; 32 if left out.")
    ] = None,
    unseen: Annotated[
        bool, typer.Option(help="With --fit: as if no chip like this one had been measured before.")
    ] = False,
    host: Annotated[str, typer.Option(help="Name of this host in the cluster.")] = "localhost",
    replace: Annotated[
        bool, typer.Option("--replace", help="Begin anew where another machine's profile lies.")
    ] = False,
    ray: Annotated[
        str | None, typer.Option(help="Measure each node of a Ray cluster: HOST:PORT, auto, local.")
    ] = None,
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
    from foreplan.planner.fit_command import TASKS
    from foreplan.planner.profile_command import profile_host, profile_link

    if tasks is not None and not fit:
        raise SpecError("--tasks", got=tasks, expected="--fit with it")
    if unseen and not fit:
        raise SpecError("--unseen", got=True, expected="--fit with it")
    count = None if not fit else TASKS if tasks is None else tasks
    if serve is not None or link is not None:
        if peer is None:
            raise SpecError("--peer", got=None, expected="the other host's name in the cluster")
        if names or model or workload or memory or quick or fit or replace or ray:
            raise SpecError(
                "--serve" if link is None else "--link",
                got="devices or options of their measurement with it",
                expected="--host, --peer and --output: it measures the link alone",
            )  # fmt: skip
        result = profile_link(
            output, host=host, peer=peer, serve=serve, link=link, console=console()
        )
    elif peer is not None:
        raise SpecError("--peer", got=peer, expected="--serve or --link with it")
    elif ray is not None:
        from foreplan.planner.profile_on_ray import profile_on_ray

        if model or workload or memory or unseen or host != "localhost":
            raise SpecError(
                "--ray", got="--model, --workload, --memory, --unseen or --host with it",
                expected="the generic shapes and the nodes' own names",
            )  # fmt: skip
        result = profile_on_ray(
            ray, names or [], output, quick=quick, tasks=count, replace=replace,
            console=console(),
        )  # fmt: skip
    else:
        with resumable(output):
            result = profile_host(
                names or [], output, models=model or [], workload=workload, purpose=purpose,
                memory=memory or [], quick=quick, tasks=count, unseen=unseen, host=host,
                replace=replace, console=console(),
            )  # fmt: skip
    if as_json:
        print_json(result)


@cluster_app.command("merge")
def cluster_merge(
    files: Annotated[list[Path], typer.Argument(metavar="A.yaml B.yaml ...")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Join the clusters of several hosts, and the links measured between them, into one."""
    from foreplan.planner.merge_command import merge_files

    merged, notes = merge_files(files, output)
    for note in notes:
        console().print(f"note: {note}")
    if as_json:
        print_json(merged.model_dump(mode="json", exclude_defaults=True))
    else:
        console().print(f"{output}: {len(merged.ranks())} devices of {len(merged.hosts())} hosts")


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine can do, what is missing, and the command to get it."""
    from foreplan.planner.doctor import examine

    found = examine()
    if as_json:
        print_json(found.document())
    else:
        from foreplan.planner.report.doctor_tables import doctor_tables

        show(doctor_tables(found))
    if not all(found.ready.values()):
        raise typer.Exit(MissingDataError.exit_code)


@app.command()
def devices(
    name: Annotated[
        str | None,
        typer.Argument(help="One device, with sources.", autocompletion=words(device_names)),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the device zoo: published figures, and where each comes from."""
    from foreplan.datasets import device_zoo

    chosen = [device_zoo.device(n) for n in (device_zoo.names() if name is None else [name])]
    if as_json:
        print_json([d.model_dump(mode="json", exclude_none=True) for d in chosen])
        return
    from foreplan.planner.report.tables import device_table, devices_table

    show(devices_table(chosen) if name is None else device_table(chosen[0]))
