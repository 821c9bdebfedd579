"""Confidence: laws for any prices, values known in closed form, and all three planners."""

import json
import math
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.costs import CostBook, Estimate, Segment
from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.specs import StrictModel
from foreplan.planner.api import plan
from foreplan.planner.base import Planner, Problem, TimeLimit
from foreplan.planner.confidence import Contender, confidence
from foreplan.planner.predict import Forecast
from foreplan.planner.serving import ServingPlanner
from foreplan.planner.sureness import Confidence

Z90 = NormalDist().inv_cdf(0.95)


class Recipe(StrictModel):
    """How often each program runs, one after the other."""

    counts: dict[str, int]


class Cooking(Planner):
    """Runs a recipe on one device; nothing is decided."""

    kind = "cooking"
    workload_type = decision_type = Recipe

    def decide(self, problem):
        raise NotImplementedError

    def baselines(self, problem):
        return {}

    def schedule(self, problem, decision):
        builder = ScheduleBuilder([rank.label for rank in problem.cluster.ranks()])
        for name, count in decision.counts.items():
            for _ in range(count):
                builder.add(name, 0, Segment(name))
        return builder.build()

    def memory(self, problem, decision):
        return (MemoryLedger("t4", None, {}),)

    def kernels(self, problem, decision, rank, *, mode):
        raise NotImplementedError


class Prices:
    """Log-normal prices: 90 % intervals of given standard deviations of the logarithm."""

    def __init__(self, mean, spread):
        self.mean, self.spread = mean, spread

    def estimate(self, work, device):
        mean, half = self.mean[work.name], math.exp(Z90 * self.spread[work.name])
        return Estimate(mean, mean / half, mean * half, "predicted")


def judge(recipes, mean, spread, *, planner=None, seed=0, draws=None) -> Confidence:
    """Confidence in the first recipe."""
    planner = planner or Cooking()
    problem = Problem(
        None, parse_devices("t4", "test"), Recipe(counts={}), CostBook([Prices(mean, spread)])
    )
    made = []
    for name, counts in recipes.items():
        decision = Recipe(counts=counts)
        made.append(Contender(name, decision, Forecast(planner, problem, decision)))
    return confidence(planner, problem, made[0], made[1:], seed=seed, draws=draws)


def total(counts, mean):
    return sum(mean[name] * count for name, count in counts.items())


PROGRAMS = ("a", "b", "c")
seconds = st.floats(1e-6, 10.0)
deviation = st.floats(0.0, 0.8)
recipe = st.dictionaries(st.sampled_from(PROGRAMS), st.integers(1, 3), min_size=1)
prices = st.fixed_dictionaries(dict.fromkeys(PROGRAMS, seconds))
spreads = st.fixed_dictionaries(dict.fromkeys(PROGRAMS, deviation))
recipes = st.lists(recipe, min_size=2, max_size=4).map(
    lambda made: {f"recipe {k}": counts for k, counts in enumerate(made)}
)


@given(recipes, prices)
def test_prices_without_doubt_give_certainty(made, mean):
    ordered = dict(sorted(made.items(), key=lambda item: total(item[1], mean)))
    sure = judge(ordered, mean, dict.fromkeys(PROGRAMS, 0.0), draws=16)
    assert sure.probability_best == 1.0
    assert sure.measure_next == ()
    assert sure.runner_up is None


@given(recipes, prices, spreads, st.integers(0, 5))
def test_shares_are_a_distribution_and_follow_from_the_seed(made, mean, spread, seed):
    sure = judge(made, mean, spread, seed=seed, draws=64)
    assert sure.probability_best + sum(sure.share.values()) == pytest.approx(1.0)
    assert all(0.0 <= share <= 1.0 for share in sure.share.values())
    assert judge(made, mean, spread, seed=seed, draws=64) == sure
    first, *rest = made.items()
    other_order = judge(dict([first, *rest[::-1]]), mean, spread, seed=seed, draws=64)
    assert other_order.probability_best == sure.probability_best


@given(recipes, prices, spreads)
@settings(max_examples=30)
def test_measurements_never_lower_the_chance(made, mean, spread):
    sure = judge(made, mean, spread, draws=64)
    chance = max(sure.probability_best, *sure.share.values())
    for item in sure.measure_next:
        assert chance < item.probability_best <= 1.0 + 1e-9
        chance = item.probability_best


