"""Serving with a KV cache of 8 bits: what a plan says, what fits, what runs, what it loses."""

import json

import pytest
import torch

import foreplan
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.predict import Forecast
from foreplan.planner.serving import ServingPlanner
from foreplan.planner.serving.cache_choice import choose_cache
from foreplan.planner.serving.kernels import ServingKernels, single_process_tokens, walk
from foreplan.planner.serving.shapes import serving_programs

PLANNER = ServingPlanner()
ROOMY = (256.0, 256.0)
LONG = {"batch": 64, "prompt_tokens": 64, "new_tokens": 8, "bits": [16],
        "prefill_microbatch": 1, "decode_microbatch": 1}  # fmt: skip


def held(problem, decision):
    return [ledger.items for ledger in PLANNER.memory(problem, decision)]


def test_a_plan_names_the_cache_and_counts_it_with_scales(make_problem):
    plain, eight = (make_problem(*ROOMY, kv_bits=bits) for bits in (16, 8))
    before, decision = (PLANNER.decide(problem).decision for problem in (plain, eight))
    assert "kv_bits" not in before.model_dump(mode="json")
    assert decision.model_dump(mode="json")["kv_bits"] == decision.kv_bits == 8
    for stage in decision.stages:
        for phase in ("prefill", "decode"):
            assert stage.kernels[f"{phase}/attention"].startswith("int8/")
    model, w = eight.model, eight.workload
    positions = w.batch * (w.prompt_tokens + w.new_tokens)
    each = 2 * model.kv_heads * (model.head_dim + 2)
    assert sum(items["kv_cache"] for items in held(eight, decision)) == (
        model.layers * positions * each
    )
    choice = PLANNER.decide(eight)
    assert any("8 bits" in note and "not measured" in note for note in choice.assumptions)
    requests = [Forecast(PLANNER, p, d).metrics["concurrent_requests"]
                for p, d in ((plain, before), (eight, decision))]  # fmt: skip
    assert requests[1] > requests[0]


def test_eight_bits_fit_where_sixteen_do_not(make_problem):
    need = {}
    for bits in (16, 8):
        problem = make_problem(256.0, kv_bits=bits, **LONG)
        (items,) = held(problem, PLANNER.decide(problem).decision)
        need[bits] = sum(items.values())
    assert need[8] < need[16]
    between = (need[8] + need[16]) / 2 / (1 << 20)
    with pytest.raises(InfeasibleError, match="kv_bits=8"):
        PLANNER.decide(make_problem(between, kv_bits=16, **LONG))
    for asked in (8, "auto"):
        problem = make_problem(between, kv_bits=asked, **LONG)
        choice = PLANNER.decide(problem)
        assert choice.decision.kv_bits == 8
        assert all(ledger.free_bytes >= 0 for ledger in PLANNER.memory(problem, choice.decision))
        baselines = [d for d in PLANNER.baselines(problem).values() if not isinstance(d, str)]
        assert {baseline.kv_bits for baseline in baselines} == {8}


def test_where_it_is_open_the_better_cache_is_taken(make_problem):
    problem = make_problem(256.0, kv_bits="auto", isas="native", **LONG)
    choice = PLANNER.decide(problem)
    assert choice.decision.kv_bits == 16  # it fits, and nobody knows what 8 bits lose
    assert any("kv_bits=auto" in note for note in choice.assumptions)
    plain, eight = (
        PLANNER.decide(make_problem(256.0, kv_bits=bits, isas="native", **LONG)) for bits in (16, 8)
    )
    for dearer, best, other in ((16, eight, plain), (8, plain, eight)):
        found = choose_cache(
            problem, lambda fixed: {16: plain, 8: eight}[fixed.workload.kv_bits],
            lambda _, decision, dearer=dearer: float(decision.kv_bits == dearer), measured=True,
        )  # fmt: skip
        assert found.decision == best.decision
        assert other.decision in found.near.values()
        assert found.bound.lower_s == min(plain.bound.lower_s, eight.bound.lower_s)
        assert found.bound.gap >= best.bound.gap
        assert found.bound.evaluations == plain.bound.evaluations + eight.bound.evaluations
    for decision in (plain.decision, eight.decision):  # either can be meant where it is open
        total_s = Forecast(PLANNER, problem, decision).total_s
        fixed = make_problem(256.0, kv_bits=decision.kv_bits, isas="native", **LONG)
        assert total_s == Forecast(PLANNER, fixed, decision).total_s
        assert all(r.kv_bits == decision.kv_bits
                   for r in PLANNER.rivals(problem, decision, 2).values())  # fmt: skip
    asked = serving_programs(problem.model, problem.workload, "cpu")
    assert {p.variant.storage for p in asked if p.op == "attention"} == {"bf16", "int8"}


def test_replicas_are_told_which_cache():
    workload = {"batch": 2, "prompt_tokens": 16, "new_tokens": 4, "bits": [16]}
    made = foreplan.plan(
        "replicas", "tiny-llama-random", "2xt4", workload | {"kv_bits": 8}, costs="roofline"
    )
    assert {replica["kv_bits"] for replica in made.decision["replicas"]} == {8}
    with pytest.raises(SpecError, match="kv_bits"):
        foreplan.plan(
            "replicas", "tiny-llama-random", "2xt4", workload | {"kv_bits": "auto"},
            costs="roofline",
        )  # fmt: skip


