"""`DecisionView`: any planner's decision in a sentence."""

from foreplan.planner.report.decision import DecisionView
from foreplan.planner.report.summary import Summary


def view(*workers, **fields):
    return DecisionView.of({"workers": list(workers), **fields})


def worker(device, **operators):
    return {"device": device, "operators": operators}


def test_values_are_counted_device_by_device():
    made = view(
        worker("a", x="int8", y="int8", z="fp32"), worker("b", x="fp32", y="fp32", z="fp32")
    )
    assert made.sentence == "operators 2 int8, 1 fp32 on a; 3 fp32 on b"


def test_devices_that_agree_are_not_named():
    made = view(worker("a", x="int8", y="fp32"), worker("b", x="int8", y="fp32"), tau=4)
    assert made.sentence == "operators 1 int8, 1 fp32, tau 4"


def test_rare_values_are_counted_together():
    made = view(worker("a", **{name: name for name in "pqrst"}))
    assert made.sentence.endswith("and 2 more kinds")


def test_fingerprints_are_left_out():
    assert DecisionView.of({"network": "3f0f69dff5b6dd09", "tau": 4}).sentence == "tau 4"


def summary(devices, *stages):
    decision = DecisionView.of({"stages": list(stages)})
    return Summary("", "", (), (), devices, "", decision)


def test_stages_stand_with_the_ranks_that_hold_them():
    """Pipelines may begin on any rank, and give a rank several stages."""
    first, second = {"rank": 1, "start": 0, "end": 2}, {"rank": 0, "start": 2, "end": 3}
    one_each = summary(("a", "b"), first, second)
    assert [one_each.device_of(k) for k in range(2)] == ["b", "a"]
    assert [stage.layers for stage in one_each.by_rank()] == ["2", "0–1"]
    more = summary(("a", "b"), first, second, {"rank": 1, "start": 3, "end": 4})
    assert [more.device_of(k) for k in range(3)] == ["b", "a", "b"]
    assert more.by_rank() == ()
    idle = summary(("a", "b"), first, {"rank": 1, "start": 2, "end": 3})
    assert [idle.device_of(k) for k in range(2)] == ["b", "b"]
    assert idle.by_rank() == ()


def test_stages_that_name_devices_are_in_the_order_of_the_ranks():
    stages = ({"device": f"h/{name}", "rank": 7, "start": 0, "end": 1} for name in "ab")
    named = summary(("a", "b"), *stages)
    assert [named.device_of(k) for k in range(2)] == ["a", "b"]
    assert len(named.by_rank()) == 2
    assert summary(("a",), {"device": "h/a"}, {"device": "h/b"}).device_of(1) == "h/b"
