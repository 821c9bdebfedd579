"""Tables of quality losses for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from foreplan.cost_models.quality_table import QualityTable
from foreplan.planner.plan import Plan
from foreplan.planner.report._grid import Column, Grid, bullets
from foreplan.planner.report.text import UNKNOWN, percent, plain
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
    judged = [candidate for candidate in verification.candidates if candidate.quality]
    if not judged:
        return Grid("Quality", ())
    foretold = {} if plan is None else {"chosen": plan.predicted.metrics}
    if plan is not None:
        foretold |= {other.name: other.predicted.metrics for other in plan.alternatives}
    columns = [Column("decision", [plain(candidate.name) for candidate in judged])]
    for name in dict.fromkeys(name for candidate in judged for name in candidate.quality):
        predicted = [foretold.get(candidate.name, {}).get(name) for candidate in judged]
        title = name.replace("_", " ")
        if any(value is not None for value in predicted):
            cells = [UNKNOWN if value is None else f"{value:.4g}" for value in predicted]
            columns.append(Column(f"predicted {title}", cells, numeric=True))
        measured = [candidate.quality.get(name) for candidate in judged]
        cells = [UNKNOWN if value is None else f"{value:.4g}" for value in measured]
        columns.append(Column(title, cells, numeric=True))
    return Grid("Quality on held-out text", columns)