@given(recipe, st.integers(2, 4), prices, spreads)
def test_a_decision_is_surely_better_than_itself_done_twice(counts, times, mean, spread):
    doubled = {name: times * count for name, count in counts.items()}
    sure = judge({"once": counts, "twice": doubled}, mean, spread, draws=32)
    assert sure.probability_best == 1.0


@pytest.mark.parametrize(("ratio", "left", "right"), [(1.1, 0.2, 0.2), (1.3, 0.3, 0.1), (1, 0, 1)])
def test_two_independent_prices_in_closed_form(ratio, left, right):
    """P(a < b) of log-normal prices is Phi(log(b / a) / sqrt(sa^2 + sb^2))."""
    sure = judge({"a": {"a": 1}, "b": {"b": 1}}, {"a": 1.0, "b": ratio}, {"a": left, "b": right})
    expected = NormalDist().cdf(math.log(ratio) / math.hypot(left, right))
    assert sure.probability_best == pytest.approx(expected, abs=0.04)
    assert sure.share["b"] == pytest.approx(1 - sure.probability_best)


def test_the_value_of_knowing_the_one_doubtful_price_is_everything():
    sure = judge({"a": {"a": 1}, "b": {"b": 1}}, {"a": 1.0, "b": 1.1}, {"a": 0.4, "b": 0.0})
    (only,) = sure.measure_next
    assert (only.program, only.device, only.source) == ("a", "t4", "predicted")
    assert only.probability_best == pytest.approx(1.0, abs=0.02)
    assert (only.low, only.high) == pytest.approx((math.exp(-0.4 * Z90), math.exp(0.4 * Z90)))


def test_the_wider_interval_is_measured_first_and_both_settle_it():
    """Knowing b alone leaves Phi(|d - z_b s_b| / s_a), averaged over z_b."""
    sure = judge({"a": {"a": 1}, "b": {"b": 1}}, {"a": 1.0, "b": 1.05}, {"a": 0.1, "b": 0.3})
    first, second = sure.measure_next
    assert (first.program, second.program) == ("b", "a")
    normal, gap = NormalDist(), math.log(1.05)
    grid = [normal.inv_cdf((k + 0.5) / 2000) for k in range(2000)]
    expected = sum(normal.cdf(abs(gap + 0.3 * z) / 0.1) for z in grid) / len(grid)
    assert first.probability_best == pytest.approx(expected, abs=0.05)
    assert second.probability_best == pytest.approx(1.0, abs=0.02)


def test_what_both_run_alike_is_not_worth_a_measurement():
    mean, spread = {"a": 1.0, "b": 1.1, "c": 50.0}, {"a": 0.3, "b": 0.3, "c": 0.8}
    sure = judge({"a": {"a": 1, "c": 1}, "b": {"b": 1, "c": 1}}, mean, spread)
    assert {item.program for item in sure.measure_next} == {"a", "b"}


def test_the_runner_up_wins_most_of_what_is_left():
    mean, spread = {"a": 1.0, "b": 1.05, "c": 1.3}, {"a": 0.2, "b": 0.2, "c": 0.2}
    sure = judge({"x": {"a": 1}, "y": {"b": 1}, "z": {"c": 1}}, mean, spread, draws=512)
    assert sure.runner_up == "y"
    assert sure.in_time is None
    assert sure.share["y"] > sure.share["z"] > 0


class Frugal(Cooking):
    """Fewest runs within a limit of seconds, or of what another recipe takes."""

    limit: float | Recipe = 1.0

    def objective(self, problem, decision, total_s):
        return float(sum(decision.counts.values()))

    def time_limit(self, problem):
        return TimeLimit(self.limit)


