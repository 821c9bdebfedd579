"""The serving planner on made-up costs: limits, metamorphic laws, and the schedule it promises."""

import pytest

from foreplan.cost_models.quality.sensitivity import weight_sensitivity
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.predict import Forecast
from foreplan.planner.serving import ServingPlanner
from foreplan.planner.serving.chain import ServingChains
from foreplan.planner.serving.kernels import compare_tokens, single_process_tokens
from foreplan.planner.serving.pricing import MicroBatches, Pricing
from foreplan.solvers.chain_score import ChainAssignment, evaluate, make_stage

PLANNER = ServingPlanner()
ROOMY = (256.0, 256.0)


def total_s(problem):
    return Forecast(PLANNER, problem, PLANNER.decide(problem).decision).total_s


def law_s(problem, decision):
    """Latency of a decision by the solver's law."""
    omega = weight_sensitivity(problem.model, problem.workload.bits)
    chains = ServingChains(
        Pricing(problem.model, problem.workload, problem.costs),
        problem.cluster,
        tuple(rank.capacity for rank in problem.cluster.ranks()),
        omega,
    )
    sizes = MicroBatches(decision.prefill_microbatch, decision.decode_microbatch)
    stages = tuple(
        make_stage(
            chains.problem(sizes), chains.type_of(s.rank), s.start, s.end,
            [chains.bits.index(b) for b in s.bits],
        )
        for s in decision.stages
    )  # fmt: skip
    return evaluate(chains.problem(sizes), ChainAssignment(stages)).latency_s


def test_decision_covers_all_layers_and_fits(make_problem):
    problem = make_problem(*ROOMY, min_average_bits=8)
    decision = PLANNER.decide(problem).decision
    assert decision.layers == problem.model.layers
    assert decision.average_bits >= 8 - 1e-9
    for ledger in Forecast(PLANNER, problem, decision).ledgers:
        assert ledger.free_bytes >= 0


def test_bound_holds_and_equals_the_law_of_the_decision(make_problem):
    problem = make_problem(*ROOMY, min_average_bits=8)
    choice = PLANNER.decide(problem)
    assert choice.bound.status == "optimal"
    assert choice.bound.lower_s <= law_s(problem, choice.decision) * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (4, 2), (4, 4)])
def test_simulator_agrees_with_the_law_without_contention(make_problem, sizes):
    problem = make_problem(
        *ROOMY, prefill_microbatch=sizes[0], decode_microbatch=sizes[1], new_tokens=16
    )
    decision = PLANNER.decide(problem).decision
    simulated = Forecast(PLANNER, problem, decision).total_s
    assert simulated == pytest.approx(law_s(problem, decision), rel=0.05)


def test_contention_only_slows_down(make_problem):
    alone = make_problem(*ROOMY, min_average_bits=8)
    decision = PLANNER.decide(alone).decision
    beside = make_problem(*ROOMY, min_average_bits=8, slowdown=1.5)
    assert Forecast(PLANNER, beside, decision).total_s >= Forecast(PLANNER, alone, decision).total_s


def test_more_memory_one_more_device_or_bit_option_never_hurts(make_problem):
    def objective(*memory, **fields):
        problem = make_problem(*memory, min_average_bits=8, **fields)
        return law_s(problem, PLANNER.decide(problem).decision) * (1 - 2e-4)

    base = objective(14, 14, bits=[16, 8])
    assert objective(14, 28, bits=[16, 8]) <= base / (1 - 4e-4)
    assert objective(14, 14, 14, bits=[16, 8]) <= base / (1 - 4e-4)
    assert objective(14, 14, bits=[16, 8, 4]) <= base / (1 - 4e-4)


def test_a_model_that_does_not_fit_says_how_much_is_missing(make_problem):
    with pytest.raises(InfeasibleError, match=r"needs .* MiB.*of the .* MiB of 2 devices; add"):
        PLANNER.decide(make_problem(1, 1))


def test_contradictory_limits_are_infeasible(make_problem):
    with pytest.raises(InfeasibleError):
        PLANNER.decide(make_problem(11, 11, min_average_bits=16))


def test_a_request_longer_than_the_model_attends_to(make_problem):
    with pytest.raises(SpecError, match="tokens a request"):
        PLANNER.decide(make_problem(*ROOMY, prompt_tokens=10_000_000))


def test_schedule_counts_every_pass(make_problem):
    problem = make_problem(*ROOMY, prefill_microbatch=2, decode_microbatch=1)
    decision = PLANNER.decide(problem).decision
    schedule = PLANNER.schedule(problem, decision)
    stages = len(decision.stages)
    ops = [action.op for action in schedule]
    assert ops.count("prefill") == 2 * stages
    assert ops.count("decode") == 7 * 4 * stages
    assert ops.count("send") == ops.count("recv")


def test_rivals_are_feasible_close_and_different(make_problem):
    problem = make_problem(*ROOMY, min_average_bits=8)
    decision = PLANNER.decide(problem).decision
    rivals = PLANNER.rivals(problem, decision, 4)
    best = Forecast(PLANNER, problem, decision).total_s
    assert rivals
    assert decision not in rivals.values()
    for rival in rivals.values():
        assert rival.average_bits >= 8 - 1e-9
        assert Forecast(PLANNER, problem, rival).total_s <= 1.1 * best


def test_stages_compute_the_tokens_of_one_process(make_problem):
    problem = make_problem(*ROOMY, prefill_microbatch=2, decode_microbatch=1, min_average_bits=8)
    two = PLANNER.decide(problem).decision
    if len(two.stages) == 1:
        pytest.skip("the made-up costs prefer one device")
    first, second = two.stages
    one = two.model_copy(
        update={
            "stages": (
                first.model_copy(
                    update={
                        "end": second.end,
                        "bits": first.bits + second.bits,
                        "kernels": {**second.kernels, **first.kernels},
                    }
                ),
            )
        }
    )
    arguments = (problem.model, problem.cluster, problem.workload)
    split = single_process_tokens(*arguments, two, "reference", 0)
    whole = single_process_tokens(*arguments, one, "reference", 0)
    assert compare_tokens(split, whole, "reference").exact
    forced = single_process_tokens(*arguments, two, "forced", 0)
    again = compare_tokens(forced, forced, "forced")
    assert again.passed
    assert again.details["largest_logit_difference"] == 0
