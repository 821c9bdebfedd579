"""Our own planners, cost sources and exporters keep the contracts; broken ones are caught."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import foreplan
from foreplan import testing
from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.costs import Collective, Copy, Estimate, HostLaunch, Work
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.sources.link_costs import LinkSource
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.cost_models.sources.tables import InterpolatedSource, MeasuredSource
from foreplan.datasets import device_zoo
from foreplan.datasets.program import Variant, program
from foreplan.datasets.specs import StrictModel, validate
from foreplan.planner.base import Bound, Choice, Planner, Problem
from foreplan.planner.export.exporter import Exporter, Written, exporter, targets
from foreplan.planner.registry import kinds, planner
from foreplan.testing import ContractError

TOWER = {"layers": 4, "hidden": 512, "heads": 8}
PROBLEMS: dict[str, tuple[str | None, str, dict[str, Any]]] = {
    "serving": (
        "tiny-llama-random", "a100-80g,2xl4", {"batch": 4, "prompt_tokens": 16, "new_tokens": 8},
    ),
    "replicas": (
        "tiny-llama-random", "2xl4,a100-80g", {"batch": 4, "prompt_tokens": 16, "new_tokens": 8},
    ),
    "precision": (None, "v100-32g,t4", {"network": "digits_mlp", "batch": 8}),
    "bubbles": (
        None, "2xa100-80g",
        {
            "backbone": TOWER | {"vocab": 2048}, "sequence_length": 256, "microbatches": 4,
            "encoders": [{"name": "vit", "dims": TOWER, "tokens": 128}], "plan": {"pp": 2},
        },
    ),
}  # fmt: skip


def problem(kind: str) -> Problem[Any]:
    model, devices, fields = PROBLEMS[kind]
    chosen, (cluster, _) = planner(kind), foreplan.load_cluster(devices)
    workload = validate(chosen.workload_type, fields, "workload")
    costs = cost_book(cluster, Profiles(), "roofline", given=chosen.given(workload))
    return Problem(foreplan.load_model(model) if model else None, cluster, workload, costs)


@pytest.mark.parametrize("kind", kinds())
def test_our_planners_keep_the_contract(kind: str) -> None:
    choice = testing.check_planner(planner(kind), problem(kind))
    assert isinstance(choice.decision, planner(kind).decision_type)


LINEAR = program("linear", Variant("bf16", "bf16", "torch.linear"), rows=64, n=1024, k=1024)
WORKS: tuple[Work, ...] = (
    LINEAR,
    program("linear", Variant("bf16", "bf16", "torch.linear"), rows=64, n=4096, k=1024),
    Copy(1 << 20),
    Collective("p2p", 1 << 20, (0, 1)),
    Collective("all_reduce", 1 << 20, (0, 1), "fp32"),
    HostLaunch(2),
)


def test_our_cost_sources_keep_the_contract() -> None:
    cluster, _ = foreplan.load_cluster("2xt4")
    rank = cluster.ranks()[0]
    assert testing.check_cost_source(LinkSource(cluster), WORKS, rank.label) == 2
    roofline = RooflineSource({"t4": device_zoo.device("t4")})
    assert testing.check_cost_source(roofline, WORKS, "t4") >= 2
    assert testing.check_cost_source(PredictedSource(), WORKS, "t4") >= 2


def test_our_profile_sources_keep_the_contract() -> None:
    from foreplan.datasets.profile import Profile

    row = {
        "op": "linear", "variant": "bf16/bf16/torch.linear", "status": "ok", "samples": 20,
        "low_s": 0.9e-4, "median_s": 1e-4, "high_s": 1.2e-4,
    }  # fmt: skip
    sizes = ({"rows": 64, "n": 1024, "k": 1024}, {"rows": 64, "n": 8192, "k": 1024})
    rows = [row | {"dims": size, "median_s": 1e-4 * (k + 1), "high_s": 3e-4}
            for k, size in enumerate(sizes)]  # fmt: skip
    device = device_zoo.device("t4").model_dump(mode="json", by_alias=True, exclude_none=True)
    document = {
        "schema": "foreplan.profile/1", "device": device, "software": {"torch": "2"}, "rows": rows,
    }  # fmt: skip
    profiles = {"here": validate(Profile, document, "profile")}
    assert testing.check_cost_source(MeasuredSource(profiles), WORKS, "here") >= 1
    assert testing.check_cost_source(InterpolatedSource(profiles), WORKS, "here") >= 2


@pytest.fixture(scope="module")
def plans() -> tuple[foreplan.Plan, foreplan.Plan]:
    """Two serving plans whose stages differ."""
    workload = {"batch": 8, "prompt_tokens": 128, "new_tokens": 16}
    made = [
        foreplan.plan("serving", "llama-3.2-1b", "2xl4", workload | more, costs="roofline")
        for more in ({"bits": (8,)}, {"bits": (4,)})
    ]
    return made[0], made[1]


def planned(kind: str, **fields: Any) -> foreplan.Plan:
    model, devices, workload = PROBLEMS[kind]
    return foreplan.plan(kind, model, devices, workload | fields, costs="roofline")


@pytest.fixture(scope="module")
def pairs(
    plans: tuple[foreplan.Plan, foreplan.Plan],
) -> dict[str, tuple[foreplan.Plan, foreplan.Plan]]:
    """Two plans of each kind that differ in what a launcher has to do."""
    full = planned("precision")
    decision = json.loads(json.dumps(full.decision).replace("fp32/fp32/", "fp32/bf16/"))
    low = full.model_copy(update={"decision": decision})
    bubbles = [planned("bubbles", microbatches=n, schedule="1f1b") for n in (4, 8)]
    return {"serving": plans, "precision": (full, low), "bubbles": (bubbles[0], bubbles[1])}


#: Kind of plan that a target is for; serving where it does not stand here.
FOR = {
    "autocast": "precision", "torchao": "precision", "torchtitan": "bubbles", "megatron": "bubbles",
}  # fmt: skip


@pytest.mark.parametrize("target", targets())
def test_our_exporters_keep_the_contract(
    pairs: dict[str, tuple[foreplan.Plan, foreplan.Plan]], target: str
) -> None:
    testing.check_exporter(exporter(target), *pairs[FOR.get(target, "serving")])


# ------------------------------------------------------------------------- what breaks a contract


class Flat:
    """A cost source that keeps its promises."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        if device != "here" or not isinstance(work, Copy):
            return None
        return Estimate.exact(work.bytes * 1e-9, "theory")


