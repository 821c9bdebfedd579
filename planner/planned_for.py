"""`planned_for`: what a plan's prediction belongs to, as fingerprints that the plan keeps.

A plan is a text that anybody may edit. What was predicted of a batch of 4 says nothing about one of
8, so every document keeps a fingerprint of the model, cluster, workload and decision that its
prediction was made for, and is refused where one of them has become another. Where files lie is no
part of it, nor how the text is laid out, nor fields that later versions add at their defaults.

Plans of earlier versions keep none. Of these a run counts the actions: a prediction of another
number of actions was made for something else.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from foreplan.datasets._document_text import Words
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.plan_paths import without_folders

if TYPE_CHECKING:
    from foreplan.datasets.specs import StrictModel
    from foreplan.planner.plan import Plan

_AGAIN = "plan again with the new ones"


def planned_for(plan: Plan) -> dict[str, str]:
    """A fingerprint of each part of the plan that its prediction belongs to.

    Raises:
        SpecError: a workload or a decision that its planner does not accept.
    """
    from foreplan.planner.registry import planner

    bare, chosen = without_folders(plan), planner(plan.kind)
    parts: dict[str, StrictModel | None] = {
        "model": bare.model,
        "cluster": bare.cluster,
        "workload": validate(chosen.workload_type, bare.workload, "plan: workload"),
        "decision": validate(chosen.decision_type, bare.decision, "plan: decision"),
    }
    return {name: _fingerprint(part) for name, part in parts.items()}


def check_planned_for(plan: Plan, where: str = "plan") -> None:
    """Refuse a plan that was edited after its prediction was made.

    Args:
        plan: the plan; one of an earlier version passes.
        where: what to call it.

    Raises:
        SpecError: names the part that is another now.
    """
    kept = plan.provenance.planned_for
    if not kept:
        return
    for part, now in planned_for(plan).items():
        if kept.get(part) != now:
            raise SpecError(
                f"{where}: {part}", got=Words("values edited after planning"),
                expected="those that the decision and its prediction were made for", fix=_AGAIN,
            )  # fmt: skip


def check_actions(plan: Plan) -> None:
    """Refuse a plan of an earlier version whose times are of another schedule than its own.

    Raises:
        SpecError: they are.
    """
    from foreplan.planner.registry import planner
    from foreplan.planner.verify.session import problem_of

    if plan.provenance.planned_for or plan.times is None:
        return
    chosen = planner(plan.kind)
    decision = validate(chosen.decision_type, plan.decision, "plan: decision")
    actions = len(chosen.schedule(problem_of(plan, chosen), decision))
    if actions != len(plan.times.start_us):
        raise SpecError(
            "plan: workload", got=Words(f"values that make {actions} actions"),
            expected=f"those of the {len(plan.times.start_us)} that were predicted",
            fix=_AGAIN,
        )  # fmt: skip


def _fingerprint(part: StrictModel | None) -> str:
    fields = None if part is None else part.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
