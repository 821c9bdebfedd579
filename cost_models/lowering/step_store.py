"""Keeps the captured steps of a pass on disk, so that torch is loaded once a model and shape.

One JSON file a pass below ``$FOREPLAN_CACHE`` (default ``$XDG_CACHE_HOME/foreplan``, else
``~/.cache/foreplan``), named by a hash of everything the steps depend on: the model's description
and configuration file, the shape, the versions of torch, transformers and this format, and the code
of the packages that capture and lower.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from foreplan.cost_models.lowering.graph_programs import model_steps
from foreplan.cost_models.lowering.graph_step import PARTS, Phase, Step
from foreplan.cost_models.lowering.host_call import HostCall
from foreplan.datasets.graphs.transformers_network import TransformersNetwork
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant
from foreplan.datasets.storage import write_atomically
from foreplan.errors import ForeplanError, SpecError

SCHEMA = "foreplan.steps/15"


def cache_folder() -> Path:
    """Where captured steps are kept."""
    own = os.environ.get("FOREPLAN_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "foreplan"


def stored_steps(
    model: Model | TransformersNetwork,
    *,
    batch: int,
    tokens: int,
    phase: Phase,
    compiled: bool = False,
    folder: Path | None = None,
) -> tuple[list[Step], bool]:
    """Steps of a pass, and whether they were found on disk.

    What is missing or unreadable is captured again and kept; a folder that cannot be written is
    no error.

    Args:
        model: what runs.
        batch: sequences.
        tokens: tokens of each.
        phase: as `graph_programs.lower`.
        compiled: as `graph_programs.lower_compiled`.
        folder: instead of `cache_folder`.

    Raises:
        SpecError: as `graph_programs.model_steps`.
    """
    path = (folder or cache_folder()) / f"{_key(model, batch, tokens, phase, compiled)}.json"
    try:
        return _read(json.loads(path.read_text(encoding="utf-8"))), True
    except (
        OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError,
        ForeplanError,
    ):  # fmt: skip
        steps = model_steps(model, batch=batch, tokens=tokens, phase=phase, compiled=compiled)
    with contextlib.suppress(OSError, SpecError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(_document(steps)))
    return steps, False


def _key(
    model: Model | TransformersNetwork, batch: int, tokens: int, phase: Phase, compiled: bool
) -> str:
    config = Path(model.path) / "config.json" if model.path else None
    facts = [
        SCHEMA, _code(), model.model_dump_json(), batch, tokens, phase, compiled,
        _version("torch"), _version("transformers"),
        config.read_text(encoding="utf-8") if config and config.is_file() else "",
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


@functools.cache
def _code() -> str:
    """Digest of what decides how a pass is captured and lowered: after a change, none of before."""
    root = Path(__file__).resolve().parents[2]
    sources = (path for name in ("cost_models", "datasets") for path in (root / name).rglob("*.py"))
    found = hashlib.sha256()
    for path in sorted(sources):
        found.update(path.read_bytes())
    return found.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _document(steps: list[Step]) -> dict[str, object]:
    works: dict[Program, int] = {}
    rows = [
        [s.kind, s.target, s.part, works.setdefault(s.work, len(works)), s.calls, s.host,
         s.evaluated, s.in_place]
        for s in steps
        if isinstance(s.work, Program)
    ]  # fmt: skip
    return {
        "schema": SCHEMA,
        "works": [[work.op, list(work.sizes), str(work.variant)] for work in works],
        "steps": rows,
    }


def _read(document: dict[str, list[list[object]]]) -> list[Step]:
    works = [_unpack(*entry) for entry in document["works"]]  # type: ignore[arg-type]
    steps = [
        Step(kind, target, part, works[index], calls, host and HostCall(*host), evaluated, placed)  # type: ignore[arg-type, call-overload, misc]
        for kind, target, part, index, calls, host, evaluated, placed in document["steps"]
    ]
    if not all(
        type(s.calls) is int and isinstance(s.kind, str) and isinstance(s.target, str)
        and isinstance(s.evaluated, str | None) and s.part in PARTS and _is_host(s.host)
        and type(s.in_place) is bool
        for s in steps
    ):  # fmt: skip
        raise ValueError("a step that is none")
    return steps


def _is_host(host: HostCall | None) -> bool:
    kinds = (str, int, bool, int)
    return host is None or all(type(v) is k for v, k in zip(host, kinds, strict=True))


def _unpack(op: str, sizes: list[int], variant: str) -> Program:
    if not (all(type(n) is int for n in sizes) and isinstance(op + variant, str)):
        raise ValueError("sizes that are none")
    return Program(op, tuple(sizes), Variant.parse(variant))
