"""The planner end to end: plans, baselines, memory, and what it refuses."""

import json

import numpy as np
import pytest
from tests.planner.bubbles.problems import encoder, problem, workload

from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.api import plan
from foreplan.planner.bubbles.figures import training_flops
from foreplan.planner.bubbles.planner import BubblesPlanner
from foreplan.planner.bubbles.robustness import jittered_s
from foreplan.planner.bubbles.search import BubbleSearch
from foreplan.planner.bubbles.spec import BackbonePlan, TransformerDims
from foreplan.planner.load_workload import load_workload
from foreplan.planner.plan import load_plan
from foreplan.planner.report.html import render_report
from foreplan.planner.report.summary import Summary
from foreplan.planner.schema import json_schema
from foreplan.planner.verify.candidates import candidates_of
from foreplan.planner.verify.session import problem_of


def asked(**rest):
    return workload(encoder(layers=8, forward_s=0.02, backward_s=0.04), **rest)


@pytest.fixture(scope="module")
def made():
    return plan("bubbles", None, "4xh200", asked(), costs="roofline")


def test_plan_is_complete_valid_and_reproducible(made, tmp_path):
    path = tmp_path / "plan.json"
    made.save(path)
    assert load_plan(path) == made
    assert plan("bubbles", None, "4xh200", asked(), costs="roofline").to_json() == made.to_json()
    document, schema = json.loads(made.to_json()), json_schema("bubbles")
    decision = schema["$defs"][schema["properties"]["decision"]["$ref"].rsplit("/", 1)[1]]
    assert set(document["decision"]) == set(decision["properties"])
    assert made.decision["fill"] == "fine"
    assert made.verify.ranks == 4


def test_plan_beats_every_baseline_and_respects_its_bounds(made):
    names = {a.name: a.predicted.total_s for a in made.alternatives}
    assert set(names) | {r.name for r in made.rejected} == {
        "encoders on the first stage", "balanced chain of encoder and backbone", "three phases",
        "coarse filling",
    }  # fmt: skip
    assert all(total >= made.predicted.total_s * (1 - 1e-9) for total in names.values())
    assert names["coarse filling"] <= names["three phases"] * (1 + 1e-9)
    assert 0 < made.bound.lower_s <= made.predicted.total_s
    metrics = made.predicted.metrics
    assert 0.0 < metrics["encoder_inside_share"] <= 1.0
    assert metrics["samples_per_s"] == pytest.approx(8 / made.predicted.total_s)
    causes = {k: v for k, v in metrics.items() if k.endswith("_bubble_share")}
    assert {"pp_warm_up_bubble_share", "pp_cool_down_bubble_share"} <= set(causes)
    # Filling leaves less of the step idle than the backbone alone did.
    assert metrics["compute_idle_share"] < sum(causes.values()) < 1.0
    coarse = next(a for a in made.alternatives if a.name == "coarse filling")
    assert coarse.predicted.metrics["encoder_inside_share"] < metrics["encoder_inside_share"]


def test_report_renders(made):
    assert "e0." in made.to_json()
    assert "bubbles" in render_report(made)


def test_report_counts_replicas_and_lanes_as_used():
    wide = workload(encoder(layers=4), pp=2, dp=2, layers=8)
    found = Summary.of(plan("bubbles", None, "5xh200", wide, costs="roofline"))
    assert found.title == "4 × h200"
    assert found.unused == "h200"


def test_jitter_moves_a_step_by_about_as_much():
    planner, where = BubblesPlanner(), problem(asked())
    search = BubbleSearch(where)
    best = search.best(search.candidates(), 1)[0]
    still = jittered_s(best.timeline, 0.0, draws=1, seed=0)
    assert still[0] == pytest.approx(best.total_s)
    spread = {share: jittered_s(best.timeline, share, draws=10, seed=0) for share in (0.02, 0.1)}
    for share, totals in spread.items():
        assert (np.abs(totals / best.total_s - 1) <= share + 1e-9).all()
    assert spread[0.1].mean() > spread[0.02].mean() > best.total_s * 0.995
    with pytest.raises(SpecError, match="jitter"):
        jittered_s(best.timeline, 1.5, draws=1, seed=0)
    assert planner.metrics(where, best.decision, best.timeline)["jitter_5_percent_p95_s"] > 0


def test_several_and_frozen_encoders():
    several = workload(
        encoder("image", layers=8), encoder("sound", layers=4, frozen=True), sequence_length=64
    )
    found = plan("bubbles", None, "4xh200", several, costs="roofline")
    assert [e["name"] for e in found.decision["encoders"]] == ["image", "sound"]
    text = " ".join(found.decision["orders"])
    assert "B" in text
    assert "e1." in text
    assert not [w for w in text.split() if w.startswith("e1.") and "B" in w]
    assert any(r.name.startswith("balanced") for r in found.rejected)


