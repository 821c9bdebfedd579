"""Stages cut by memory against every cut there is, measured by the ledger of the simulated step."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.specs import validate
from foreplan.errors import InfeasibleError
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.backbone import BackboneTimeline, bare_decision, layer_seconds
from foreplan.planner.bubbles.baselines import balanced, chain_seconds, first_stage, three_phase
from foreplan.planner.bubbles.cuts import min_max_cuts
from foreplan.planner.bubbles.decision import BackboneStage
from foreplan.planner.bubbles.filling import Filling, fill
from foreplan.planner.bubbles.ledger import ledgers
from foreplan.planner.bubbles.memory_cuts import MemoryCuts
from foreplan.planner.bubbles.replays import lacks
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.spec import BubblesWorkload

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2")
DEVICES = ("t4", "h200", "a100_sxm4_80gb", "rtx_3090")


def every_cut(layers, parts):
    return [[0, *inside, layers] for inside in itertools.combinations(range(1, layers), parts - 1)]


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_a_cut_within_limits_is_the_best_of_all_cuts(seed, parts, more):
    random_ = np.random.default_rng(seed)
    n = parts + more
    seconds = random_.random((parts, n))
    allowed = random_.random((parts, n + 1, n + 1)) < 0.7
    lengths = [
        max(seconds[k, a:b].sum() for k, (a, b) in enumerate(itertools.pairwise(cut)))
        for cut in every_cut(n, parts)
        if all(allowed[k, a, b] for k, (a, b) in enumerate(itertools.pairwise(cut)))
    ]
    if not lengths:
        with pytest.raises(InfeasibleError, match="no cut"):
            min_max_cuts(seconds, parts, lambda k, a, b: allowed[k, a, b])
        return
    cut = min_max_cuts(seconds, parts, lambda k, a, b: allowed[k, a, b])
    spans = list(itertools.pairwise(cut))
    assert all(allowed[k, a, b] for k, (a, b) in enumerate(spans))
    longest = max(seconds[k, a:b].sum() for k, (a, b) in enumerate(spans))
    assert longest == pytest.approx(min(lengths))


# Whole decisions ------------------------------------------------------------------------------


def posed(draw, pp, memory=None):
    """A problem of one encoder on unlike devices."""
    heads = draw.choice((1, 2))
    asked = {
        "encoders": [
            {"name": "e", "tokens": draw.choice((4, 16, 50)), "frozen": draw.random() < 0.2,
             "recompute": draw.random() < 0.3,
             "dims": {"layers": draw.choice((2, 4)), "hidden": 32 * heads, "heads": heads}}
        ],
        "sequence_length": 64,
        "backbone": {"layers": pp * draw.choice((1, 2)), "hidden": 64 * heads, "heads": heads,
                     "vocab": 512, "gated": draw.random() < 0.5},
        "microbatches": draw.choice((1, 2, 4, 6)), "microbatch": 1,
        "schedule": draw.choice(SCHEDULES), "sharded_optimizer": draw.random() < 0.5,
        "recompute": draw.choice(("none", "selective", "full")),
        # One order of the devices: the cuts are what is tried here.
        "plan": {"pp": pp, "dp": draw.choice((1, 2)), "tp": 1, "device_order": [*range(pp)]},
    }  # fmt: skip
    dp = asked["plan"]["dp"]
    names = [draw.choice(DEVICES) for _ in range(pp)]
    devices = [
        {"name": name, "count": dp} | ({} if memory is None else {"memory_bytes": memory[rank]})
        for rank, name in enumerate(names)
    ]
    tiers = [{"group": "all", "scope": "host", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9,
              "source": "made up"}]  # fmt: skip
    where = validate(Cluster, {"devices": devices, "tiers": tiers}, "cluster")
    workload = validate(BubblesWorkload, asked, "workload")
    return Problem(None, where, workload, cost_book(where, Profiles(), "roofline"), 0)


def stages_of(cut):
    return tuple(BackboneStage(rank=r, start=a, end=b) for r, (a, b) in enumerate(pairs(cut)))


def pairs(cut):
    return itertools.pairwise(cut)


class Every:
    """Every cut of a problem, with what the ledger says that each rank needs of it."""

    def __init__(self, search, how):
        self.search, (self.layout,) = search, search.layouts
        self.step, w = search.step(self.layout), search.problem.workload
        costs, count = search.problem.costs, self.layout.microbatches
        self.chain = chain = how == "chain"
        layers = self.step.backbone.layers + (self.step.encoders[0].layers if chain else 0)
        seconds = chain_seconds if chain else layer_seconds
        self.seconds = np.array([seconds(self.step, costs, d) for d in self.step.devices])
        self.needs = {}
        for cut in every_cut(layers, self.step.plan.pp):
            if chain:
                made = balanced(self.step, costs, w.schedule, count, 1, cut)
            else:
                bare = bare_decision(self.step, w.schedule, count, stages=stages_of(cut))
                made = first_stage(self.step, bare)
            replay = search.replay(made)
            peaks = replay.timeline.peak_memory()
            held = ledgers(search.problem, self.step, made)
            self.needs[tuple(cut)] = [
                ledger.with_peak(peak).total_bytes for ledger, peak in zip(held, peaks, strict=True)
            ]

    def fits(self, cut, rooms, *, waiting=False):
        split = self.step.encoders[0].layers
        needs = list(self.needs[cut])
        if waiting and self.chain and split in cut[:-1]:
            needs[cut.index(split)] += self.layout.microbatches * self.step.feature_bytes(0)
        return all(need <= room for need, room in zip(needs, rooms, strict=True))

    def longest_s(self, cut):
        return max(self.seconds[k, a:b].sum() for k, (a, b) in enumerate(pairs(cut)))


@pytest.mark.parametrize("how", ["first stage", "chain"])
@given(st.integers(0, 10**6), st.integers(2, 3))
@settings(max_examples=25, deadline=None)
def test_cuts_fit_where_the_ledger_says_so(how, seed, pp):
    everything = Every(BubbleSearch(posed(random.Random(seed), pp)), how)
    draw = random.Random(seed)
    for _ in range(4):
        # Between what a cut needs and a little more or less, so that many cuts do not fit.
        base = draw.choice(list(everything.needs.values()))
        rooms = [int(x * draw.choice((0.8, 0.999, 1.0, 1.0, 1.3, 3.0))) for x in base]
        problem = posed(random.Random(seed), pp, rooms)
        step = everything.step
        fitting = [cut for cut in everything.needs if everything.fits(cut, rooms)]
        # Features that wait for a rank count in full where how many there are depends on timing.
        sure = [cut for cut in fitting if everything.fits(cut, rooms, waiting=True)]
        cuts = MemoryCuts(problem, step, everything.layout.microbatches)
        try:
            if how == "chain":
                found = tuple(cuts.chain())
            else:
                found = (0, *(stage.end for stage in cuts.first_stage()))
        except InfeasibleError:
            assert not sure
            continue
        assert found in fitting
        best = min((everything.longest_s(cut) for cut in sure), default=math.inf)
        assert everything.longest_s(found) <= best * (1 + 1e-9)


@given(st.integers(0, 10**6), st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_colocated_encoders_fit_where_they_can_be_filled(seed, pp):
    draw = random.Random(seed)
    search = BubbleSearch(posed(random.Random(seed), pp))
    (layout,) = search.layouts
    name, step = search.problem.workload.schedule, search.step(layout)
    cuts = every_cut(step.backbone.layers, pp)
    for count in search.stages(layout):
        for _ in range(2):
            cut = stages_of(draw.choice(cuts))
            bare = bare_decision(step, name, layout.microbatches, stages=cut)
            peaks = search.replay(three_phase(step, bare, count))
            needs = [
                ledger.with_peak(peak).total_bytes
                for ledger, peak in zip(
                    ledgers(search.problem, step, peaks.decision), peaks.timeline.peak_memory(),
                    strict=True,
                )
            ]  # fmt: skip
            rooms = [int(need * draw.choice((0.7, 0.9, 1.0, 1.1, 2.0))) for need in needs]
            limited = BubbleSearch(posed(random.Random(seed), pp, rooms))
            limited.by_memory = True
            ways = {
                stages: is_filled(limited, step, layout, stages, count)
                for stages in map(stages_of, cuts)
            }
            try:
                found = MemoryCuts(limited.problem, step, layout.microbatches).colocated(count)
            except InfeasibleError:
                found = ()
            assert any(ways[stages] for stages in found) == any(ways.values())


def is_filled(search, step, layout, stages, count):
    """Whether the search places encoders in so many stages beside these of the backbone."""
    timeline = BackboneTimeline.of(
        step, search.problem.costs, search.problem.workload.schedule, layout.microbatches, None,
        stages,
    )  # fmt: skip
    cap = search.max_live(timeline, count)
    filled = None if cap == 0 else fill(Filling(timeline, count, None, max_live=cap))
    return filled is not None and lacks(search.problem, search.replay(filled.decision)) is None
