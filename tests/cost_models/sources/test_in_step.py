"""Prices of a training step's programs, corrected by what a pass took."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.costs import CostBook, Estimate, Work
from foreplan.cost_models.sources.in_step import InStepFactor, InStepSource, in_step_factors
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device import Device
from foreplan.datasets.kernels.training_programs import optimizer_program
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError

FP32 = Variant("fp32", "fp32", "torch.linear")
FORWARD = program("linear_forward", FP32, rows=8, n=64, k=64)
DECODING = program("linear", FP32, rows=8, n=64, k=64)


def row(item: Program, seconds: float) -> Row:
    return Row(
        op=item.op, dims=item.dims, variant=str(item.variant), status="ok", samples=9,
        low_s=seconds, median_s=seconds, high_s=2 * seconds,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "host", "expected"),
    [("measured", "localhost", 0.8), ("measured", None, 0.8), ("measured", "other", 1.0)],
)
def test_measured_prices_are_those_in_a_pass(
    choice: str, host: str | None, expected: float
) -> None:
    device = Device(
        name="cpu:threads=1", chip="c", vendor="v", kind="cpu", launch_overhead_s=1e-6,
        memory_bandwidth=1e9,
    )  # fmt: skip
    profile = Profile(
        device=device, software={"torch": "2.13"}, rows=(row(FORWARD, 1e-3), row(DECODING, 1e-3))
    )
    passes = {"kind": "training", "host": host, "factors": {1: 0.8, 2: 1.2}}
    devices = [{"name": "cpu:threads=1"}, {"name": "cpu:threads=1", "host": "other"}]
    cluster = validate(Cluster, {"devices": devices, "contention": [passes]}, "cluster")
    label = next(rank.label for rank in cluster.ranks() if rank.host == "localhost")
    plain = validate(Cluster, {"devices": devices}, "cluster")
    profiles = Profiles({label: profile})
    found, before = (cost_book(of, profiles, choice) for of in (cluster, plain))
    step, once = found.cost(FORWARD, label), before.cost(FORWARD, label)
    assert (step.mean_s, step.low_s, step.high_s) == pytest.approx(
        (once.mean_s * expected, once.low_s * expected, once.high_s * expected)
    )
    assert step.source == "measured"
    assert found.cost(DECODING, label) == before.cost(DECODING, label)


def test_programs_go_by_their_own_part_in_a_pass_or_by_the_nearest() -> None:
    wide, wider = (program("linear_forward", FP32, rows=8, n=n, k=64) for n in (128, 1024))
    back = program("linear_backward", FP32, rows=8, n=64, k=64)
    device = Device(
        name="cpu:threads=1", chip="c", vendor="v", kind="cpu", launch_overhead_s=1e-6,
        memory_bandwidth=1e9,
    )  # fmt: skip
    items = (FORWARD, wide, wider, back, DECODING)
    rows = tuple(row(item, 1e-3) for item in items)
    profile = Profile(device=device, software={"torch": "2.13"}, rows=rows)
    own = [
        {
            "device": name, "op": item.op, "dims": item.dims, "variant": str(item.variant),
            "factor": factor,
        }
        for name, item, factor in (
            ("cpu:threads=1", FORWARD, 0.5), ("cpu:threads=1", wider, 0.75),
            ("cpu:threads=2", FORWARD, 3.0),
        )
    ]  # fmt: skip
    passes = {"kind": "training", "factors": {1: 0.9, 2: 1.2}, "programs": own}
    devices = [{"name": "cpu:threads=1"}, {"name": "cpu:threads=4"}]
    cluster = validate(Cluster, {"devices": devices, "contention": [passes]}, "cluster")
    one, other = (rank.label for rank in cluster.ranks())
    plain = validate(Cluster, {"devices": devices}, "cluster")
    found, before = (cost_book(of, Profiles({one: profile}), "measured") for of in (cluster, plain))
    factors = [found.cost(item, one).mean_s / before.cost(item, one).mean_s for item in items]
    assert factors == pytest.approx([0.5, 0.5, 0.75, 0.9, 1.0])
    optimizer = optimizer_program("adamw", 4096)
    assert in_step_factors(cluster)[one](optimizer) == 1.0, "which is behind all passes"
    assert in_step_factors(cluster)[other](FORWARD) == 0.9, (
        "of its host, where no program was timed"
    )


def test_ranks_that_share_a_profile_share_what_corrects_it() -> None:
    """A GPU of many alike is profiled, on one host."""
    own = {
        "device": "cuda:0", "op": FORWARD.op, "dims": FORWARD.dims, "variant": str(FORWARD.variant),
        "factor": 0.5,
    }  # fmt: skip
    passes = {"kind": "training", "host": "a", "factors": {1: 0.75}, "programs": [own]}
    devices = [
        {"name": "cuda:0", "host": "a", "profile": "one.json"},
        {"name": "cuda:1", "host": "a", "profile": "one.json"},
        {"name": "cuda:2", "host": "a", "profile": "other.json"},
        {"name": "cuda:0", "host": "b", "profile": "one.json"},
        {"name": "cuda:1", "host": "b", "profile": "other.json"},
        {"name": "cuda:2", "host": "b"},
    ]
    cluster = validate(Cluster, {"devices": devices, "contention": [passes]}, "cluster")
    found = in_step_factors(cluster)
    factors = [found[rank.label](FORWARD) for rank in cluster.ranks()]
    assert factors == [0.5, 0.5, 0.75, 0.5, 0.75, 1.0]
    issued = in_step_factors(cluster, issued=True)
    assert {issued[rank.label](FORWARD) for rank in cluster.ranks()} == {1.0}


@pytest.mark.parametrize(
    "broken", [{"op": "no_such"}, {"dims": {"rows": 8}}, {"variant": "fp32"}, {"factor": 0.0}]
)
def test_a_strange_program_of_a_pass_is_refused_in_a_line(broken: dict[str, object]) -> None:
    own = {
        "device": "cpu",
        "op": FORWARD.op,
        "dims": FORWARD.dims,
        "variant": str(FP32),
        "factor": 1.0,
    }
    passes = {"kind": "training", "factors": {1: 0.9}, "programs": [own | broken]}
    with pytest.raises(SpecError, match=r"cluster: contention\[0\]\.programs\[0\]"):
        validate(Cluster, {"devices": [{"name": "cpu"}], "contention": [passes]}, "cluster")


def test_figures_alone_stay_as_they_are() -> None:
    passes, one = {"kind": "training", "factors": {1: 0.8}}, [{"name": "t4"}]
    prices = [
        cost_book(validate(Cluster, document, "cluster"), Profiles(), "roofline")
        .cost(FORWARD, "localhost/t4").mean_s
        for document in ({"devices": one}, {"devices": one, "contention": [passes]})
    ]  # fmt: skip
    assert prices[0] == prices[1]


def test_programs_are_priced_at_once_where_a_source_can() -> None:
    class Batch:
        def __init__(self) -> None:
            self.asked: list[list[Program]] = []

        def prepare(self, programs: Sequence[Program], device: str) -> None:
            self.asked.append(list(programs))

        def estimate(self, work: Work, device: str) -> Estimate | None:
            return Estimate.exact(1e-3)

    batch = Batch()
    book = CostBook([InStepSource([batch], {"a": InStepFactor(0.8, {})})])
    book.prepare([FORWARD, DECODING], "a")
    assert batch.asked == [[FORWARD, DECODING]]
    assert [book.cost(item, "a").mean_s for item in (FORWARD, DECODING)] == [0.8e-3, 1e-3]
