"""PyTorch's autocast and torchao: a precision plan as one configuration a rank.

Each ``rankN.json`` holds what `foreplan.planner.precision.execution.export` makes of the rank's
variants: arguments of ``torch.autocast``, modules that stay out of it and, for torchao, what to
convert. Plans that these tools cannot carry out are refused; ``foreplan.apply_precision`` can.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from foreplan.cost_models.roofline import without_bf16
from foreplan.datasets.kernels.training_recipe import recipe
from foreplan.errors import SpecError
from foreplan.planner.export.exporter import Exporter, Written
from foreplan.planner.plan import Plan, decision_of
from foreplan.planner.precision.execution.export import (
    autocast_configuration,
    torchao_configuration,
)
from foreplan.planner.precision.spec import PrecisionDecision, WorkerDecision

#: Dtypes of a module's forward and backward products, by rank and module.
Products = list[dict[str, tuple[str, str]]]
#: Where a chip has no bf16, fp16 runs instead, whose small gradients vanish unless they are scaled.
_SCALED = "loss scaling: a GPU without bf16 computes in float16, use torch.amp.GradScaler there"
_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


class _TrainingExporter(Exporter):
    """One JSON file a rank."""

    tool: ClassVar[str]

    @abstractmethod
    def configuration(self, worker: WorkerDecision) -> dict[str, Any]:
        """What the tool is told for one rank.

        Raises:
            SpecError: it cannot express a module's variant.
        """

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`."""
        files, notes = {}, ["which rank is which device: start the ranks in the plan's order"]
        for worker in _decision(plan).workers:
            made = self.configuration(worker)
            notes += made.pop("assumptions", [])
            if made["autocast"]["dtype"] == "bfloat16" and _as_fp16(plan, worker):
                made["autocast"]["dtype"] = "float16"
                if made["autocast"]["enabled"]:
                    notes.append(_SCALED)
            document = {
                "rank": worker.rank, "device": worker.device, "modules": _computing(worker), **made
            }  # fmt: skip
            files[f"rank{worker.rank}.json"] = json.dumps(document, indent=1) + "\n"
        return Written(files, tuple(dict.fromkeys(notes)))

    def read(self, files: Mapping[str, str]) -> Products:
        """See `Exporter.read`: the dtypes that the configurations give each module's products."""
        ranks = sorted((json.loads(text) for text in files.values()), key=lambda one: one["rank"])
        return [{name: _products(name, one) for name in one["modules"]} for one in ranks]

    def expected(self, plan: Plan) -> Products:
        """See `Exporter.expected`."""
        found: Products = []
        for worker in _decision(plan).workers:
            recipes = {name: recipe(worker.operators[name]) for name in _computing(worker)}
            low = {"bf16": "fp16"} if _as_fp16(plan, worker) else {}
            found.append(
                {
                    name: (low.get(one.forward, one.forward), low.get(one.backward, one.backward))
                    for name, one in recipes.items()
                }
            )
        return found


class AutocastExporter(_TrainingExporter):
    """For ``torch.autocast``, on processors and GPUs."""

    target = "autocast"

    def configuration(self, worker: WorkerDecision) -> dict[str, Any]:
        """See `autocast_configuration`."""
        return autocast_configuration(worker.operators, _kind(worker))


class TorchaoExporter(_TrainingExporter):
    """For torchao's 8-bit training beside autocast, on GPUs."""

    target = "torchao"

    def configuration(self, worker: WorkerDecision) -> dict[str, Any]:
        """See `torchao_configuration`.

        Raises:
            SpecError: the worker is no GPU.
        """
        if _kind(worker) != "cuda":
            raise SpecError(
                f"plan: device of rank {worker.rank}", got=worker.device, expected="a GPU",
                fix="export to autocast, or use foreplan.apply_precision",
            )  # fmt: skip
        return torchao_configuration(worker.operators)


def _decision(plan: Plan) -> PrecisionDecision:
    if plan.kind != "precision":
        raise SpecError("plan.kind", got=plan.kind, expected="precision")
    return decision_of(plan, PrecisionDecision)


def _as_fp16(plan: Plan, worker: WorkerDecision) -> bool:
    """Whether the worker's GPU has no bf16, so that fp16 was priced in its place."""
    return "fp16" in without_bf16([plan.cluster.ranks()[worker.rank]])


def _kind(worker: WorkerDecision) -> str:
    """``cpu``, or ``cuda`` for GPUs by number and for those of the zoo."""
    return "cpu" if worker.device.rpartition("/")[2].startswith("cpu") else "cuda"


def _computing(worker: WorkerDecision) -> list[str]:
    """Modules with products; look-ups stay as they are."""
    return [name for name, text in worker.operators.items() if "embedding" not in text]


def _products(name: str, document: Mapping[str, Any]) -> tuple[str, str]:
    """Dtypes of the forward and the backward products that a configuration gives a module."""
    float8, int8 = document.get("float8"), document.get("int8")
    if float8 and name in float8["modules"]:
        return "fp8", "fp8"
    if int8 and name in int8["modules"]:
        low = _DTYPES[document["autocast"]["dtype"]]
        return "int8", "int8" if int8["config"]["grad_input"] else low
    if name in document["fp32_modules"] or not document["autocast"]["enabled"]:
        return "fp32", "fp32"
    dtype = _DTYPES[document["autocast"]["dtype"]]
    return dtype, dtype
