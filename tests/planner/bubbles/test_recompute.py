"""Recomputation that a workload leaves open: candidates, what memory makes of them, the answer."""

import dataclasses
import json

import pytest
from tests.planner.bubbles.problems import problem

import foreplan
from foreplan.cost_models.costs import CostBook, Estimate, HostLaunch
from foreplan.cost_models.simulator import simulate
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.specs import validate
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles import BubblesPlanner
from foreplan.planner.bubbles.actions import parse_order
from foreplan.planner.bubbles.filling import Filling, fill
from foreplan.planner.bubbles.recompute import (
    candidates,
    described,
    is_open,
    settled,
    under,
)
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.export import export_plan
from foreplan.planner.verify.session import problem_of

DIMS = {"hidden": 1024, "heads": 8}
VIT = {"name": "vit", "dims": DIMS | {"layers": 8}, "tokens": 1024, "recompute": "auto"}
PLANNER = BubblesPlanner()


def asked(**rest):
    fields = {
        "encoders": [VIT], "backbone": DIMS | {"layers": 8, "vocab": 8000}, "sequence_length": 2048,
        "microbatch": 2, "microbatches": 4, "plan": {"pp": 4}, "unit_layers": [1.0],
        "recompute": "auto",
    }  # fmt: skip
    return fields | rest


def posed(memory_gb, **rest):
    made = problem(validate(BubblesWorkload, asked(**rest), "workload"))
    document = made.cluster.model_dump(mode="json", exclude_none=True)
    for device in document["devices"]:
        device["memory_bytes"] = int(memory_gb * 1e9)
    return dataclasses.replace(made, cluster=validate(Cluster, document, "cluster"))


def peak(where, decision):
    """Most bytes of any rank, states and activations."""
    timeline = simulate(PLANNER.schedule(where, decision), where.costs)
    ledgers = zip(PLANNER.memory(where, decision), timeline.peak_memory(), strict=True)
    return max(sum(ledger.with_peak(found).items.values()) for ledger, found in ledgers)


def test_with_room_for_all_nothing_is_computed_again():
    where = posed(100)
    choice = PLANNER.decide(where)
    assert choice.decision.recompute.backbone == "none"
    assert choice.decision.recompute.encoders == (False,)
    assert choice.about[0].startswith("recompute: backbone none, vit selective (searched)")
    # As fast as if it had been asked for.
    chosen = PLANNER.decide(under(where, choice.decision.recompute))
    assert chosen.decision.orders == choice.decision.orders


def test_less_room_costs_time_and_every_answer_fits():
    seconds, kinds = [], []
    for memory_gb in (20, 3.0, 2.4):
        where = posed(memory_gb)
        try:
            decision = PLANNER.decide(where).decision
        except InfeasibleError:
            break
        assert peak(where, decision) <= memory_gb * 1e9
        seconds.append(simulate(PLANNER.schedule(where, decision), where.costs).makespan_s)
        kinds.append(decision.recompute)
    assert len(set(kinds)) > 1
    assert seconds == sorted(seconds)


def test_the_search_is_no_worse_than_any_policy_asked_for():
    where = posed(3.0)
    best = PLANNER.decide(where).decision
    total = simulate(PLANNER.schedule(where, best), where.costs).makespan_s
    found = 0
    for chosen in candidates(where)[0]:
        one = under(where, chosen)
        try:
            decision = PLANNER.decide(one).decision
        except InfeasibleError:
            continue
        found += 1
        assert total <= simulate(PLANNER.schedule(one, decision), one.costs).makespan_s * (1 + 1e-6)
    assert found > 1


def test_a_plan_says_what_its_own_decision_computes_again():
    """Encoders on the one fast device win here: what was searched for filling is not the plan's."""
    towers = [
        {"name": "eye", "tokens": 729, "projected_tokens": 81, "pool": "concatenate",
         "dims": {"layers": 27, "hidden": 1152, "heads": 16, "ffn": 4304}, "recompute": "auto"},
    ]  # fmt: skip
    fields = asked(
        encoders=towers, plan=None, sequence_length=1111, microbatches=6,
        backbone={"layers": 18, "hidden": 1024, "heads": 16, "vocab": 32000},
    )  # fmt: skip
    made = foreplan.plan("bubbles", None, "1xh200@a,1xl4@b,1xt4@c", fields, costs="roofline")
    assert "solver" in {other.name for other in made.alternatives}
    problem_, decision = problem_of(made, PLANNER), foreplan.decision_of(made)
    said = [note for note in made.assumptions if note.startswith("recompute: ")]
    assert said == [described(problem_, decision.recompute)]
    (searched,) = [note for note in made.assumptions if "(searched)" in note]
    assert searched.startswith("of the solver's decision: recompute: ")


def test_every_candidate_not_taken_keeps_its_reason():
    where = posed(3.0)
    choice = PLANNER.decide(where)
    words = "\n".join((*choice.about, *choice.assumptions))
    for chosen in candidates(where)[0]:
        assert described(where, chosen).removeprefix("recompute: ") in words
    assert "rank 0" in words
    assert 0.0 < choice.bound.gap < 1.0


