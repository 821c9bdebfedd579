"""Keeps the captured steps of a pass on disk, so that torch is loaded once a model and shape."""

from __future__ import annotations

from pathlib import Path

from foreplan.cost_models.lowering.graph_programs import model_steps
from foreplan.cost_models.lowering.graph_step import PARTS, Phase, Step
from foreplan.cost_models.lowering.host_call import HostCall
from foreplan.datasets.graphs.transformers_network import TransformersNetwork
from foreplan.datasets.kept_documents import KeptDocument
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant

SCHEMA = "foreplan.steps/15"


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
        folder: where they are kept; see `KeptDocument`.

    Raises:
        SpecError: as `graph_programs.model_steps`.
    """
    kept = kept_steps(model, batch, tokens, phase, compiled, folder)
    if (found := kept.read(_read)) is not None:
        return found, True
    steps = model_steps(model, batch=batch, tokens=tokens, phase=phase, compiled=compiled)
    kept.keep(_document(steps))
    return steps, False


def kept_steps(
    model: Model | TransformersNetwork, batch: int, tokens: int, phase: Phase, compiled: bool,
    folder: Path | None = None,
) -> KeptDocument:  # fmt: skip
    """Where `stored_steps`, whose arguments these are, keeps what it finds."""
    config = Path(model.path) / "config.json" if model.path else None
    return KeptDocument(
        SCHEMA, model.model_dump_json(), batch, tokens, phase, compiled,
        config.read_text(encoding="utf-8") if config and config.is_file() else "",
        folder=folder,
    )  # fmt: skip


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