def test_layout_is_searched_where_none_is_given():
    free = workload(
        encoder(layers=4), plan=None, microbatches=None, global_batch=32, microbatch=2, layers=8
    )
    found = plan("bubbles", None, "4xh200", free, costs="roofline")
    chosen = BackbonePlan(**found.decision["plan"])
    assert chosen.devices == 4
    assert found.decision["microbatches"] * chosen.dp * 2 == 32
    assert any(note.startswith("not taken") for note in found.assumptions)


def test_filling_that_does_not_pay_is_said():
    # One rank has no bubbles at all: nothing to fill, every placement is the same.
    one = workload(encoder(layers=4), pp=1, chunks=1, layers=4, microbatches=4)
    found = plan("bubbles", None, "1xh200", one, costs="roofline")
    serial = 4 * (4 * 0.3 + 4 * 0.03)
    assert found.predicted.total_s == pytest.approx(serial, rel=1e-3)
    assert found.decision["fill"] != "fine"
    assert any(note.startswith("filling does not pay") for note in found.assumptions)


@pytest.mark.parametrize(
    ("sizes", "layers", "forward_s", "backward_s"),
    [({}, 4, 50.0, 60.0), ({"pp": 2, "chunks": 1, "layers": 4, "microbatches": 4}, 3, 7.0, 19.0),
     ({"pp": 2, "chunks": 1, "layers": 4, "microbatches": 1}, 4, 0.9, 1.9)],
)  # fmt: skip
def test_units_longer_than_any_idle_time_leave_the_baseline(sizes, layers, forward_s, backward_s):
    huge = workload(encoder(layers=layers, forward_s=forward_s, backward_s=backward_s), **sizes)
    found = plan("bubbles", None, "4xh200", huge, costs="roofline")
    (said,) = (note for note in found.assumptions if note.startswith("filling does not pay"))
    assert "the longest idle interval" in said
    assert "takes no longer and is kept" in said
    assert found.decision["fill"] != "fine"
    best = min(other.predicted.total_s for other in found.alternatives if other.predicted)
    assert found.predicted.total_s <= best * (1.0 + 1e-6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"layers": 6}, SpecError, "at most the 6 layers"),
        ({"microbatches": 6}, SpecError, "multiples of pp"),
        ({"pp": 8}, SpecError, "at most 4 devices"),
        ({"tp": 16, "pp": 1, "chunks": 1}, SpecError, "at most 4 devices"),
        ({"schedule": "zb-h1"}, SpecError, "one chunk"),
    ],
)
def test_sizes_that_do_not_suit_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        plan("bubbles", None, "4xh200", asked(**change), costs="roofline")


def test_layers_need_not_divide():
    """Seven layers on two ranks and a tower of five in two stages; every layer is somewhere."""
    tower = encoder(layers=5, forward_s=0.05, backward_s=0.1)
    sizes = {"pp": 2, "chunks": 1, "layers": 7, "microbatches": 4}
    found = plan(
        "bubbles", None, "2xh200", workload(tower, **sizes, encoder_stages=(2,)), costs="roofline"
    )
    decision = found.decision
    assert [s["end"] - s["start"] for s in decision["stages"]] in ([4, 3], [3, 4])
    assert decision["encoders"][0]["stages"] == [[0, 3], [3, 5]]
    # Of any division the rank with four layers is the longest: 4 micro-batches x 4 layers x 0.3 s.
    assert found.predicted.total_s >= 4.8
    assert found.bound.lower_s is not None
    assert found.bound.lower_s <= found.predicted.total_s


def test_what_is_said_of_a_decision_is_said_of_the_plans():
    """A baseline became the plan: its devices, and whose bounds these are."""
    towers = (
        {"name": "v", "tokens": 577, "dims": {"layers": 23, "hidden": 1024, "heads": 16}},
        {"name": "a", "tokens": 1500, "dims": {"layers": 2, "hidden": 128, "heads": 2},
         "frozen": True},
        {"name": "big", "tokens": 100, "dims": {"layers": 40, "hidden": 4096, "heads": 32},
         "frozen": True},
    )  # fmt: skip
    fields = {
        "backbone": {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 1000},
        "encoders": towers, "sequence_length": 2500, "microbatches": 6,
    }  # fmt: skip
    found = plan("bubbles", None, "1xt4,2xl4,1xh200", fields, costs="roofline")
    assert found.alternatives[0].name == "solver"
    order, labels = found.decision["plan"]["device_order"], [
        rank.label for rank in found.cluster.ranks()
    ]  # fmt: skip
    (said,) = [note for note in found.assumptions if note.startswith("ranks of the pipeline")]
    assert said == (
        f"ranks of the pipeline take {', '.join(labels[k] for k in order)}, in this order"
    )
    (bounds,) = [note for note in found.assumptions if "LB0" in note]
    assert bounds.startswith("of the solver's decision: ")
    lost = [note for note in found.assumptions if "1 encoder stages: rank" in note]
    assert lost
    assert all(note.startswith("not taken: dp 1 x pp 4 x tp 1") for note in lost)


