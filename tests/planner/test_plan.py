"""Plan documents: every plan reads back equal, byte for byte, and says what a stranger may not."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import foreplan
from foreplan.errors import InfeasibleError, MissingDataError, SpecError
from foreplan.planner.plan import Plan, load_plan
from foreplan.planner.serving import ServingPlanner

DEVICES = st.lists(
    st.sampled_from(["t4", "l4", "a10", "v100-32g", "2xa100-80g", "3xt4"]), min_size=1, max_size=3
).map(",".join)
WORKLOADS = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([1, 2, 6, 8]),
        "prompt_tokens": st.integers(1, 128),
        "new_tokens": st.integers(1, 12),
    },
    optional={
        "min_average_bits": st.floats(3.0, 16.0),
        "bits": st.sampled_from([[16, 8], [8, 4], [16, 8, 4]]),
        "theta_s": st.floats(0.0, 1.0),
    },
)


@settings(
    max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(devices=DEVICES, workload=WORKLOADS)
def test_every_plan_reads_back_equal(tmp_path: Path, devices: str, workload: dict) -> None:
    try:
        made = foreplan.plan("serving", "tiny-llama-random", devices, workload, costs="roofline")
    except (InfeasibleError, SpecError):  # contradictory limits, a floor above the bits
        return
    path = tmp_path / "plan.json"
    made.save(path)
    again = load_plan(path)
    assert again == made
    assert again.to_json() == path.read_text()
    assert again.digest == made.digest
    # Where a rank's time goes adds up to the total.
    for rank in made.predicted.ranks:
        parts = rank.compute_s + rank.communication_s + rank.bubble_s
        assert parts == pytest.approx(made.predicted.total_s, rel=1e-6)
        assert sum(rank.cause_s.values()) == pytest.approx(rank.compute_s, rel=1e-6)
    assert made.predicted.low_s <= made.predicted.total_s <= made.predicted.high_s
    assert made.bound.lower_s is not None


@pytest.fixture(scope="module")
def plan() -> Plan:
    workload = {"batch": 4, "prompt_tokens": 16, "new_tokens": 8}
    return foreplan.plan("serving", "tiny-llama-random", "2xt4,l4", workload, costs="roofline")


def test_a_plan_is_one_line_in_a_prompt(plan: Plan) -> None:
    assert str(plan) == repr(plan)
    assert re.fullmatch(r"<Plan: serving of tiny-llama-random on \d ranks?, .* m?s predicted>",
                        repr(plan))  # fmt: skip


def test_the_type_wanted_of_a_decision_is_a_type(plan: Plan) -> None:
    with pytest.raises(SpecError, match="wanted: got 'ServingDecision', expected a type"):
        foreplan.decision_of(plan, "ServingDecision")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"beside": None}, r"beside: got nothing, expected a list, as in \['roofline'\], or \(\)"),
        ({"beside": 3}, "beside: got 3, expected a list"),
        ({"beside": "roofline"}, r"beside: got 'roofline', expected a list, as in \['roofline'\]"),
        ({"progress": True}, "progress: got True, expected a function of one text, such as print"),
    ],
)
def test_arguments_of_another_type_are_one_line(given: dict, line: str) -> None:
    with pytest.raises(SpecError, match=line):
        foreplan.plan("serving", "tiny-llama-random", "t4", {}, **given)


def test_a_seed_may_be_of_numpy() -> None:
    small = {"batch": 1, "prompt_tokens": 4, "new_tokens": 1}
    ask = partial(foreplan.plan, "serving", "tiny-llama-random", "t4", small, costs="roofline")
    assert ask(seed=np.int64(3)).to_json() == ask(seed=3).to_json()


@pytest.mark.parametrize("seed", ["1", -1, None, True, 1.0])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(SpecError, match=r"seed: got .*, expected a whole number of at least 0"):
        foreplan.plan("serving", "tiny-llama-random", "t4", {}, seed=seed)


def test_frame_plot_and_html(plan: Plan) -> None:
    frame = plan.to_frame()
    assert list(frame["device"]) == [rank.device for rank in plan.predicted.ranks]
    assert "ms" in plan.plot().get_xlabel()
    hostile = plan.model_copy(update={"kind": "<script>"})
    assert "<script>" not in hostile._repr_html_()
    cluster = plan.cluster
    assert len(cluster.to_frame()) == len(cluster.ranks())
    assert "t4" in cluster._repr_html_()
    assert cluster.plot().get_xlabel() == "GiB"


@pytest.mark.parametrize(
    ("field", "value"),
    [("start", -1), ("rank", 99), ("bits", [16]), ("bits", [7] * 8), ("kernels", {"x": 3}),
     ("kernels", {}), ("end", 7)],
)  # fmt: skip
def test_a_hand_edited_decision_is_refused(plan: Plan, tmp_path: Path, field, value) -> None:
    document = json.loads(plan.to_json())
    document["decision"]["stages"][0][field] = value
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError) as caught:
        foreplan.verify(load_plan(path), dry_run=True)
    assert "\n" not in str(caught.value)


def test_what_a_check_refuses_names_the_file(plan: Plan, tmp_path: Path) -> None:
    document = json.loads(plan.to_json())
    document["workload"]["batch"] = 17
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError, match=r"^edited\.json: decision: .*divisors of 17"):
        load_plan(path)


def test_edited_bits_need_their_mean(plan: Plan, tmp_path: Path) -> None:
    document = json.loads(plan.to_json())
    del document["provenance"]["planned_for"]
    decision = document["decision"]
    stage, path = decision["stages"][0], tmp_path / "edited.json"
    bits = [8, *stage["bits"][1:]]
    kernels = {
        f"{phase}/linear/8": "int8/bf16/torch.dequant_linear" for phase in ("prefill", "decode")
    }
    stage.update(bits=bits, kernels=stage["kernels"] | kernels)
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError) as caught:
        load_plan(path)
    said = re.search(r"average_bits of ([0-9.]+), the mean over layers", str(caught.value))
    decision["average_bits"] = float(said[1])
    path.write_text(json.dumps(document))
    assert load_plan(path).decision["average_bits"] == pytest.approx(sum(bits) / len(bits))


@pytest.mark.parametrize("name", ["chosen", 0])
def test_an_alternative_has_a_name_of_its_own(plan: Plan, tmp_path: Path, name: str | int) -> None:
    document = json.loads(plan.to_json())
    others = document["alternatives"]
    others[1]["name"] = others[name]["name"] if isinstance(name, int) else name
    (tmp_path / "edited.json").write_text(json.dumps(document))
    with pytest.raises(SpecError, match=r"a name of its own for each: '.*' is taken"):
        load_plan(tmp_path / "edited.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("predicted.low_s", 1e30), ("predicted.high_s", 0.0), ("predicted.total_s", 1e30),
        ("predicted.ranks.0.compute_s", -1.0), ("predicted.ranks.0.phase_s.decode", -1.0),
        ("alternatives.0.predicted.low_s", 1e30), ("confidence.probability_best", 1.5),
        ("confidence.probability_best", -0.5), ("confidence.draws", -1), ("bound.gap", -1.0),
        ("bound.lower_s", 1e30), ("provenance.source_share.roofline", 2.0),
        ("verify.ranks", 7), ("decision.average_bits", 3.0),
        ("alternatives.0.decision.average_bits", 3.0),
    ],
)  # fmt: skip
def test_figures_that_contradict_each_other_are_refused(
    plan: Plan, tmp_path: Path, path: str, value: float
) -> None:
    """An interval holds its mean, times are not negative, shares and chances lie in [0, 1]."""
    document = json.loads(plan.to_json())
    *outer, last = path.split(".")
    inside = document
    for key in outer:
        inside = inside[int(key)] if isinstance(inside, list) else inside[key]
    assert last in inside
    inside[last] = value
    (tmp_path / "edited.json").write_text(json.dumps(document))
    with pytest.raises(SpecError) as caught:
        load_plan(tmp_path / "edited.json")
    assert "\n" not in str(caught.value)


def test_what_another_version_wrote_is_said_with_both_versions(plan: Plan, tmp_path: Path) -> None:
    document = json.loads(plan.to_json()) | {"field_of_later": 1}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError, match="field_of_later") as own:
        load_plan(path)
    assert "wrote the plan" not in str(own.value)
    document["provenance"]["foreplan"] = "9.1.0"
    path.write_text(json.dumps(document))
    with pytest.raises(
        SpecError, match=r"field_of_later.*foreplan 9\.1\.0 wrote the plan, this is"
    ):
        load_plan(path)


def test_other_costs_decide_beside_the_plan() -> None:
    made = foreplan.plan(
        "serving", "tiny-llama-random", "t4,a100-80g", {"batch": 8, "prompt_tokens": 16,
        "new_tokens": 4}, costs="predicted", beside=("roofline", "measured", "predicted"),
    )  # fmt: skip
    names = [a.name for a in made.alternatives] + [r.name for r in made.rejected]
    assert names.count("decided from roofline costs") == 1
    # Without profiles nothing is measured, so the same prices decide.
    same = {r.name: r.reason for r in made.rejected}
    assert same["decided from measured costs"] == "the same decision as the plan's"
    for reason in same.values():  # a twin is named by what is shown of it
        twin = reason.removeprefix("the same decision as ")
        assert twin == reason or twin == "the plan's" or twin not in same
    assert "decided from predicted costs" not in names
    assert made.provenance.decided == {
        "predicted": "chosen", "measured": "chosen", "roofline": "decided from roofline costs",
    }  # fmt: skip
    for alternative in made.alternatives:
        if alternative.limits_met:
            assert alternative.predicted.total_s >= made.predicted.total_s * (1 - 1e-9)
    from_roofline = foreplan.plan(
        "serving", "tiny-llama-random", "t4,a100-80g", {"batch": 8, "prompt_tokens": 16,
        "new_tokens": 4}, costs="roofline", beside=("predicted", "measured"),
    )  # fmt: skip
    names = [a.name for a in from_roofline.alternatives] + [r.name for r in from_roofline.rejected]
    assert [name for name in names if name.startswith("decided")] == [
        "decided from predicted and measured costs"
    ]
    both = "decided from predicted and measured costs"
    decided = {"roofline": "chosen", "predicted": both, "measured": both}
    assert from_roofline.provenance.decided == decided


def test_a_plan_that_other_costs_decided_says_whose_it_is(monkeypatch) -> None:
    """Where the simulator prefers what the roofline decided, these costs' decision is `solver`."""
    asked = ("serving", "tiny-llama-random", "t4,a100-80g",
             {"batch": 8, "prompt_tokens": 16, "new_tokens": 4})  # fmt: skip
    made = foreplan.plan(*asked, costs="predicted", beside=("roofline",))
    name = "decided from roofline costs"
    theirs = next(a.decision for a in made.alternatives if a.name == name)
    usual = ServingPlanner.objective

    def worth(self, problem, decision, total_s):
        preferred = decision.model_dump(mode="json") == theirs
        return usual(self, problem, decision, total_s) * (0.01 if preferred else 1.0)

    monkeypatch.setattr(ServingPlanner, "objective", worth)
    swapped = foreplan.plan(*asked, costs="predicted", beside=("roofline", "measured"))
    assert swapped.decision == theirs
    (said,) = (line for line in swapped.assumptions if "simulator prefers" in line)
    assert said.startswith("the plan is the one decided from roofline costs: ")
    solver = next(a for a in swapped.alternatives if a.name == "solver")
    assert solver.decision == made.decision
    assert swapped.provenance.decided == {
        "predicted": "solver", "measured": "solver", "roofline": "chosen",
    }  # fmt: skip
    # The gap is of what was taken, and the optimum was the other one.
    assert swapped.bound.gap == pytest.approx(1 - swapped.bound.lower_s / swapped.predicted.total_s)
    assert swapped.bound.gap > made.bound.gap
    assert (made.bound.status, swapped.bound.status) == ("optimal", "feasible")