def test_reading_the_cache_back_is_paid_for(make_problem):
    """These made-up costs know bytes and FLOP alone: fewer bytes move at decode."""
    seconds = {}
    for bits in (16, 8):
        problem = make_problem(256.0, kv_bits=bits, isas="native", **LONG)
        decision = PLANNER.decide(problem).decision
        priced = {w for action in PLANNER.schedule(problem, decision)
                  for w, _ in getattr(action.work, "parts", ())
                  if getattr(w, "op", "") in ("attention", "cache_write")}  # fmt: skip
        assert {w.variant.storage for w in priced} == {"bf16" if bits == 16 else "int8"}
        asked = set(serving_programs(problem.model, problem.workload, "cpu"))
        assert {w.variant.storage for w in asked if w.op == "attention"} == {
            w.variant.storage for w in priced
        }
        seconds[bits] = Forecast(PLANNER, problem, decision).total_s
    assert seconds[8] < seconds[16]


def stages_of(problem, decision, mode, recorder=None):
    return [
        ServingKernels(problem.model, problem.workload, decision, rank, mode, 0, recorder)
        for rank in range(len(decision.stages))
    ]


@pytest.fixture
def split(make_problem):
    """A problem and a decision of two stages with unlike micro-batches."""
    problem = make_problem(
        *ROOMY, kv_bits=8, prefill_microbatch=2, decode_microbatch=1, bits=[16, 8]
    )
    whole = PLANNER.decide(problem).decision
    table = {k: v for stage in whole.stages for k, v in stage.kernels.items()}
    ranks = problem.cluster.ranks()
    half = problem.model.layers // 2
    bits = (16,) * problem.model.layers
    stages = tuple(
        whole.stages[0].model_copy(
            update={"rank": r, "device": ranks[r].label, "start": a, "end": b, "bits": bits[a:b],
                    "kernels": table | dict.fromkeys(
                        ("prefill/linear/16", "decode/linear/16"), "bf16/bf16/torch.linear")}
        )
        for r, (a, b) in enumerate([(0, half), (half, problem.model.layers)])
    )  # fmt: skip
    return problem, whole.model_copy(update={"stages": stages})


@pytest.mark.parametrize("mode", ["reference", "fast"])
def test_stages_compute_the_tokens_of_one(split, mode):
    problem, two = split
    first, second = two.stages
    one = two.model_copy(update={
        "stages": (first.model_copy(update={"end": second.end, "bits": first.bits + second.bits}),)
    })  # fmt: skip
    arguments = (problem.model, problem.cluster, problem.workload)
    found = single_process_tokens(*arguments, two, mode, 0)
    assert found == single_process_tokens(*arguments, one, mode, 0)


def test_what_runs_reads_the_rounded_cache(split):
    """The same arithmetic on a plain and on a quantised cache gives other logits."""
    problem, two = split
    logits = []
    for text in ("bf16/fp32/torch.sdpa", "int8/fp32/torch.dequant_sdpa"):
        attention = dict.fromkeys(("prefill/attention", "decode/attention"), text)
        stages = tuple(s.model_copy(update={"kernels": s.kernels | attention}) for s in two.stages)
        decision = two.model_copy(update={"stages": stages})
        arguments = (problem.model, problem.cluster, problem.workload, decision, "forced", 0)
        logits.append(torch.tensor(single_process_tokens(*arguments)["logits"]))
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.05


def test_what_stages_hold_is_what_was_planned(split):
    problem, two = split
    for stage, items in zip(stages_of(problem, two, "fast"), held(problem, two), strict=True):
        found = stage.memory_bytes()
        for name in ("kv_cache", "weights"):
            assert found[name] == items[name]


def test_recorded_passes_compute_what_plain_ones_do(split):
    """A graph replays kernels on the same tensors: nothing may be decided on the host."""
    problem, two = split
    schedule = PLANNER.schedule(problem, two)

    class Tape:
        def warm_up(self, body):
            body()

        def record(self, body):
            return body

    results = []
    for recorder in (None, Tape()):
        results.append(walk(schedule, two, stages_of(problem, two, "fast", recorder)))
    assert results[0] == results[1]


def test_two_processes_agree_with_one(two_processors):
    workload = {
        "batch": 4, "prompt_tokens": 16, "new_tokens": 4, "bits": [16], "kv_bits": 8,
        "prefill_microbatch": 2, "decode_microbatch": 2,
    }  # fmt: skip
    made = foreplan.plan("serving", "tiny-llama-random", two_processors, workload, costs="roofline")
    document = json.loads(made.to_json())
    assert document["decision"]["kv_bits"] == document["workload"]["kv_bits"] == 8
    run = foreplan.verify(made, rounds=1, only=[]).document
    assert all(each.passed for each in run.agreement)
    assert run.agreement[0].exact
    for rank in run.candidates[0].ranks:
        (cache,) = [item for item in rank.memory if item.item == "kv_cache"]
        assert cache.held_bytes == cache.predicted_bytes


def test_a_decision_and_its_kernels_name_one_cache(split, make_problem):
    problem, two = split
    with pytest.raises(SpecError, match=r"decision\.kv_bits"):
        PLANNER.schedule(problem, two.model_copy(update={"kv_bits": 16}))
    other = make_problem(*ROOMY, prefill_microbatch=2, decode_microbatch=1, bits=[16, 8])
    with pytest.raises(SpecError, match="prefill/attention"):
        PLANNER.schedule(other, two.model_copy(update={"kv_bits": 16}))
    mixed = two.stages[0].kernels | {"decode/attention": "bf16/bf16/torch.sdpa"}
    stages = (two.stages[0].model_copy(update={"kernels": mixed}), two.stages[1])
    wrong = two.model_copy(update={"stages": stages})
    with pytest.raises(SpecError, match="decode/attention"):
        PLANNER.schedule(problem, wrong)
    with pytest.raises(SpecError, match="one storage"):
        stages_of(problem, wrong, "fast")


def test_other_bits_are_refused_in_one_line(make_problem):
    with pytest.raises(SpecError, match="kv_bits"):
        make_problem(*ROOMY, kv_bits=4)
