"""What a plan's confidence costs: a usual plan, and one with over ten thousand actions."""

from __future__ import annotations

import time

import pytest

from foreplan.planner import api
from foreplan.planner.confidence import confidence

CASES = {
    "usual": ("llama-2-13b", "a10,2xt4", {"new_tokens": 32}),
    "long": ("gpt2", "a10,t4", {"new_tokens": 512, "decode_microbatch": 1}),
}


@pytest.mark.benchmark(group="confidence")
@pytest.mark.parametrize("name", CASES)
def test_confidence_of_a_plan(benchmark, monkeypatch, name: str) -> None:
    model, devices, more = CASES[name]
    calls = []

    class Asked(Exception):
        """The plan is made as far as here."""

    def ask(*arguments, **options):
        calls.append((arguments, options))
        raise Asked

    monkeypatch.setattr(api, "confidence", ask)
    workload = {"batch": 16, "prompt_tokens": 128, "prefill_microbatch": 4, "decode_microbatch": 4}
    with pytest.raises(Asked):
        api.plan("serving", model, devices, workload | more, costs="roofline")
    ((arguments, options),) = calls
    begun = time.process_time()
    found = benchmark.pedantic(confidence, args=arguments, kwargs=options, rounds=1)
    spent = time.process_time() - begun
    assert found.draws >= 64
    if benchmark.stats is not None:
        _, _, chosen, others = arguments
        benchmark.extra_info |= {
            "actions": len(chosen.forecast.schedule), "contenders": 1 + len(others),
            "cpu_s": round(spent, 3),
        }  # fmt: skip
