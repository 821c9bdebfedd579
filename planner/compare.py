"""`compare`: what differs between two plans, two verifications or two profiles.

Only what differs is listed, in sections that say what it is about (decision, prediction, memory,
inputs, provenance ...); times and sizes with how much the second is off the first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from foreplan.datasets._document_text import Words
from foreplan.datasets.profile import Profile
from foreplan.datasets.specs import load_document
from foreplan.errors import SpecError
from foreplan.planner.plan import Plan, load_plan
from foreplan.planner.verify.verification import Verification, load_verification

#: Relative differences below this are rounding, and so are absolute ones below a picosecond.
SAME = 1e-9


@dataclass(frozen=True)
class Difference:
    """One value that is not the same.

    Attributes:
        what: its name, ``rank 0 (t4): weights``; units as in the documents.
        a, b: the values; ``None`` where one side has none.
        change: (b - a) / a of numbers.
    """

    what: str
    a: Any
    b: Any
    change: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two documents side by side.

    Attributes:
        of: ``plan``, ``verification`` or ``profile``.
        a, b: what they are called.
        sections: differences by what they are about; sections without any are left out.
    """

    of: str
    a: str
    b: str
    sections: Mapping[str, tuple[Difference, ...]]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.sections

    def document(self) -> dict[str, Any]:
        """As JSON."""
        sections = {name: [asdict(d) for d in found] for name, found in self.sections.items()}
        return {"of": self.of, "a": self.a, "b": self.b, "same": self.same, "sections": sections}


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Compare two documents of one sort.

    Raises:
        SpecError: a file is wrong, the documents are of two sorts, or the plans of two kinds.
    """
    sorts = [_sort(path) for path in (a, b)]
    if sorts[0] != sorts[1]:
        raise SpecError(
            os.fspath(b), got=Words(f"a {sorts[1]}"),
            expected=f"a {sorts[0]}, as {os.fspath(a)} is",
        )  # fmt: skip
    load, sections = _SORTS[sorts[0]]
    first, second = load(a), load(b)
    if sorts[0] != "profile" and first.kind != second.kind:
        raise SpecError(
            os.fspath(b), got=Words(f"a {sorts[0]} of kind {second.kind}"),
            expected=f"one of kind {first.kind}, as {os.fspath(a)} is",
        )  # fmt: skip
    found = {name: tuple(differences) for name, differences in sections(first, second).items()}
    return Comparison(
        sorts[0], os.fspath(a), os.fspath(b), {name: d for name, d in found.items() if d}
    )


def _sort(path: str | os.PathLike[str]) -> str:
    wanted = f"a {', a '.join(list(_SORTS)[:-1])} or a {list(_SORTS)[-1]}, two of one sort"
    if Path(path).is_dir():
        inside = next((str(each) for each in sorted(Path(path).glob("*.json"))), None)
        raise SpecError(
            os.fspath(path), got=Words("a folder"), expected=wanted,
            fix=None if inside is None else f"such as {inside}",
        )  # fmt: skip
    if os.path.exists(path) and not os.path.isfile(path):
        raise SpecError(
            os.fspath(path), got=Words("a pipe"), expected=f"a file, which is read twice: {wanted}"
        )
    try:
        schema = load_document(path).get("schema")
    except SpecError as error:
        raise SpecError(error.where, got=error.got, expected=wanted, fix=error.fix) from error
    for sort in _SORTS:
        if isinstance(schema, str) and schema.startswith(f"foreplan.{sort}/"):
            return sort
    if schema is None:
        raise SpecError(os.fspath(path), got=Words("a document without a schema"), expected=wanted)
    known = ", ".join(f"foreplan.{sort}/1" for sort in _SORTS)
    raise SpecError(f"{os.fspath(path)}: schema", got=schema, expected=f"one of {known}")


Sections = dict[str, list[Difference]]

# --------------------------------------------------------------------------------------------- plan


def _plans(a: Plan, b: Plan) -> Sections:
    pa, pb = a.predicted, b.predicted
    return {
        "decision": differ(leaves(a.decision), leaves(b.decision)),
        "prediction": differ(
            {"total_s": pa.total_s, **pa.metrics, **_ranks(a, "times")},
            {"total_s": pb.total_s, **pb.metrics, **_ranks(b, "times")},
        ),
        "memory": differ(_ranks(a, "memory"), _ranks(b, "memory")),
        "alternatives": differ(_alternatives(a), _alternatives(b)),
        "confidence": differ(_confidence(a), _confidence(b)),
        "proof": differ(
            leaves(a.bound.model_dump(mode="json")), leaves(b.bound.model_dump(mode="json"))
        ),
        "inputs": differ(_inputs(a), _inputs(b)),
        "provenance": [
            *differ(
                # Of what it was planned for, the sections above say what differs.
                leaves(a.provenance.model_dump(mode="json", exclude={"planned_for"})),
                leaves(b.provenance.model_dump(mode="json", exclude={"planned_for"})),
            ),
            *_lines("assumption", a.assumptions, b.assumptions),
        ],
    }


def _ranks(plan: Plan, part: str) -> dict[str, Any]:
    """By device, which may have another place in another plan."""
    found: dict[str, Any] = {}
    for rank in plan.predicted.ranks:
        if part == "memory":
            sizes = {**rank.memory_bytes, "all": sum(rank.memory_bytes.values())}
            sizes["may use"] = rank.capacity_bytes or 0
            found |= {f"{rank.device}: {item}_bytes": size for item, size in sizes.items()}
        else:
            for name in ("compute_s", "communication_s", "bubble_s"):
                found[f"{rank.device}: {name}"] = getattr(rank, name)
    return found


def _confidence(plan: Plan) -> dict[str, Any]:
    sure = plan.confidence
    found: dict[str, Any] = {
        "probability_best": sure.probability_best, "runner_up": sure.runner_up
    }  # fmt: skip
    for k, item in enumerate(sure.measure_next):
        found[f"measure next, {k + 1}"] = f"{item.program} on {item.device}"
    return found


def _alternatives(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {f"{o.name}: total_s": o.predicted.total_s for o in plan.alternatives}
    return found | {out.name: f"left out: {out.reason}" for out in plan.rejected}


def _inputs(plan: Plan) -> dict[str, Any]:
    model = None if plan.model is None else plan.model.model_dump(mode="json")
    cluster = plan.cluster.model_dump(mode="json", exclude_defaults=True)
    parts = {"model": model, "cluster": cluster, "workload": plan.workload}
    return leaves(parts)


# ------------------------------------------------------------------------------------- verification


def _verifications(a: Verification, b: Verification) -> Sections:
    def totals(run: Verification) -> dict[str, Any]:
        found: dict[str, Any] = {
            "passed": run.passed, "regret": run.regret, "rank_correlation": run.rank_correlation
        }  # fmt: skip
        for one in run.candidates:
            found[f"{one.name}: predicted_s"] = one.predicted_s
            found[f"{one.name}: measured_s"] = one.measured_s
            found[f"{one.name}: error"] = one.error
            found[f"{one.name}: failure"] = one.failure
        return found

    def phases(run: Verification) -> dict[str, Any]:
        return {
            f"{rank.device}: {phase.op} {what}": value
            for rank in run.chosen.ranks
            for phase in rank.phases
            for what, value in (
                ("predicted_s", phase.predicted_s), ("measured_s", phase.measured_s)
            )
        }  # fmt: skip

    def memory(run: Verification) -> dict[str, Any]:
        return {
            f"{rank.device}: {item.item}_bytes": item.held_bytes
            for rank in run.chosen.ranks
            for item in rank.memory
        }

    def settings(run: Verification) -> dict[str, Any]:
        fields = ("plan_digest", "backend", "machine", "rounds", "tolerance")
        return leaves(run.model_dump(mode="json", include=set(fields)))

    def agreement(run: Verification) -> dict[str, Any]:
        return leaves({one.mode: one.model_dump(mode="json") for one in run.agreement})

    return {
        "times": differ(totals(a), totals(b)),
        "phases of the plan": differ(phases(a), phases(b)),
        "memory held": differ(memory(a), memory(b)),
        "result": differ(agreement(a), agreement(b)),
        "provenance": [
            *differ(settings(a), settings(b)), *_lines("note", a.notes, b.notes)
        ],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ profile


def _profiles(a: Profile, b: Profile) -> Sections:
    """Device and software field by field; measured programs by operator and variant."""
    ratios: dict[str, list[float]] = {}
    only = {"the first": 0, "the second": 0}
    for program, row in a.by_program.items():
        other = b.by_program.get(program)
        if other is None:
            only["the first"] += 1
        elif row.median_s and other.median_s:
            ratios.setdefault(f"{program.op}@{program.variant}", []).append(
                other.median_s / row.median_s
            )
    only["the second"] = sum(program not in a.by_program for program in b.by_program)
    times = []
    for name, found in sorted(ratios.items()):
        middle = float(np.median(found))
        if max(abs(ratio - 1) for ratio in found) > SAME:
            low, high = np.percentile(found, [10, 90])
            span = f"×{middle:.3g} (×{low:.3g} to ×{high:.3g})"
            times.append(Difference(name, f"{len(found)} programs", span, middle - 1))
    counts = [Difference(f"programs only in {k}", None, n) for k, n in only.items() if n]
    fields = {"device", "cores", "software", "host_to_device", "device_to_host"}
    return {
        "times of the second over the first, median and 10-90 % of the programs": [*times, *counts],
        "device and software": differ(
            leaves(a.model_dump(mode="json", include=fields)),
            leaves(b.model_dump(mode="json", include=fields)),
        ),
    }


# ---------------------------------------------------------------------------------------- any of it


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Values by dotted name; a list of plain values is one value."""
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= leaves(inner, f"{name}.{key}" if name else str(key))
        return found
    if isinstance(value, list | tuple) and any(isinstance(v, Mapping | list) for v in value):
        return leaves({str(k): inner for k, inner in enumerate(value)}, name)
    return {name: value}


def differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """What is not the same in two mappings, in the order of the first."""
    found = []
    for name in dict.fromkeys([*a, *b]):
        first, second = a.get(name), b.get(name)
        change = None
        if _is_number(first) and _is_number(second):
            if abs(first - second) <= max(SAME * max(abs(first), abs(second)), 1e-12):
                continue
            change = (second - first) / abs(first) if first else None
        elif first == second:
            continue
        found.append(Difference(name, first, second, change))
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lines(what: str, a: Iterable[str], b: Iterable[str]) -> list[Difference]:
    """Sentences that only one side has."""
    first, second = list(a), list(b)
    gone = [Difference(what, line, None) for line in first if line not in second]
    return gone + [Difference(what, None, line) for line in second if line not in first]


_SORTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Sections]]] = {
    "plan": (load_plan, _plans),
    "verification": (load_verification, _verifications),
    "profile": (Profile.load, _profiles),
}
