"""`check_paths`: which files a plan may make a verification read.

A plan can come from a stranger. The folders of its model and encoders may lie anywhere: of these
weights, configuration and tokenizer are read, as safetensors and plain data, and no code of theirs
is run, so that the most a wrong folder does is fail or be verified for nothing. Other files that a
plan names (profiles, tables of costs, predictors' weights, texts, quality tables) have to lie in
the plan's own folder, unless the user says that the plan's paths are to be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from foreplan.cost_models.book import FILE_CHOICES
from foreplan.errors import SpecError
from foreplan.planner.plan import Plan
from foreplan.planner.plan_paths import FILE_FIELDS, named_file


def check_paths(plan: Plan, folder: Path, *, profiles: bool) -> None:
    """Refuse a plan that leaves its folder.

    Args:
        plan: the plan.
        folder: where its file lies.
        profiles: whether its profiles, or the table that its costs come from, are going to be read.

    Raises:
        SpecError: names the field and the way to consent.
    """
    home = folder.resolve()
    for field, written, path in _named(plan, profiles=profiles):
        try:
            inside = path.resolve().is_relative_to(home)
        except (OSError, ValueError, RuntimeError):  # a null byte, links in a circle
            inside = False
        if not inside:
            raise SpecError(
                field, got=written, expected=f"a file in the plan's own folder {home}",
                fix="add --trust-paths (trust_paths=True) if you know where the plan comes from",
            )  # fmt: skip


def _named(plan: Plan, *, profiles: bool) -> Iterator[tuple[str, str, Path]]:
    if profiles:
        for rank in plan.cluster.ranks():
            if rank.profile is not None:
                yield f"plan: profile of {rank.label}", rank.profile, Path(rank.profile)
        costs = plan.provenance.costs
        for choice in FILE_CHOICES:
            if costs.startswith(choice):
                yield "plan: provenance.costs", costs, Path(costs.removeprefix(choice))
    for name in FILE_FIELDS:
        text = named_file(name, plan.workload.get(name))
        if text is not None:
            yield f"plan: workload.{name}", text, Path(text)
