"""The backbone alone: published warm-ups, training times, and where a step's time goes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.datasets.models.load_model import load_model
from foreplan.errors import SpecError
from foreplan.planner.bubbles.backbone import (
    BUBBLES,
    BackboneTimeline,
    backbone_stages,
    balanced_stages,
)
from foreplan.planner.bubbles.spec import BackbonePlan, GivenTimes, TransformerDims
from foreplan.planner.bubbles.towers import backbone_tower
from foreplan.planner.bubbles.training_step import TrainingStep


def timeline(asked, microbatches, warmup=None, name="interleaved-1f1b"):
    made = problem(asked)
    return BackboneTimeline.of(
        TrainingStep(made, asked.plan), made.costs, name, microbatches, warmup
    )


def units(transfer_s=0.0, **rest):
    """Chunks that take 1 forwards and 2 backwards, head and embedding aside (below 1e-5)."""
    return workload(forward_s=1.0, backward_s=2.0, transfer_s=transfer_s, **rest)


# T3: Optimus' figure 12, worked out by exhaustive search (field note, section 3).


def test_published_warm_up_adjustment():
    asked = units(layers=8)
    plain = timeline(asked, 8)
    adjusted = timeline(asked, 8, (7, 6, 5, 4))
    near = {"abs": 1e-3}
    assert plain.total_s == pytest.approx(57, **near)
    assert adjusted.total_s == pytest.approx(57, **near)
    assert plain.deadlines_s == pytest.approx([0, 1, 2, 3, 8, 9, 10, 16], **near)
    assert adjusted.deadlines_s == pytest.approx([0, 1, 2, 3, 16, 19, 22, 25], **near)
    assert plain.releases_s == pytest.approx([29, 32, 34, 37, 51, 53, 55, 57], **near)
    assert adjusted.releases_s == pytest.approx([28, 31, 34, 37, 51, 53, 55, 57], **near)


def test_adjustment_costs_time_once_transfers_take_some():
    asked = units(0.1, layers=8)
    plain, adjusted = timeline(asked, 8), timeline(asked, 8, (7, 6, 5, 4))
    assert adjusted.total_s / plain.total_s - 1 == pytest.approx(0.027, abs=0.002)
    searched = timeline(asked, 8, (8, 7, 6, 4))
    assert searched.total_s == pytest.approx(58.4, abs=1e-3)
    assert searched.total_s == pytest.approx(plain.total_s, abs=1e-3)
    assert searched.deadlines_s[4:] == pytest.approx([8.4, 17, 20, 23.2], abs=1e-3)


def test_bubbles_and_computation_fill_the_step():
    asked = workload(
        pp=4, dp=2, tp=2, layers=16, chunks=2, tensor_s=0.004, gather_s=0.3, scatter_s=0.5,
        transfer_s=0.01, microbatches=8, sharded_optimizer=True,
    )  # fmt: skip
    found = timeline(asked, 8)
    for rank, (row, busy) in enumerate(zip(found.bubbles_s(), found.compute_s(), strict=True)):
        assert tuple(row) == BUBBLES
        assert min(row.values()) >= -1e-9
        assert sum(row.values()) + busy == pytest.approx(found.total_s)
        assert row["dp_all_gather"] == pytest.approx(0.3)
        assert row["dp_reduce_scatter"] == pytest.approx(0.5)
        # two gathers and two scatters a layer and pass; 4 layers a rank, 8 micro-batches, F and B
        assert row["tp"] == pytest.approx(4 * 4 * 8 * 2 * 0.004)
        assert (row["pp_warm_up"] > 0) == (rank > 0)


def test_bubble_of_equal_stages_is_the_closed_form():
    # T2: (p - 1) (F + B) in all for 1F1B, a v-th of it interleaved.
    for chunks, layers in ((1, 4), (2, 8), (4, 16)):
        asked = units(chunks=chunks, layers=layers)
        found = timeline(asked, 8)
        each = layers // 4 // chunks * 3.0
        idle = found.total_s - 8 * chunks * each
        assert idle == pytest.approx(3 * each, abs=1e-3)


def test_insides_of_passes_add_up_to_them():
    asked = workload(tp=2, pp=2, layers=8, tensor_s=0.003)
    found = timeline(asked, 8)
    owner, start, end = found.pieces(1)
    for k in (0, 5, 17):
        mine = owner == k
        assert start[mine][0] == pytest.approx(found.start_s[1][k])
        assert end[mine][-1] == pytest.approx(found.end_s[1][k])
        assert (end - start)[mine][0::2].sum() == pytest.approx(2 * 4 * 0.003)
    for compute, link in found.busy_s:
        flat = np.concatenate((compute, link))
        assert (flat[:, 1] >= flat[:, 0]).all()
        assert flat.max() <= found.total_s


@pytest.mark.parametrize("devices", ["3xt4@b,1xa100-80g@a", "1xa100-80g@a,3xt4@b"])
def test_stages_suit_the_device_that_each_is_on(devices):
    """Of every cut the one whose slowest stage is fastest, each stage priced where it runs."""
    sizes = TransformerDims(layers=8, hidden=1024, heads=16, vocab=32000)
    asked = workload(chunks=1).model_copy(update={"backbone": sizes, "sequence_length": 1024})
    made = problem(asked, devices)
    step = TrainingStep(made, asked.plan)

    def slowest(cut):
        return max(
            sum(made.costs.cost(step.passes(a, b, op), device).mean_s for op in "FB")
            for (a, b), device in zip(itertools.pairwise(cut), step.devices, strict=True)
        )

    stages = balanced_stages(step, made.costs)
    chosen = [0, *(stage.end for stage in stages)]
    best = min(slowest([0, *inner, 8]) for inner in itertools.combinations(range(1, 8), 3))
    assert [stage.rank for stage in stages] == [0, 1, 2, 3]
    assert slowest(chosen) == pytest.approx(best, rel=2e-3)
    assert slowest(chosen) < 0.9 * slowest([0, 2, 4, 6, 8])


@pytest.mark.parametrize(("layers", "pp", "chunks"), [(12, 4, 2), (7, 2, 1), (8, 4, 2)])
def test_stages_differ_by_a_layer_at_most(layers, pp, chunks):
    stages = backbone_stages(layers, BackbonePlan(pp=pp, chunks=chunks))
    sizes = [stage.end - stage.start for stage in stages]
    assert [stage.rank for stage in stages] == [s % pp for s in range(pp * chunks)]
    assert [0, *(stage.end for stage in stages)] == [*(s.start for s in stages), layers]
    assert sizes.count(max(sizes)) == (layers % (pp * chunks) or pp * chunks)
    assert max(sizes) - min(sizes) <= 1


def test_every_stage_needs_a_layer():
    with pytest.raises(SpecError, match="a layer for each of 8 virtual stages"):
        backbone_stages(7, BackbonePlan(pp=4, chunks=2))


# T7: Korthikanti et al. 2022, table 5 (A100, seconds an iteration).

#: hidden, layers, heads, pp, chunks, batch, micro-batch; seconds with selective recomputation and
#: sequence parallelism, and with full recomputation.
TABLE_5 = {
    "22B": ((6144, 48, 64, 1, 1, 4, 4), 1.10, 1.42),
    "175B": ((12288, 96, 96, 8, 3, 64, 1), 13.75, 18.13),
    "530B": ((20480, 105, 128, 35, 3, 280, 1), 37.83, 49.05),
}
S, TP = 2048, 8


def korthikanti(name, rate, bandwidth, recompute):
    """Step of a row with two free parameters: FLOP/s of a GPU and bytes/s of a collective."""
    (h, layers, heads, pp, chunks, batch, mb), *_ = TABLE_5[name]
    forward = (24 * mb * S * h * h + 4 * mb * S * S * h) / TP / rate
    scores = 4 * mb * S * S * h / TP / rate
    again = forward if recompute == "full" else scores
    asked = workload(
        encoder(), pp=pp, tp=TP, chunks=chunks, microbatches=batch // mb, layers=layers,
        recompute=recompute, sequence_length=S, microbatch=mb,
        backbone=TransformerDims(
            layers=layers, hidden=h, heads=heads, vocab=51200,
            layer_forward_s=forward, layer_backward_s=2 * forward + again,
        ),
        times=GivenTimes(
            tensor_collective_s=2 * mb * S * h / bandwidth, encoder_tensor_collective_s=0.0,
            optimizer_s=0.0, transfer_s=0.0,
        ),
    )  # fmt: skip
    made = problem(asked, f"{pp * TP}xa100-80g")
    found = BackboneTimeline.of(
        TrainingStep(made, asked.plan), made.costs, asked.schedule, batch // mb
    )
    return found.total_s


def test_times_of_large_models_follow_from_two_small_ones():
    """Rate and bandwidth fitted on 22B and 175B (selective); three other times predicted."""
    rate, bandwidth = 240e12, 75e9
    for _ in range(5):  # two unknowns, two equations: fixed point
        now = {name: korthikanti(name, rate, bandwidth, "selective") for name in ("22B", "175B")}
        alone = korthikanti("22B", rate, 1e18, "selective")
        bandwidth *= (now["22B"] - alone) / max(TABLE_5["22B"][1] - alone, 1e-3)
        rate *= now["175B"] / TABLE_5["175B"][1]
    for name in ("22B", "175B"):
        assert korthikanti(name, rate, bandwidth, "selective") == pytest.approx(
            TABLE_5[name][1], rel=0.01
        )
    assert 150e12 < rate < 312e12
    assert 20e9 < bandwidth < 300e9
    for name, (_, selective, full) in TABLE_5.items():
        if name == "530B":
            assert korthikanti(name, rate, bandwidth, "selective") == pytest.approx(
                selective, rel=0.06
            )
        else:
            assert korthikanti(name, rate, bandwidth, "full") == pytest.approx(full, rel=0.12)


@pytest.mark.parametrize("name", ["starcoder2-3b", "olmo-2-7b", "pythia-1.4b"])
def test_layers_that_towers_do_not_have_are_refused(name):
    asked = problem(workload())
    own = asked.workload.model_copy(update={"backbone": None})
    assert backbone_tower(replace(asked, model=load_model("gpt2"), workload=own)).layers == 12
    with pytest.raises(SpecError, match="layers like Llama's or GPT-2's"):
        backbone_tower(replace(asked, model=load_model(name), workload=own))


def test_sequences_longer_than_a_window_are_refused():
    asked = problem(workload())
    own = asked.workload.model_copy(update={"backbone": None, "sequence_length": 4096})
    mistral = load_model("mistral-7b-v0.1")
    assert backbone_tower(replace(asked, model=mistral, workload=own)).layers == 32
    longer = own.model_copy(update={"sequence_length": 4097})
    with pytest.raises(SpecError, match="at most the sliding window of mistral"):
        backbone_tower(replace(asked, model=mistral, workload=longer))
