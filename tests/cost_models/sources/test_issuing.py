"""What a profiled GPU's host takes to issue calls, and what of it a device waits for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreplan.cost_models.book import Profiles, cost_book
from foreplan.cost_models.costs import CostBook, HostLaunch, HostWait, Segment
from foreplan.cost_models.rates.gpu_host import SECONDS
from foreplan.cost_models.sources.issuing import IssueSource
from foreplan.cost_models.sources.tables import MeasuredSource
from foreplan.datasets.device import Device
from foreplan.datasets.kernels.training_programs import linear_program, optimizer_program
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program
from foreplan.planner.api import load_cluster

SMALL = linear_program("forward", 8, 16, 16, "fp32/fp32/torch.linear")
LARGE = linear_program("forward", 4096, 4096, 4096, "fp32/fp32/torch.linear")
OTHER = linear_program("forward", 8, 16, 16, "fp32/bf16/torch.linear")
UPDATE = optimizer_program("adamw", 4096, 2)


def row(item: Program, seconds: float, issue_s: float | None) -> Row:
    return Row(
        op=item.op, dims=item.dims, variant=str(item.variant), status="ok", samples=9,
        low_s=seconds, median_s=seconds, high_s=seconds, issue_s=issue_s,
    )  # fmt: skip


def profile(*rows: Row) -> Profile:
    gpu = Device(name="cuda:0", chip="gh100", vendor="v", kind="cuda", launch_overhead_s=7e-6)
    return Profile(device=gpu, software={"torch": "2.13"}, rows=rows)


KNOWN = profile(row(SMALL, 22e-6, 20e-6), row(LARGE, 9e-3, None), row(UPDATE, 1e-4, 9e-5))


def book(known: Profile) -> CostBook:
    return CostBook([MeasuredSource(known), IssueSource({"cuda:0": known.rows})])


def test_a_host_takes_its_calls_and_what_runs_around_them() -> None:
    wait = HostWait("forward", ((SMALL, 3), (HostLaunch(2), 1)), 0.5)
    found = book(KNOWN).issuing(wait, "cuda:0")
    assert found is not None
    assert found.mean_s == pytest.approx(5 * 20e-6 + 0.5 * SECONDS["forward"].once_s)
    assert found.low_s < found.mean_s < found.high_s
    # 100 us of calls that were timed, and more around them, which other hosts have told.
    assert found.source == "predicted"
    many = book(KNOWN).issuing(HostWait("forward", ((SMALL, 300),), 0.5), "cuda:0")
    assert many is not None
    assert many.source == "interpolated"
    like = book(KNOWN).issuing(HostWait("forward", ((LARGE, 300),), 0.5), "cuda:0")
    assert like is not None
    assert like.source == "extrapolated"


@pytest.mark.parametrize(("item", "issue_s"), [(LARGE, 20e-6), (OTHER, 20e-6)])
def test_a_call_without_a_time_takes_that_of_one_like_it(item: Program, issue_s: float) -> None:
    found = book(KNOWN).issuing(HostWait("backward", ((item, 1),), 0.0), "cuda:0")
    assert found is not None
    assert found.mean_s == pytest.approx(issue_s)


@given(st.integers(0, 400), st.integers(0, 2), st.floats(0, 1))
def test_a_part_takes_what_is_longer(small: int, large: int, share: float) -> None:
    works = tuple((item, n) for item, n in ((SMALL, small), (LARGE, large)) if n)
    wait = HostWait("forward", works, share)
    costs = book(KNOWN)
    host = costs.issuing(wait, "cuda:0")
    assert host is not None
    device_s = sum(costs.cost(item, "cuda:0").mean_s * n for item, n in works)
    whole = costs.cost(Segment("forward", (*works, (wait, 1))), "cuda:0")
    assert whole.mean_s == pytest.approx(max(device_s, host.mean_s))
    assert whole.low_s <= whole.mean_s <= whole.high_s


def test_nothing_waits_where_nobody_timed_the_host() -> None:
    old = profile(row(SMALL, 22e-6, None))
    wait = HostWait("forward", ((SMALL, 1),))
    for costs in (book(old), CostBook([MeasuredSource(old)])):
        assert costs.issuing(wait, "cuda:0") is None
        assert costs.cost(wait, "cuda:0").mean_s == 0


@pytest.mark.parametrize(
    ("issued", "choice", "known"),
    [
        (True, "measured", True), (False, "measured", False), (True, "predicted", False),
        (True, "roofline", False),
    ],
)  # fmt: skip
def test_a_book_of_issued_steps_knows_the_hosts_of_profiles(
    issued: bool, choice: str, known: bool
) -> None:
    cluster, _ = load_cluster("1xh200@a")
    label = cluster.ranks()[0].label
    costs = cost_book(cluster, Profiles({label: KNOWN}), choice, issued=issued)
    found = costs.issuing(HostWait("optimizer", ((UPDATE, 1),)), label)
    assert (found is not None) == known
