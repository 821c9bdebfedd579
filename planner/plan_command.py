"""What ``foreplan plan`` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foreplan.datasets.storage import refuse_overwriting, refuse_unwritable
from foreplan.planner.api import plan
from foreplan.planner.plan import Plan
from foreplan.planner.steps import told_steps

if TYPE_CHECKING:
    from rich.console import Console


def plan_files(
    kind: str,
    model: str | None,
    cluster: str | Path,
    workload: str | None,
    *,
    costs: str,
    beside: Sequence[str] = (),
    relax: bool = False,
    seed: int,
    output: Path,
    console: Console | None = None,
) -> Plan:
    """Plan and write the plan; its paths start from its own folder.

    Args:
        kind: which planner.
        model: a Hugging Face folder or a zoo name.
        workload: a file or ``batch=8,...``.
        seed: of every random choice.
        cluster: a file (`Path`) or the inline form (text).
        costs: as `foreplan.planner.api.plan`.
        beside: others of them to decide from as well.
        relax: see `foreplan.planner.api.plan`.
        output: the plan's file.
        console: shows progress, if given and a terminal.

    Raises:
        ForeplanError: as `foreplan.planner.api.plan`.
    """
    refuse_unwritable(output)
    refuse_overwriting(output, cluster if isinstance(cluster, Path) else None, workload)
    told: contextlib.AbstractContextManager[Callable[[str], None] | None] = (
        contextlib.nullcontext()
        if console is None
        else told_steps(console, "reading what was described", logged=False)
    )
    with told as say:
        made = plan(
            kind, model, cluster, workload, costs=costs, beside=beside, relax=relax, seed=seed,
            progress=say,
        )  # fmt: skip
    made.save(output)
    return made
