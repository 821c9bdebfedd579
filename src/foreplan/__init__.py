"""Foreplan: how long programs take on each device of a mixed cluster, and what to do about it.

The public names below are imported when they are first used, so that ``import foreplan`` and the
import of a solver load neither torch nor TVM. No state is kept here and nothing is printed.

    plan = foreplan.plan("serving", "llama-2-7b", "cluster.yaml", {"batch": 8, ...})
    plan.save("plan.json")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from foreplan.cost_models.costs import (
        Collective,
        Copy,
        CostBook,
        CostSource,
        Estimate,
        HostLaunch,
        HostWait,
        Lag,
        Segment,
        StorageAccess,
        Work,
    )
    from foreplan.cost_models.layout import Layout
    from foreplan.cost_models.memory import MemoryLedger
    from foreplan.cost_models.predictor import Predictor
    from foreplan.cost_models.ranking import Ranking, rank_devices
    from foreplan.cost_models.replay import predict_latency
    from foreplan.cost_models.replayed_pass import Replay
    from foreplan.cost_models.schedule import Action, Memory, Schedule
    from foreplan.cost_models.schedule_builder import ScheduleBuilder
    from foreplan.cost_models.simulator import Contention, Simulator, simulate
    from foreplan.cost_models.timeline import Timeline, chrome_trace
    from foreplan.datasets.cluster import Cluster
    from foreplan.datasets.device import Device
    from foreplan.datasets.models.load_model import load_model
    from foreplan.datasets.models.model import Model
    from foreplan.datasets.profile import Profile
    from foreplan.datasets.program import Program, Variant
    from foreplan.datasets.specs import StrictModel
    from foreplan.errors import (
        FailedProgramError,
        ForeplanError,
        InfeasibleError,
        MissingDataError,
        SpecError,
        VerificationError,
    )
    from foreplan.planner.api import load_cluster, plan
    from foreplan.planner.base import (
        Agreement,
        Bound,
        Choice,
        Kernels,
        Planner,
        Problem,
        TimeLimit,
    )
    from foreplan.planner.bubbles.decision import BubblesDecision
    from foreplan.planner.bubbles.spec import BubblesWorkload
    from foreplan.planner.export.exporter import Exporter, Written, export_plan
    from foreplan.planner.plan import Plan, decision_of, load_plan
    from foreplan.planner.precision.execution.modules import apply_precision, remove_precision
    from foreplan.planner.precision.networks import register_network
    from foreplan.planner.precision.spec import PrecisionDecision, PrecisionWorkload, WorkerDecision
    from foreplan.planner.precision.task import TrainingTask
    from foreplan.planner.report.files import write_report
    from foreplan.planner.serving.spec import ServingDecision, ServingWorkload, StageDecision
    from foreplan.planner.verify.verification import Verification, load_verification
    from foreplan.planner.verify.verify import VerificationRun, verify
    from foreplan.solvers.solution import Solution, SolutionStatus

__all__ = [
    "Action",
    "Agreement",
    "Bound",
    "BubblesDecision",
    "BubblesWorkload",
    "Choice",
    "Cluster",
    "Collective",
    "Contention",
    "Copy",
    "CostBook",
    "CostSource",
    "Device",
    "Estimate",
    "Exporter",
    "FailedProgramError",
    "ForeplanError",
    "HostLaunch",
    "HostWait",
    "InfeasibleError",
    "Kernels",
    "Lag",
    "Layout",
    "Memory",
    "MemoryLedger",
    "MissingDataError",
    "Model",
    "Plan",
    "Planner",
    "PrecisionDecision",
    "PrecisionWorkload",
    "Predictor",
    "Problem",
    "Profile",
    "Program",
    "Ranking",
    "Replay",
    "Schedule",
    "ScheduleBuilder",
    "Segment",
    "ServingDecision",
    "ServingWorkload",
    "Simulator",
    "Solution",
    "SolutionStatus",
    "SpecError",
    "StageDecision",
    "StorageAccess",
    "StrictModel",
    "TimeLimit",
    "Timeline",
    "TrainingTask",
    "Variant",
    "Verification",
    "VerificationError",
    "VerificationRun",
    "Work",
    "WorkerDecision",
    "Written",
    "__version__",
    "apply_precision",
    "chrome_trace",
    "decision_of",
    "export_plan",
    "load_cluster",
    "load_model",
    "load_plan",
    "load_verification",
    "plan",
    "predict_latency",
    "rank_devices",
    "register_network",
    "remove_precision",
    "simulate",
    "verify",
    "write_report",
]

_NAMES_OF = {
    "cost_models.costs": (
        "Collective Copy CostBook CostSource Estimate HostLaunch HostWait Lag Segment "
        "StorageAccess Work"
    ),
    "cost_models.layout": "Layout",
    "cost_models.memory": "MemoryLedger",
    "cost_models.predictor": "Predictor",
    "cost_models.ranking": "Ranking rank_devices",
    "cost_models.replay": "predict_latency",
    "cost_models.replayed_pass": "Replay",
    "cost_models.schedule": "Action Memory Schedule",
    "cost_models.schedule_builder": "ScheduleBuilder",
    "cost_models.simulator": "Contention Simulator simulate",
    "cost_models.timeline": "Timeline chrome_trace",
    "datasets.cluster": "Cluster",
    "datasets.device": "Device",
    "datasets.models.load_model": "load_model",
    "datasets.models.model": "Model",
    "datasets.profile": "Profile",
    "datasets.program": "Program Variant",
    "datasets.specs": "StrictModel",
    "errors": (
        "FailedProgramError ForeplanError InfeasibleError MissingDataError SpecError "
        "VerificationError"
    ),
    "planner.api": "load_cluster plan",
    "planner.base": "Agreement Bound Choice Kernels Planner Problem TimeLimit",
    "planner.bubbles.decision": "BubblesDecision",
    "planner.bubbles.spec": "BubblesWorkload",
    "planner.export.exporter": "Exporter Written export_plan",
    "planner.plan": "Plan decision_of load_plan",
    "planner.precision.execution.modules": "apply_precision remove_precision",
    "planner.precision.networks": "register_network",
    "planner.precision.spec": "PrecisionDecision PrecisionWorkload WorkerDecision",
    "planner.precision.task": "TrainingTask",
    "planner.report.files": "write_report",
    "planner.serving.spec": "ServingDecision ServingWorkload StageDecision",
    "planner.verify.verification": "Verification load_verification",
    "planner.verify.verify": "VerificationRun verify",
    "solvers.solution": "Solution SolutionStatus",
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
