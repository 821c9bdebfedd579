"""Where the files lie that a plan names: one rule for all of its paths.

In a document every relative path starts from the folder of the document, so that a plan works from
whatever folder it is read, and goes on to work where it is moved with what it names. In memory a
relative path starts from the current folder, as the caller's own do: `opened` turns the one into
the other when a plan is read, `written` back when it is saved. Absolute paths stay, but for those
below the document's folder, which are written relative to it.

Named are: the model's folder and those of encoders, profiles, the text and the table of quality of
a workload, and the file or folder that prices come from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from foreplan.cost_models.book import FILE_CHOICES
from foreplan.datasets.models.encoders import encoder_names
from foreplan.datasets.text_tokens import STANDARD_LIBRARY
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from foreplan.planner.plan import Plan

#: Fields of workloads that name files.
FILE_FIELDS = ("text", "quality")

Change = Callable[[str], str]


def named_file(field: str, value: Any) -> str | None:
    """The path in a workload's field, ``None`` where it names none."""
    if field not in FILE_FIELDS or not isinstance(value, str) or value == STANDARD_LIBRARY:
        return None
    return value


def with_paths(plan: Plan, change: Change) -> Plan:
    """The plan with each of its paths changed."""
    model = plan.model
    if model is not None and model.path is not None:
        model = model.model_copy(update={"path": change(model.path)})
    costs = plan.provenance.costs
    for choice in FILE_CHOICES:
        if costs.startswith(choice):
            costs = choice + change(costs.removeprefix(choice))
    return with_profiles(plan, change).model_copy(
        update={
            "model": model,
            "workload": _workload(plan.workload, change),
            "provenance": plan.provenance.model_copy(update={"costs": costs}),
        }
    )


def with_profiles(plan: Plan, change: Change) -> Plan:
    """The plan with the paths of its profiles changed, and no other."""
    entries = tuple(
        entry
        if entry.profile is None
        else entry.model_copy(update={"profile": change(entry.profile)})
        for entry in plan.cluster.devices
    )
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"devices": entries})})


def without_folders(plan: Plan) -> Plan:
    """The plan with the names of its files alone, the same wherever they lie."""
    return with_paths(plan, lambda path: PurePath(path).name)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder that a document's paths start from: that of its file, behind any link to it.

    A pipe lies nowhere; a document that comes or goes through one starts from the current folder.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        return Path()
    return Path(os.path.realpath(path)).parent


def opened(folder: str | os.PathLike[str]) -> Change:
    """How a path of a document becomes one from the current folder.

    Args:
        folder: of the document.
    """
    home = os.path.realpath(folder)
    return lambda path: path if os.path.isabs(path) else _relative(os.path.join(home, path))


def written(folder: str | os.PathLike[str]) -> Change:
    """How a path from the current folder becomes one of a document.

    Args:
        folder: of the document.
    """
    home = os.path.realpath(folder)

    def change(path: str) -> str:
        outside = not Path(os.path.abspath(path)).is_relative_to(home)
        return path if os.path.isabs(path) and outside else _relative(path, home)

    return change


def check_there(plan: Plan) -> None:
    """Refuse a run of a plan whose model's folder is not there.

    Raises:
        SpecError: says where it was looked for.
    """
    model = plan.model
    if model is None or model.path is None or Path(model.path).is_dir():
        return
    start = "the plan's" if plan.provenance.planned_for else "the current"
    raise SpecError(
        "plan: model.path", got=model.path,
        expected=f"the model's folder, looked for as {os.path.abspath(model.path)}",
        fix=f"put it there, or write its path into the plan: a relative one starts from {start} "
        "folder",
    )  # fmt: skip


def _relative(path: str, start: str | None = None) -> str:
    return Path(os.path.relpath(path, start)).as_posix()


def _workload(fields: Mapping[str, Any], change: Change) -> dict[str, Any]:
    made = dict(fields)
    for field in FILE_FIELDS:
        path = named_file(field, fields.get(field))
        if path is not None:
            made[field] = change(path)
    encoders = fields.get("encoders")
    if isinstance(encoders, list | tuple):
        made["encoders"] = [_encoder(each, change) for each in encoders]
    return made


def _encoder(encoder: Any, change: Change) -> Any:
    folder = encoder.get("model") if isinstance(encoder, Mapping) else None
    if not isinstance(folder, str) or folder in encoder_names():
        return encoder
    return {**encoder, "model": change(folder)}
