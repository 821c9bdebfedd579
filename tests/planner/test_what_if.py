"""What a binding limit costs is what a plan without it takes, nothing guessed."""

import pytest

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.specs import validate
from foreplan.planner.api import plan

MODEL, WORKLOAD = "demo-llama-random", {"batch": 8, "prompt_tokens": 64, "new_tokens": 8}


def cluster(fast_mib, slow_mib=4096):
    tier = {"group": "all", "scope": "host", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e10,
            "source": "test"}  # fmt: skip
    devices = [
        {"name": "a100-80g", "memory_bytes": round(fast_mib * (1 << 20))},
        {"name": "t4", "memory_bytes": round(slow_mib * (1 << 20))},
    ]
    return validate(Cluster, {"devices": devices, "tiers": [tier]}, "test")


def made(fast_mib, relax=True, **workload):
    return plan(
        "serving", MODEL, cluster(fast_mib), WORKLOAD | workload, costs="roofline", relax=relax
    )


@pytest.fixture(scope="module")
def full():
    """A plan whose fast device is nearly full, so that layers are on the slow one."""
    return made(320.0, min_average_bits=16)


def test_more_memory_is_worth_what_a_plan_with_it_takes(full):
    memory = next(item for item in full.what_if if item.limit.startswith("memory of a100"))
    with_more = made(320.0 * 1.1, relax=False, min_average_bits=16)
    assert memory.total_s == pytest.approx(with_more.predicted.total_s, rel=1e-9)
    assert memory.gain == pytest.approx(1 - memory.total_s / full.predicted.total_s)
    assert memory.gain > 0.01


def test_fewer_bits_are_worth_what_a_plan_with_them_takes(full):
    bits = next(item for item in full.what_if if item.limit == "min_average_bits")
    with_fewer = made(320.0, relax=False, min_average_bits=14.4)
    assert bits.total_s == pytest.approx(with_fewer.predicted.total_s, rel=1e-9)
    assert bits.gain > 0.01


def test_limits_with_room_are_not_asked_about(full):
    assert {item.limit for item in full.what_if} <= {
        "memory of a100_sxm_80gb", "memory of t4", "min_average_bits",
    }  # fmt: skip
    assert not any(item.limit == "memory of t4" for item in full.what_if)
    roomy = made(4096.0)
    assert roomy.what_if == ()


def test_nothing_is_asked_unless_wanted(full):
    assert made(320.0, relax=False, min_average_bits=16).what_if is None
    again = type(full).model_validate_json(full.to_json())
    assert again.what_if == full.what_if
