"""Commands about a user's own server: its measured times, and the traffic it meets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreplan.cli._app import Json, app, console, print_json, show, simulate_app
from foreplan.cli._words import costs as cost_choices
from foreplan.cli._words import models, words


@app.command()
def calibrate(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER.yaml")],
    measured: Annotated[Path, typer.Option(help="CSV or JSON: times of your server's passes.")],
    model: Annotated[
        str,
        typer.Option(
            "-m", "--model", help="Model that the server runs.", autocompletion=words(models)
        ),
    ],
    costs: Annotated[
        str,
        typer.Option(
            help="Prices to correct: measured, predicted or roofline.",
            autocompletion=words(cost_choices),
        ),
    ] = "measured",
    as_json: Json = False,
) -> None:
    """Correct a profile by times of your own server; plans use the correction from then on."""
    from foreplan.cost_models.book import cost_choice
    from foreplan.planner.calibrate_command import calibrate as run

    made = run(cluster, model, measured, costs=cost_choice(costs))
    if as_json:
        print_json(
            {
                "written": [str(item.path) for item in made],
                "calibrations": [
                    item.calibration.model_dump(mode="json", by_alias=True) for item in made
                ],
            }
        )
        return
    for item in made:
        c = item.calibration
        console().print(
            f"{c.device}: error {c.error_before:.1%} before, {c.error_after:.1%} after ({c.form}: "
            f"compute ×{c.compute:.3g}, memory ×{c.memory:.3g}, {c.launch_s * 1e6:.3g} us a "
            f"program); wrote {item.path}"
        )


@simulate_app.command("traffic")
def simulate_traffic(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json")],
    traffic: Annotated[
        Path, typer.Option(help="Lengths and arrivals (YAML, JSON), or a trace (CSV).")
    ],
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, instead of the file's.")
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(help="Folder that the plan's profile paths start from; its own if left out."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Chrome trace to write.")] = None,
    as_json: Json = False,
) -> None:
    """Replay requests on a serving plan with continuous batching: waiting, rates, saturation."""
    from foreplan.datasets.storage import (
        refuse_overwriting,
        refuse_unwritable,
        write_atomically,
    )
    from foreplan.planner.traffic_command import simulate_traffic as run

    if trace is not None:
        refuse_overwriting(trace, plan, traffic)
        refuse_unwritable(trace)
    found = run(plan, traffic, rate_per_s=rate, folder=profiles)
    if trace is not None:
        write_atomically(trace, found.trace())
    if as_json:
        print_json(found.document())
        return
    from foreplan.planner.report.traffic_tables import traffic_table

    show(traffic_table(found))
