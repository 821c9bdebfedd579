"""Hosts in bubble plans: filling that they are too slow for is not planned."""

import dataclasses
import json

import pytest
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.cost_models.costs import CostBook
from foreplan.datasets import device_zoo
from foreplan.datasets.profile import HostTimes, Profile
from foreplan.planner.api import plan
from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.bubbles.replays import simulated
from foreplan.planner.bubbles.robustness import jittered_s
from foreplan.planner.bubbles.training_step import TrainingStep
from foreplan.planner.predict import Forecast

PLANNER = BubblesPlanner()


@pytest.fixture(scope="module")
def asked():
    """Two lanes, whose sums leave idle time inside passes."""
    encoders = encoder(layers=4, forward_s=0.02, backward_s=0.04)
    return workload(encoders, pp=2, tp=2, chunks=1, layers=4, microbatches=4, tensor_s=0.02)


def with_hosts(where, extra_s):
    """The same problem with hosts: units and pieces of passes take them so long, nothing else."""
    step = TrainingStep(where, where.workload.plan)
    layers, halves = step.backbone.layers, 2 * step.encoders[0].layers
    works = {
        work
        for op in "FB"
        for work in (
            *(step.piece(0, layers, op, piece) for piece in range(2 * layers)),
            *(step.unit(0, 2, half, half + 1, op, bare=True) for half in range(halves)),
        )
    }
    costs = where.costs
    book = CostBook(costs.sources, given=costs.given, issued=dict.fromkeys(works, extra_s))
    return dataclasses.replace(where, costs=book)


def test_fine_filling_is_left_where_its_host_is_too_slow(asked):
    where = problem(asked)
    fine = PLANNER.decide(where).decision
    assert fine.fill == "fine"
    assert any(".0f0" in order for order in fine.orders)  # halves with their sums apart
    for extra_s, left in ((1e-6, False), (0.2, True)):
        hosted = with_hosts(where, extra_s)
        choice = PLANNER.decide(hosted)
        total = simulated(hosted, choice.decision).makespan_s
        assert (choice.decision != fine) is left
        assert (total < 0.9 * simulated(hosted, fine).makespan_s) is left
        assert choice.bound.lower_s <= total
        for other in PLANNER.baselines(hosted).values():
            assert isinstance(other, str) or simulated(hosted, other).makespan_s >= total - 1e-9


def test_every_prediction_knows_hosts(asked):
    where = problem(asked)
    hosted = with_hosts(where, 0.2)
    fine = PLANNER.decide(where).decision
    timeline = simulated(hosted, fine)
    assert timeline.makespan_s > 1.1 * simulated(where, fine).makespan_s
    forecast = Forecast(PLANNER, hosted, fine)
    assert forecast.total_s == pytest.approx(timeline.makespan_s)
    assert forecast.timeline.schedule.ops == Forecast(PLANNER, where, fine).schedule.ops
    still = jittered_s(timeline, hosted.costs, 0.0, draws=1, seed=0)
    assert still[0] == pytest.approx(timeline.makespan_s)


def planned(folder, call_s):
    """A plan for two profiled GPUs whose host takes so long for a call; unknown: ``None``."""
    host = None
    if call_s is not None:
        modes = dict.fromkeys(("inference", "forward", "backward"), call_s)
        host = HostTimes(
            call_s={"add": modes}, update_s=(call_s, 0.0), factor=dict.fromkeys(modes, 1.0),
            line_s=dict.fromkeys(modes, 0.0),
        )  # fmt: skip
    for name in ("cuda-0", "cuda-1"):
        figures = device_zoo.device("h200").model_copy(update={"name": name.replace("-", ":")})
        profile = Profile(device=figures, software={}, host=host)
        text = profile.model_dump_json(by_alias=True, exclude_none=True)
        (folder / f"{name}.json").write_text(text)
    tier = {"group": ["all"], "scope": "host", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e11,
            "source": "chosen"}  # fmt: skip
    devices = [{"name": f"cuda:{k}", "profile": f"cuda-{k}.json"} for k in range(2)]
    (folder / "cluster.yaml").write_text(json.dumps({"devices": devices, "tiers": [tier]}))
    sizes = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 512}
    vit = {"name": "vit", "dims": {"layers": 2, "hidden": 128, "heads": 4}, "tokens": 64,
           "patch_features": 48}  # fmt: skip
    asked = {"backbone": sizes, "encoders": [vit], "sequence_length": 128, "microbatch": 1,
             "microbatches": 4, "plan": {"pp": 2}}  # fmt: skip
    return plan("bubbles", None, folder / "cluster.yaml", asked)


def test_plans_know_the_host_of_a_profiled_gpu(tmp_path):
    without, quick, slow = (planned(tmp_path, call_s) for call_s in (None, 1e-9, 1e-3))
    said = ["hosts issue" in " ".join(made.assumptions) for made in (without, quick, slow)]
    assert said == [False, True, True]
    totals = [made.predicted.total_s for made in (without, quick, slow)]
    assert totals[1] == pytest.approx(totals[0], rel=1e-3)
    # A layer's forward pass is some ten calls, its backward pass too: four of each on a rank.
    assert totals[2] > totals[0] + 2 * 4 * 2 * 10 * 1e-3