class EveryDevice(Flat):
    def estimate(self, work: Work, device: str) -> Estimate | None:
        return super().estimate(work, "here")


class Forgetful(Flat):
    calls = 0

    def estimate(self, work: Work, device: str) -> Estimate | None:
        self.calls += 1
        found = super().estimate(work, device)
        return None if found is None else found.times(self.calls)


class Backwards(Flat):
    def estimate(self, work: Work, device: str) -> Estimate | None:
        found = super().estimate(work, device)
        return found and dataclasses.replace(found, low_s=2 * found.mean_s)


class Nowhere(Flat):
    def estimate(self, work: Work, device: str) -> Estimate | None:
        found = super().estimate(work, device)
        return found and dataclasses.replace(found, source="experience")


class Nothing(Flat):
    def estimate(self, work: Work, device: str) -> Estimate | None:
        return None


def test_a_cost_source_that_keeps_its_promises_passes() -> None:
    assert testing.check_cost_source(Flat(), WORKS, "here") == 1


@pytest.mark.parametrize(
    ("source", "promise"),
    [
        (EveryDevice(), "device that it does not know"),
        (Forgetful(), "same answer"),
        (Backwards(), "low_s <= mean_s"),
        (Nowhere(), "names a source"),
        (Nothing(), "at least one"),
    ],
)
def test_a_cost_source_that_does_not_is_caught(source: Flat, promise: str) -> None:
    with pytest.raises(ContractError, match=promise):
        testing.check_cost_source(source, WORKS, "here")


class Bits(Exporter):
    """Writes the bits of every layer."""

    target = "bits"

    def write(self, plan: foreplan.Plan) -> Written:
        decision = foreplan.decision_of(plan, foreplan.ServingDecision)
        return Written({"bits.json": json.dumps(decision.bits)})

    def read(self, files: Any) -> object:
        return tuple(json.loads(files["bits.json"]))

    def expected(self, plan: foreplan.Plan) -> object:
        return foreplan.decision_of(plan, foreplan.ServingDecision).bits


class Lossy(Bits):
    def write(self, plan: foreplan.Plan) -> Written:
        return Written({"bits.json": json.dumps([16] * 16)})


