"""What a run compares a plan with."""

import foreplan
from foreplan.planner.registry import planner
from foreplan.planner.verify.candidates import candidates_of
from foreplan.planner.verify.session import problem_of


def test_rivals_of_a_run_are_held_to_the_time_limits() -> None:
    """The walks that find them know none."""
    asked = ("serving", "tiny-llama-random", "2xt4")
    fields = {"batch": 8, "prompt_tokens": 64, "new_tokens": 8}
    free = foreplan.plan(*asked, fields, costs="roofline")
    limit = 1.001 * free.predicted.metrics["time_to_first_token_s"]
    limited = fields | {"max_time_to_first_token_s": limit}
    made = foreplan.plan(*asked, limited, costs="roofline")
    chosen = planner("serving")
    compared = candidates_of(made, chosen, problem_of(made, chosen), thorough=True)
    rivals = [c for c in compared if c.role == "rival"]
    late = [c.predicted.metrics["time_to_first_token_s"] > limit * (1 + 1e-9) for c in rivals]
    assert 0 < sum(late) < len(late)
    assert [not c.limits_met for c in rivals] == late
