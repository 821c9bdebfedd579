"""Tables of quality losses for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from foreplan.cost_models.quality.quality_table import QualityTable
from foreplan.planner.plan import Plan
from foreplan.planner.report._grid import Column, Grid, bullets
from foreplan.planner.report.quality import judged, quality_figures
from foreplan.planner.report.text import percent, plain
from foreplan.planner.verify.verification import Verification


def quality_tables(table: QualityTable) -> Group:
    """Losses by layer and bits, and what sums of them cost in perplexity."""
    layers = [str(layer) for layer in range(len(table.omega))]
    columns = [Column("layer", layers, numeric=True)]
    for place, bits in enumerate(table.bits):
        cells = [f"{row[place]:.3g}" for row in table.omega]
        columns.append(Column(f"{bits} bits", cells, numeric=True))
    title = f"{plain(table.model)}: {table.indicator} on {plain(table.text)}"
    parts: list[RenderableType] = [Text(title, style="bold"), Grid("Loss of each layer", columns)]
    curve = table.curve
    if curve is not None:
        whole = [sum(row[place] for row in table.omega) for place in range(len(table.bits))]
        rises = ", ".join(
            f"{bits} bits {curve.increase(loss):+.3g}"
            for bits, loss in zip(table.bits, whole, strict=True)
        )
        lines = [
            f"perplexity {curve.perplexity:.4g} at 16 bits; every layer at {rises}",
            f"curve of {curve.plans} random plans, off by {percent(curve.error)} of the mean rise",
        ]
        parts += bullets(lines)
    return Group(*parts)


def quality_columns(verification: Verification, plan: Plan | None) -> Grid:
    """What was measured of how good each decision's results are; empty where nothing was.

    Args:
        verification: the run.
        plan: its plan, whose own figures of the same names stand beside.
    """
    columns = [Column("decision", list(judged(verification)))]
    columns += [
        Column(one.title, list(one.cells), numeric=True)
        for one in quality_figures(verification, plan)
    ]
    return Grid("Quality on held-out text", columns if len(columns) > 1 else ())
