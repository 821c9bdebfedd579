"""Laws of whole plans, as the simulator times them: more to choose from is never worse, more work
is never faster, and nothing is proven that a plan disproves.
"""

from random import Random

import pytest

import foreplan

ZOO = ("t4", "l4", "v100-32g", "a10", "rtx_3090", "p100_pcie_16gb")
#: Simulations of one law in another order of additions.
ROUNDING = 1e-9


def _plan(devices, workload):
    return foreplan.plan(
        "serving", "tiny-llama-random", ",".join(devices), workload, costs="roofline"
    )


@pytest.fixture(scope="module", params=range(4))
def case(request):
    """Devices, a workload and the seconds of its plan."""
    random = Random(request.param)
    devices = [f"{random.randint(1, 2)}x{name}" for name in random.sample(ZOO, 2)]
    workload = {
        "batch": random.choice((4, 8)), "prompt_tokens": random.choice((32, 128)),
        "new_tokens": random.choice((4, 16)), "min_average_bits": random.choice((6, 8)),
    }  # fmt: skip
    return devices, workload, _plan(devices, workload)


@pytest.mark.parametrize("more", ZOO[::3])
def test_another_device_never_makes_a_plan_worse(case, more):
    devices, workload, plan = case
    wider = _plan([*devices, f"1x{more}"], workload)
    assert wider.predicted.total_s <= plan.predicted.total_s * (1 + ROUNDING)


def test_a_looser_limit_never_makes_a_plan_worse(case):
    devices, workload, plan = case
    looser = _plan(devices, workload | {"min_average_bits": 4})
    assert looser.predicted.total_s <= plan.predicted.total_s * (1 + ROUNDING)


@pytest.mark.parametrize("size", ["batch", "prompt_tokens", "new_tokens"])
def test_twice_the_work_is_never_faster(case, size):
    devices, workload, plan = case
    longer = _plan(devices, workload | {size: 2 * workload[size]})
    assert longer.predicted.total_s >= plan.predicted.total_s * (1 - ROUNDING)


def test_no_bound_is_above_what_a_plan_takes(case):
    _, _, plan = case
    seen = [other.predicted.total_s for other in plan.alternatives if other.limits_met]
    assert plan.bound.lower_s is not None
    assert plan.bound.lower_s <= plan.predicted.total_s
    assert plan.bound.lower_s <= min(seen, default=plan.predicted.total_s) * (1 + 1e-6)


def test_devices_that_help_by_the_law_alone_stay_unused():
    """Few tokens of two requests fill no pipeline: one L4 is as fast as any number, in reality."""
    workload = {"batch": 2, "prompt_tokens": 64, "new_tokens": 8, "bits": 16}
    found = [
        foreplan.plan("serving", "llama-3.2-1b", devices, workload, costs="predicted")
        for devices in ("l4", "4xl4")
    ]
    one, four = found
    assert four.predicted.total_s <= one.predicted.total_s * (1 + ROUNDING)
    assert four.bound.lower_s < one.bound.lower_s  # the law's, of steady rates