def test_what_other_costs_decided_is_held_to_the_limits_by_the_plans_own() -> None:
    """In time for the predictor, late and quicker in all for the roofline."""
    asked = (
        "serving", "llama-3.2-1b", "1xv100-32g,1xt4",
        {"batch": 16, "prompt_tokens": 256, "new_tokens": 64, "min_average_bits": 8,
         "prefill_microbatch": 4, "decode_microbatch": 16, "max_time_to_first_token_s": 0.1488},
    )  # fmt: skip
    alone = foreplan.plan(*asked, costs="roofline")
    made = foreplan.plan(*asked, costs="roofline", beside=("predicted",))
    assert made.decision == alone.decision
    assert made.predicted.metrics["time_to_first_token_s"] <= 0.1488
    (rival,) = (a for a in made.alternatives if a.name == "decided from predicted costs")
    assert rival.predicted.metrics["time_to_first_token_s"] > 0.1488
    assert rival.predicted.total_s < made.predicted.total_s
    assert not rival.limits_met
    assert rival.decision["limits_met"] is False
    assert rival.name not in made.confidence.share


@pytest.mark.parametrize("missing", ["judged", "schedule"])
def test_what_has_no_price_here_is_rejected_with_the_reason(monkeypatch, missing) -> None:
    """Whether that shows when limits are judged, or when the decision is simulated."""
    judged, schedule = ServingPlanner.judged, ServingPlanner.schedule
    here = []

    def unpriced(step, decision):
        if step == missing and decision.model_dump(mode="json") == theirs:
            raise MissingDataError("no price")

    def judging(self, problem, decision):
        here.append(problem)  # with this plan's own prices
        unpriced("judged", decision)
        return judged(self, problem, decision)

    def laying_out(self, problem, decision):
        if any(problem is mine for mine in here):
            unpriced("schedule", decision)
        return schedule(self, problem, decision)

    asked = ("serving", "tiny-llama-random", "t4,a100-80g",
             {"batch": 8, "prompt_tokens": 16, "new_tokens": 4})  # fmt: skip
    theirs = foreplan.plan(*asked, costs="roofline").decision
    monkeypatch.setattr(ServingPlanner, "judged", judging)
    monkeypatch.setattr(ServingPlanner, "schedule", laying_out)
    made = foreplan.plan(*asked, costs="predicted", beside=("roofline",))
    told = {r.name: r.reason for r in made.rejected}
    assert told["decided from roofline costs"] == "no price"


@pytest.mark.parametrize("wrong", [None, 3, ["serving"]])
def test_words_of_a_notebook_that_are_no_texts_are_refused(wrong):
    workload = {"batch": 1, "prompt_tokens": 8, "new_tokens": 2}
    with pytest.raises(SpecError, match=r"kind: got .*, expected one of serving"):
        foreplan.plan(wrong, "gpt2", "t4", workload)
    with pytest.raises(SpecError, match=r"--costs: got .*, expected one of measured"):
        foreplan.plan("serving", "gpt2", "t4", workload, costs=wrong)
    with pytest.raises(SpecError, match=r"beside: got 'roofline', expected a list, as in"):
        foreplan.plan("serving", "gpt2", "t4", workload, beside="roofline")