def test_candidates_follow_the_workload():
    def kinds(**rest):
        return [(c.backbone, c.encoders) for c in candidates(posed(20, **rest))[0]]

    assert len(kinds()) == 6
    assert kinds()[0] == ("none", (False,))
    assert kinds()[-1] == ("full", (True,))
    assert kinds(recompute="full", encoders=[VIT | {"frozen": True}]) == [("full", (False,))]
    assert kinds(recompute="none", encoders=[VIT | {"recompute": True}]) == [("none", (True,))]
    five = [VIT | {"name": f"e{k}", "tokens": 256} for k in range(5)]
    assert [c for _, c in kinds(recompute="full", encoders=five)] == [(False,) * 5, (True,) * 5]
    # A run's kernels never keep what "none" would keep.
    measured = posed(20)
    cpu = validate(Cluster, {"devices": [{"name": "cpu:threads=1", "count": 4}]}, "cluster")
    found, lost = candidates(dataclasses.replace(measured, cluster=cpu))
    assert {c.backbone for c in found} == {"selective", "full"}
    assert "never keeps" in lost["recompute: backbone none"]


def test_what_is_open_prices_nothing_until_a_decision_says_it():
    where = posed(100)
    assert is_open(where.workload)
    with pytest.raises(SpecError, match=r"workload\.recompute: got 'auto'"):
        TrainingStep(where, where.workload.plan)
    decision = PLANNER.decide(where).decision
    assert not is_open(settled(where, decision).workload)
    with pytest.raises(SpecError, match=r"workload\.recompute"):
        PLANNER.schedule(where, decision.model_copy(update={"recompute": None}))


class MadeUp:
    """A price for whatever is asked."""

    def estimate(self, work, device):
        return Estimate.exact(0.0 if isinstance(work, HostLaunch) else 1e-3)


@pytest.mark.parametrize(
    ("fields", "encoder", "pieces", "sums"),
    [
        ({"recompute": "selective"}, False, True, True),
        ({"recompute": "full"}, False, False, True),
        ({"recompute": "selective"}, True, True, False),
        ({"recompute": "full"}, True, False, False),
        ({"recompute": "selective", "schedule": "zb-h1"}, False, False, True),
    ],
)
def test_lanes_of_a_real_run_divide_no_work_that_is_computed_again(fields, encoder, pieces, sums):
    rest = fields | {"encoders": [VIT | {"recompute": encoder}], "plan": {"pp": 2, "tp": 2}}
    workload = validate(BubblesWorkload, asked(unit_layers=[0.5], **rest), "workload")
    devices = [{"name": "cpu:threads=1", "count": 4, "memory_bytes": 64 << 30}]
    cluster = validate(Cluster, {"devices": devices}, "cluster")
    where = Problem(None, cluster, workload, CostBook([MadeUp()]))
    search = BubbleSearch(where)
    (layout,) = search.layouts
    (timeline,) = search.timelines(layout, None, 1)
    words = [
        word for order in fill(Filling(timeline, 1, 0.5)).decision.orders
        for word in parse_order(order)
    ]  # fmt: skip
    assert any(word.piece >= 0 for word in words) == pieces
    assert any(word.op.islower() for word in words) == sums


def test_plan_baselines_and_exports_state_it(tmp_path):
    made = foreplan.plan("bubbles", None, posed(2.6).cluster, asked(), costs="roofline")
    assert made.decision["recompute"]["backbone"] in ("none", "selective", "full")
    assert made.alternatives
    for other in made.alternatives:
        assert other.decision["recompute"] is not None
        assert other.predicted.total_s >= made.predicted.total_s * (1 - 1e-9)
    document = json.loads(made.to_json())
    document["decision"]["recompute"] = {"backbone": "full", "encoders": [True]}
    del document["provenance"]["planned_for"]  # or the edit would be refused
    again = foreplan.load_plan(_written(tmp_path, document))
    for target, flag in (
        ("megatron", "--recompute-granularity full"), ("torchtitan", "activation-checkpoint:full")
    ):  # fmt: skip
        written = export_plan(again, target, tmp_path / target)
        assert flag in written.files["launch.sh"]
        assert any("input of each unit of vit" in line for line in written.not_expressed)


def _written(folder, document):
    path = folder / "edited.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"recompute": "sometimes"},
         "workload: recompute: got 'sometimes', expected 'none', 'selective', 'full' or 'auto'"),
        ({"encoders": [VIT | {"recompute": "maybe"}]},
         "workload: encoders[0].recompute: got 'maybe', expected true, false or auto"),
    ],
)  # fmt: skip
def test_another_word_is_refused_in_one_line(fields, line):
    with pytest.raises(SpecError) as refused:
        validate(BubblesWorkload, asked(**fields), "workload")
    assert str(refused.value) == line
