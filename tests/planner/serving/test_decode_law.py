"""The solver's law of latency against the event simulator that times a serving schedule.

The law (`foreplan.solvers.chain_problem`) is::

    latency = sum P + (Mp - 1) max P + (n - 1) max(sum D, m max D)

LLM-PQ's objective takes ``sum D + (m - 1) (n - 1) max D`` for decoding, which forgets that a
micro-batch has to come round before its next token: with one micro-batch a second token is free.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreplan.cost_models.simulator import Simulator
from foreplan.planner.serving.pipeline import ServingSchedule
from foreplan.planner.serving.pricing import Pricing
from foreplan.planner.serving.spec import ServingDecision, StageDecision
from foreplan.solvers.chain_problem import ChainProblem
from foreplan.solvers.chain_score import ChainAssignment, evaluate, make_stage

LAYERS = 8  # of tiny-llama-random
BATCH = 12
DIVISORS = [1, 2, 3, 4, 6, 12]
KERNELS = {
    f"{phase}/{op}": f"bf16/bf16/torch.{'sdpa' if op == 'attention' else 'linear'}"
    for phase in ("prefill", "decode")
    for op in ("attention", "head", "linear/16")
}


class Pipeline:
    """Stages with given times, priced by both: one layer a stage, the last takes the rest."""

    def __init__(self, make_problem, prefill_s, decode_s, hop_s, prefills, decodes):
        self.prefill_s, self.decode_s, self.hop_s = prefill_s, decode_s, hop_s
        self.prefills, self.decodes = prefills, decodes
        self.make_problem = make_problem

    def simulated_s(self, new_tokens):
        """Makespan of the very schedule that the planner builds, with these times."""
        stages = len(self.prefill_s)
        problem = self.make_problem(*[256.0] * stages, batch=BATCH, new_tokens=new_tokens)
        ends = [*range(1, stages), LAYERS]
        labels = [rank.label for rank in problem.cluster.ranks()]
        decision = ServingDecision(
            stages=tuple(
                StageDecision(
                    rank=i, device=label, start=i, end=end, bits=(16,) * (end - i),
                    kernels=KERNELS,
                )
                for i, (end, label) in enumerate(zip(ends, labels, strict=True))
            ),
            prefill_microbatch=BATCH // self.prefills, decode_microbatch=BATCH // self.decodes,
            average_bits=16.0, omega=0.0,
        )  # fmt: skip
        pricing = Pricing(problem.model, problem.workload, problem.costs)
        schedule = ServingSchedule(pricing, problem.cluster, decision).build()
        by_op = {"prefill": self.prefill_s, "decode": self.decode_s}
        hop = {"send": self.hop_s, "recv": 0.0}
        duration = [
            by_op[action.op][action.stage] if action.op in by_op else hop[action.op]
            for action in schedule
        ]
        return Simulator(schedule).run(np.array(duration)).makespan_s

    def law_s(self, new_tokens):
        """The closed form, from the evaluator that the solver answers to."""
        stages = len(self.prefill_s)

        def layers(seconds):
            return np.broadcast_to(np.array(seconds)[:, None, None], (stages, stages, 1))

        links = np.full((stages, stages), self.hop_s)
        problem = ChainProblem(
            counts=np.ones(stages, dtype=int), prefill_s=layers(self.prefill_s),
            decode_s=layers(self.decode_s), memory_bytes=np.zeros((stages, stages, 1)),
            capacity_bytes=np.ones(stages), link_prefill_s=links, link_decode_s=links,
            link_return_decode_s=links, prefill_microbatches=self.prefills,
            decode_microbatches=self.decodes, new_tokens=new_tokens,
        )  # fmt: skip
        chain = tuple(make_stage(problem, k, k, k + 1, [0]) for k in range(stages))
        return evaluate(problem, ChainAssignment(chain)).latency_s

    def llm_pq_s(self, new_tokens):
        """LLM-PQ's objective for the same stages; it knows no hops that are not hidden."""
        prefill = sum(self.prefill_s) + (self.prefills - 1) * max(self.prefill_s)
        rounds = (self.decodes - 1) * (new_tokens - 1)
        return prefill + sum(self.decode_s) + rounds * max(self.decode_s)


#: The fixture only builds things, so that examples may share it.
SETTINGS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
seconds = st.integers(1, 64).map(lambda n: n / 64)  # exact in binary


#: A prefill of at most 1/64 s a micro-batch: what piles up before the slowest stage is worked off
#: by at least 1/64 s a round and stage, so that the pipeline repeats itself after 60 tokens.
short = seconds.map(lambda s: s / 64)


@SETTINGS
@given(
    stages=st.lists(st.tuples(short, seconds), min_size=1, max_size=5),
    hop_s=st.sampled_from([0.0, 1 / 64, 1 / 4]),
    prefills=st.sampled_from(DIVISORS),
    decodes=st.sampled_from(DIVISORS),
)
def test_a_further_token_costs_what_the_law_says(make_problem, stages, hop_s, prefills, decodes):
    pipeline = Pipeline(make_problem, *zip(*stages, strict=True), hop_s, prefills, decodes)
    few, many = 64, 80
    # How the pipeline comes to repeat itself has no part in the slope.
    measured = (pipeline.simulated_s(many) - pipeline.simulated_s(few)) / (many - few)
    promised = (pipeline.law_s(many) - pipeline.law_s(few)) / (many - few)
    assert measured == pytest.approx(promised, rel=1e-9)


@SETTINGS
@given(
    stages=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5),
    prefills=st.sampled_from(DIVISORS),
    decodes=st.sampled_from(DIVISORS),
)
def test_prefill_is_the_fill_of_a_pipeline(make_problem, stages, prefills, decodes):
    pipeline = Pipeline(make_problem, *zip(*stages, strict=True), 0.0, prefills, decodes)
    assert pipeline.simulated_s(1) == pytest.approx(pipeline.law_s(1), rel=1e-12)


@pytest.mark.parametrize("decodes", [1, 2, 3, 4, 12])
def test_whole_run_with_fewer_and_with_more_microbatches_than_stages(make_problem, decodes):
    pipeline = Pipeline(make_problem, [0.5] * 4, [0.25, 0.5, 0.125, 0.25], 0.0, 4, decodes)
    n = 64
    law, simulated = pipeline.law_s(n), pipeline.simulated_s(n)
    # The law lets decoding begin when all of prefill is over; it may begin a round earlier.
    assert 0 <= law - simulated <= pipeline.law_s(2)
    assert simulated == pytest.approx(law, rel=0.05)


def test_where_the_law_of_llm_pq_goes_wrong(make_problem):
    """One micro-batch on four equal stages: a token costs a whole round, LLM-PQ counts none."""
    n = 64
    one = Pipeline(make_problem, [0.5] * 4, [0.25] * 4, 0.0, 1, 1)
    assert one.simulated_s(n) == one.law_s(n) == 4 * 0.5 + (n - 1) * 4 * 0.25
    assert one.llm_pq_s(n) == one.llm_pq_s(2) < 0.1 * one.simulated_s(n)
    # With as many micro-batches as stages it is short by one of them; with many it comes close.
    four = Pipeline(make_problem, [0.5] * 4, [0.25] * 4, 0.0, 4, 4)
    assert four.llm_pq_s(n) == pytest.approx(0.77 * four.simulated_s(n), rel=0.02)
    twelve = Pipeline(make_problem, [0.5] * 4, [0.25] * 4, 0.0, 4, 12)
    assert twelve.llm_pq_s(n) == pytest.approx(twelve.simulated_s(n), rel=0.1)