def test_a_decision_that_misses_the_limit_cannot_be_the_best():
    frugal = Frugal()
    made = {"few": {"a": 1}, "many": {"b": 2}}
    sure = judge(made, {"a": 1.0, "b": 0.1}, {"a": 0.3, "b": 0.0}, planner=frugal)
    assert sure.probability_best == pytest.approx(0.5, abs=0.02)  # a at its mean just meets it
    assert sure.in_time == sure.probability_best
    assert sure.share["many"] == pytest.approx(1 - sure.probability_best)
    alone = judge(
        {"few": {"a": 1}, "late": {"b": 2}}, {"a": 1.0, "b": 9.0}, {"a": 0.3, "b": 0.0},
        planner=frugal,
    )  # fmt: skip
    assert alone.share == {"late": 0.0}
    assert alone.runner_up is None
    assert alone.probability_best == sure.probability_best


@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0])
def test_what_the_replay_of_the_choice_adds_is_no_miss(limit):
    """The choice takes 1.2 limits at its mean, so 1.2 limits are allowed to all."""
    frugal = Frugal()
    frugal.limit = limit
    made = {"chosen": {"a": 2}, "later": {"b": 1}}
    mean, spread = {"a": 0.6 * limit, "b": 1.3 * limit}, {"a": 0.0, "b": 0.0}
    assert judge(made, mean, spread, planner=frugal, draws=64).probability_best == 1.0
    in_time = {**mean, "b": 1.1 * limit}
    assert judge(made, in_time, spread, planner=frugal, draws=64).probability_best == 0.0


def test_a_limit_that_is_a_decision_moves_with_the_prices():
    frugal = Frugal()
    frugal.limit = Recipe(counts={"a": 2})
    sure = judge({"few": {"a": 1}, "many": {"a": 2}}, {"a": 1.0}, {"a": 0.8}, planner=frugal)
    assert sure.probability_best == 1.0


SMALL = {
    "serving": ("tiny-llama-random", "cpu", {"batch": 4, "prompt_tokens": 16, "new_tokens": 8}),
    "precision": (None, "cpu", {
        "network": "byte_lm", "batch": 2, "calibration_batches": 1,
        "network_options": {"width": 32, "layers": 1, "heads": 2, "context": 16},
    }),
    "bubbles": (None, "4xa100-80g", {
        "backbone": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1000},
        "encoders": [{"name": "vit", "dims": {"layers": 4, "hidden": 256, "heads": 4},
                      "tokens": 64, "patch_features": 48}],
        "sequence_length": 256, "microbatch": 1, "microbatches": 4, "plan": {"pp": 4},
    }),
}  # fmt: skip


@pytest.mark.parametrize("kind", SMALL)
def test_every_planner_says_how_sure_it_is(kind):
    model, devices, workload = SMALL[kind]
    devices = "t4,a100-80g" if devices == "cpu" else devices
    made = plan(kind, model, devices, workload, costs="roofline")
    sure = made.confidence
    assert sure.draws >= 64
    near = set(sure.share) - {other.name for other in made.alternatives}
    assert near, "no close decision took part"
    assert sure.probability_best + sum(sure.share.values()) <= 1.0 + 1e-9
    assert made.to_json() == type(made).model_validate_json(made.to_json()).to_json()


def test_close_serving_decisions_meet_every_limit(make_problem):
    problem = make_problem(9.0, 14.0, model="tiny-llama-random", min_average_bits=6)
    planner = ServingPlanner()
    choice = planner.decide(problem)
    assert choice.near
    found = [choice.decision, *choice.near.values()]
    assert len({decision.model_dump_json() for decision in found}) == len(found)
    for decision in choice.near.values():
        assert decision.average_bits >= 6
        for rank, ledger in enumerate(Forecast(planner, problem, decision).ledgers):
            ledger.check(rank)


def test_plans_of_early_versions_can_be_read():
    sure = {"probability_best": 0.5, "draws": 64, "measure_next": ["linear on t4"]}
    assert Confidence.model_validate_json(json.dumps(sure)).measure_next == ()


class Picky(Frugal):
    """An objective written for one number."""

    def objective(self, problem, decision, total_s):
        return 0.0 if total_s < 0.5 else float(sum(decision.counts.values()))


def test_objectives_for_one_number_do():
    mean, spread = {"a": 1.0, "b": 0.25}, {"a": 0.3, "b": 0.2}
    picky = judge({"few": {"a": 1}, "many": {"b": 2}}, mean, spread, planner=Picky())
    assert picky.probability_best + picky.share["many"] == pytest.approx(1.0)
    assert 0 < picky.share["many"] < 1