class Count(Bits):
    """Reads back less than the target has to know."""

    def read(self, files: Any) -> object:
        return len(json.loads(files["bits.json"]))

    def expected(self, plan: foreplan.Plan) -> object:
        return len(super().expected(plan))  # type: ignore[arg-type]


class Elsewhere(Bits):
    def write(self, plan: foreplan.Plan) -> Written:
        return Written({"../bits.json": super().write(plan).files["bits.json"]})


def test_an_exporter_that_keeps_its_promises_passes(
    plans: tuple[foreplan.Plan, foreplan.Plan],
) -> None:
    testing.check_exporter(Bits(), *plans)


@pytest.mark.parametrize(
    ("broken", "promise"),
    [(Lossy(), "expected"), (Count(), "apart"), (Elsewhere(), "without a folder")],
)
def test_an_exporter_that_does_not_is_caught(
    plans: tuple[foreplan.Plan, foreplan.Plan], broken: Exporter, promise: str
) -> None:
    with pytest.raises(ContractError, match=promise):
        testing.check_exporter(broken, *plans)


def broken(**methods: Any) -> Planner[Any, Any]:
    """Our serving planner with methods of its own."""
    return type("Broken", (type(planner("serving")),), methods)()


def _restless(self: Any, problem: Problem[Any]) -> Choice[Any]:
    """Decides between two numbers of bits by turns."""
    self.calls = getattr(self, "calls", 0) + 1
    fields = problem.workload.model_dump() | {"bits": (8,) if self.calls % 2 else (4,)}
    workload = validate(type(problem.workload), fields, "workload")
    return planner("serving").decide(dataclasses.replace(problem, workload=workload))


def _certain(self: Any, problem: Problem[Any]) -> Choice[Any]:
    choice = planner("serving").decide(problem)
    return dataclasses.replace(choice, bound=Bound("certain", None, None, "intuition"))


def _everywhere(self: Any, problem: Problem[Any], decision: Any) -> tuple[int, ...]:
    return (0,) * (len(decision.stages) + 1)


def _leaning_on_costs(self: Any, problem: Problem[Any], decision: Any) -> Any:
    if not problem.costs.sources:  # as in a rank's process
        moved = {"rank": 1, "device": problem.cluster.ranks()[1].label}
        stages = (decision.stages[0].model_copy(update=moved),)
        decision = decision.model_copy(update={"stages": stages, "decode_microbatch": 2})
    return planner("serving").schedule(problem, decision)


@pytest.mark.parametrize(
    ("made", "promise"),
    [
        (broken(kind="two words"), "one word"),
        (broken(decision_type=dict), "StrictModel"),
        (broken(workload_type=type("Other", (StrictModel,), {})), "gives a Other"),
        (broken(decide=_restless), "decides the same twice"),
        (broken(decide=_certain), "has a status"),
        (broken(ranks=_everywhere), "one device of the cluster"),
        (broken(baselines=lambda self, problem: {"mine": " "}), "says why"),
        (broken(metrics=lambda *_: {"tokens_per_s": float("nan")}), "finite tokens_per_s"),
        (broken(schedule=_leaning_on_costs), "without costs"),
    ],
)
def test_a_planner_that_breaks_a_promise_is_caught(made: Planner[Any, Any], promise: str) -> None:
    with pytest.raises(ContractError, match=promise):
        testing.check_planner(made, problem("serving"))


def test_a_choice_that_does_not_fit_is_caught() -> None:
    asked = problem("serving")
    entries = tuple(e.model_copy(update={"memory_bytes": 1 << 20}) for e in asked.cluster.devices)
    small = asked.cluster.model_copy(update={"devices": entries})
    planned = planner("serving").decide(asked)
    made = broken(decide=lambda self, problem: planned, baselines=lambda self, problem: {})
    with pytest.raises(ContractError, match="memory"):
        testing.check_planner(made, dataclasses.replace(asked, cluster=small))


def test_the_decision_of_another_kind_is_refused(
    plans: tuple[foreplan.Plan, foreplan.Plan],
) -> None:
    assert foreplan.decision_of(plans[0], foreplan.ServingDecision).bits == (8,) * 16
    with pytest.raises(foreplan.SpecError, match="PrecisionDecision"):
        foreplan.decision_of(plans[0], foreplan.PrecisionDecision)
