"""`DecisionView`: any planner's decision in a sentence."""

from foreplan.planner.report.decision import DecisionView


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