def test_a_price_that_lacks_names_the_command_that_measures_it(tmp_path):
    """With the caller's own words, so that it can be pasted."""
    fields = {
        "backbone": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 100}, "sequence_length": 64,
        "encoders": [{"name": "v", "tokens": 16, "dims": {"layers": 2, "hidden": 32, "heads": 2}}],
        "microbatches": 2, "plan": {"pp": 2},
    }  # fmt: skip
    file = tmp_path / "my work.json"
    file.write_text(json.dumps(fields))
    for given, said in ((str(file), f"'{file}'"), (fields, "FILE")):
        with pytest.raises(MissingDataError) as caught:
            plan("bubbles", None, "2xcpu:threads=1", given, costs="roofline")
        assert f"'foreplan profile --for bubbles --workload {said} -o profiles'" in str(
            caught.value
        )
    with pytest.raises(MissingDataError) as caught:
        plan("precision", None, "cpu", {"network": "byte_lm", "batch": 2}, costs="roofline")
    assert str(caught.value).count("measure it with") == 1
    assert "--for precision --workload FILE" in str(caught.value)


def test_wrong_workloads_are_one_clear_line():
    base = asked().model_dump(mode="json")
    for change, words in (
        ({"microbatches": 0}, "microbatches"),
        ({"global_batch": 8}, "one of microbatches and global_batch"),
        ({"unit_layers": [0.3]}, "multiples of 0.5"),
        ({"sequence_length": 4}, "at least the 16 positions"),
        ({"encoders": []}, "encoders"),
        ({"spare": 1}, "spare"),
    ):
        with pytest.raises(SpecError, match=words) as caught:
            load_workload("bubbles", {**base, **change})
        assert "\n" not in str(caught.value)


def test_encoders_beyond_the_memory_left_are_infeasible_and_say_by_how_much():
    dims = TransformerDims(layers=48, hidden=12288, heads=96)
    big = encoder().model_copy(update={"dims": dims, "tokens": 32})
    with pytest.raises(InfeasibleError, match=r"GiB|lacks"):
        plan("bubbles", None, "4xt4", workload(big), costs="roofline")


def test_recomputing_encoders_needs_less_memory_and_more_time():
    dims = TransformerDims(layers=8, hidden=1024, heads=16)
    peaks, totals = [], []
    for recompute in (False, True):
        one = encoder().model_copy(update={"dims": dims, "tokens": 64, "recompute": recompute})
        found = plan("bubbles", None, "4xh200", workload(one), costs="roofline")
        ranks = found.predicted.ranks
        peaks.append(max(r.memory_bytes.get("encoder_activations", 0) for r in ranks))
        totals.append(sum(r.phase_s["encode_backward"] for r in ranks))
    assert peaks[1] < peaks[0] / 3
    assert totals[1] > totals[0]


def test_model_flops_are_the_published_counts():
    # GPT-175B and ViT-22B on 2048 tokens each, 6 N a token and attention (field note, section 5:
    # 2.487e15 FLOP a sample without attention).
    from foreplan.planner.bubbles.spec import BubblesWorkload, Encoder

    w = BubblesWorkload(
        encoders=(Encoder(name="vit", model="vit-22b", tokens=2048),),
        backbone=TransformerDims(layers=96, hidden=12288, heads=96, vocab=51200),
        sequence_length=2048, microbatches=8,
    )  # fmt: skip
    where = problem(w, "4xh200")
    attention = 12 * 2048 * 2048 * (96 * 12288 + 48 * 6144)
    assert training_flops(where) - attention == pytest.approx(2.43e15, rel=0.03)


def test_a_decision_for_something_else_is_refused():
    planner, where = BubblesPlanner(), problem(asked())
    search = BubbleSearch(where)
    decision = search.best(search.candidates(), 1)[0].decision
    other = problem(workload(encoder("sound", layers=8)))
    with pytest.raises(SpecError, match=r"decision\.encoders"):
        planner.schedule(other, decision)
    deeper = problem(asked(layers=16))
    with pytest.raises(SpecError, match=r"decision\.stages"):
        planner.schedule(deeper, decision)


def test_what_a_decision_tells_of_itself_makes_no_other_run(made):
    other = made.alternatives[0]
    renamed = made.decision | {"fill": "coarse", "head_s": 1.0}
    twin = other.model_copy(update={"name": "twin", "decision": renamed})
    both = made.model_copy(update={"alternatives": (other, twin)})
    planner = BubblesPlanner()
    chosen, unlike, alike = candidates_of(both, planner, problem_of(both, planner))
    assert alike.run == chosen.run != unlike.run
    assert alike.decision == renamed


def test_equal_layers_are_tried_beside_stages_of_equal_time():
    # The head takes longer than four such layers, which a cut by time takes off its stage.
    uneven = problem(workload(encoder(), pp=2, chunks=1, forward_s=1e-6, backward_s=1e-6))
    search = BubbleSearch(uneven)
    (layout,) = search.layouts
    by_time, even = ([stage.end for stage in cut] for cut in search.cuts(layout, 1))
    assert even == [4, 8]
    assert by_time[0] > 4
    assert len(search.cuts(layout, 0)) == 1
    stages = {tuple(f.decision.stages) for f in search.candidates()}
    assert stages == set(search.cuts(layout, 1))
