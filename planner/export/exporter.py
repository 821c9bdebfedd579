"""`Exporter`: writes a plan as the files and flags of one launcher, or refuses and says why.

What a target cannot express at all is refused. What it decides by itself (vLLM its micro-batches)
is listed in ``not_expressed`` and handed to the user. Every export is read back and compared.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from foreplan.datasets.storage import folder_for, write_together
from foreplan.errors import ForeplanError, SpecError
from foreplan.planner.export.export_record import RECORD_FILE, ExportRecord
from foreplan.planner.export.handover import Handover
from foreplan.planner.installed import Installed
from foreplan.planner.plan import Plan, load_plan

_EXPORTERS = Installed(
    "foreplan.exporters",
    MappingProxyType(
        {
            "vllm": "foreplan.planner.export.vllm:VllmExporter",
            "sglang": "foreplan.planner.export.sglang:SglangExporter",
            "tensorrt-llm": "foreplan.planner.export.tensorrt_llm:TensorRtLlmExporter",
            "llama.cpp": "foreplan.planner.export.llama_cpp:LlamaCppExporter",
            "torchrun": "foreplan.planner.export.torchrun:TorchrunExporter",
            "autocast": "foreplan.planner.export.mixed_precision:AutocastExporter",
            "torchao": "foreplan.planner.export.mixed_precision:TorchaoExporter",
            "torchtitan": "foreplan.planner.export.torchtitan:TorchtitanExporter",
            "megatron": "foreplan.planner.export.megatron:MegatronExporter",
        }
    ),
    "an Exporter",
)


#: The plan itself, as a launcher of ours reads it.
PLAN_FILE = "plan.json"


@dataclass(frozen=True, slots=True)
class Written:
    """What an export produced.

    Attributes:
        files: text by file name.
        not_expressed: what the plan says and the target decides by itself, one line each.
    """

    files: Mapping[str, str]
    not_expressed: tuple[str, ...] = ()


class Exporter(ABC):
    """One target; stateless.

    Attributes:
        target: its word on the command line.
    """

    target: ClassVar[str]

    @abstractmethod
    def write(self, plan: Plan) -> Written:
        """The plan in the target's words.

        Raises:
            SpecError: the target cannot express the plan; names the plan's line.
        """

    @abstractmethod
    def read(self, files: Mapping[str, str]) -> object:
        """What the files say, to be compared with `expected`; used to prove a round trip."""

    def expected(self, plan: Plan) -> object:
        """What `read` has to find: by default the plan's `Handover`."""
        return Handover.of(plan)


def targets() -> tuple[str, ...]:
    """Names of every exporter, ours first."""
    return _EXPORTERS.names()


def exporter(target: str) -> Exporter:
    """The exporter of a target.

    Raises:
        SpecError: no such target, or its package does not provide one.
    """
    made = _EXPORTERS.load(target, "--to")
    try:
        found = made() if callable(made) else made
    except Exception as error:  # a stranger's package may fail in any way
        raise SpecError(f"exporter {target}", got=error, expected="an Exporter") from error
    if not isinstance(found, Exporter):
        raise SpecError(f"exporter {target}", got=type(found).__name__, expected="an Exporter")
    return found


def read_back(target: str, files: Mapping[str, str]) -> object:
    """What the files of an export say, as its exporter reads them; they may be damaged.

    Args:
        target: one of `targets`.
        files: text by file name.

    Raises:
        SpecError: no such target, or files that its exporter did not write.
    """
    found = exporter(target)
    try:
        return found.read(files)
    except (ForeplanError, MemoryError):
        raise
    except Exception as error:  # whatever damage does to a parser, a stranger's too
        raise SpecError(
            f"files for {target}", got=type(error).__name__, expected="what its exporter wrote"
        ) from error


def export_plan(
    plan: Plan | str | os.PathLike[str], target: str, folder: str | os.PathLike[str]
) -> Written:
    """Write a plan for a target, after reading back what would be written.

    Args:
        plan: a plan or its file.
        target: one of `targets`.
        folder: made where it does not exist; files of an earlier export, to whatever target, are
            replaced or removed, unless they were edited.

    Raises:
        SpecError: no such target, a plan that it cannot express, a round trip that altered
            something, or a folder that cannot be written or holds, under the name of a file of the
            export, one that was edited or that no export wrote.
    """
    found = exporter(target)
    loaded = plan if isinstance(plan, Plan) else load_plan(plan)
    loaded = loaded.written_for(folder)  # where its document then lies
    written = found.write(loaded)
    if read_back(target, written.files) != found.expected(loaded):
        raise SpecError(
            f"export to {target}", got="another plan when read back", expected="the same plan"
        )
    output = Path(folder)
    with folder_for(output):
        earlier = ExportRecord.read(output)
        _keep_others(output, written.files, earlier)
        record = ExportRecord.of(written.files)
        write_together(output, {**written.files, RECORD_FILE: record.text})
        earlier.remove_others(output, written.files)
    return written


def _keep_others(folder: Path, files: Mapping[str, str], earlier: ExportRecord) -> None:
    """Refuse to write over what no earlier export has put there, or somebody edited since.

    Raises:
        SpecError: names the first such file.
    """
    for name, text in files.items():
        path = folder / name
        if not path.exists() or earlier.holds(folder, name) or _says(path, text):
            continue
        edited = name in earlier.digests
        raise SpecError(
            str(path), got="an edited file" if edited else "another file",
            expected="none, or an earlier export's",
            fix="move it away, or export into a folder of its own",
        )  # fmt: skip


def _says(path: Path, text: str) -> bool:
    """Whether a file says the same as a text; of a JSON document whatever its spaces."""
    try:
        found = path.read_text(encoding="utf-8")
        return found == text or (path.suffix == ".json" and json.loads(found) == json.loads(text))
    except (OSError, ValueError):
        return False
