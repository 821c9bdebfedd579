from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from foreplan.cost_models.costs import (
    SOURCES,
    BatchSource,
    Collective,
    Copy,
    CostBook,
    Estimate,
    HostLaunch,
    Lag,
    Segment,
    StorageAccess,
    Work,
)
from foreplan.cost_models.roofline import RooflineSource
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import MissingDataError

VARIANT = Variant("bf16", "bf16", "torch.linear")
LINEAR = program("linear", VARIANT, rows=8, n=16, k=32)


class Table:
    """A source that knows some works and counts how often it is asked."""

    def __init__(self, prices: dict[Work, float], source: str) -> None:
        self.prices, self.source, self.asked = prices, source, 0

    def estimate(self, work: Work, device: str) -> Estimate | None:
        self.asked += 1
        if work not in self.prices:
            return None
        mean = self.prices[work] * {"slow": 2.0}.get(device, 1.0)
        return Estimate(mean, 0.9 * mean, 1.2 * mean, self.source)


def test_first_source_that_answers_counts_and_prices_are_kept() -> None:
    measured = Table({LINEAR: 1.0}, "measured")
    roofline = Table({LINEAR: 5.0, Copy(8): 3.0}, "roofline")
    book = CostBook([measured, roofline])
    assert book.cost(LINEAR, "t4") == Estimate(1.0, 0.9, 1.2, "measured")
    assert book.cost(LINEAR, "slow").mean_s == 2.0
    assert book.cost(Copy(8), "t4").source == "roofline"
    asked = measured.asked, roofline.asked
    book.cost(LINEAR, "t4")
    book.cost(Copy(8), "t4")
    assert (measured.asked, roofline.asked) == asked == (3, 1)


def test_given_prices_override_every_source_and_segments() -> None:
    segment = Segment("F", ((LINEAR, 3),))
    book = CostBook([Table({LINEAR: 1.0}, "measured")], given={LINEAR: 7.0})
    assert book.cost(LINEAR, "t4") == Estimate(7.0, 7.0, 7.0, "given")
    assert book.cost(segment, "t4").mean_s == 21.0
    assert CostBook([], given={segment: 0.5}).cost(segment, "t4").mean_s == 0.5


def test_a_segment_costs_its_parts() -> None:
    theory = Table({Copy(8): 4.0, HostLaunch(1): 0.001}, "theory")
    book = CostBook([Table({LINEAR: 1.0}, "measured"), theory])
    segment = Segment("F", ((LINEAR, 10), (Copy(8), 2)))
    found = book.cost(segment, "t4")
    assert (found.mean_s, found.low_s, found.high_s) == pytest.approx((18.0, 16.2, 21.6))
    assert found.source == "theory"
    # What contributes less than 1 % does not decide where a price comes from.
    small = Segment("F", ((LINEAR, 10), (HostLaunch(1), 2)))
    assert book.cost(small, "t4").source == "measured"
    nested = Segment("step", ((segment, 2), (small, 1)))
    assert book.cost(nested, "t4").mean_s == pytest.approx(2 * 18.0 + 10.002)


def test_waiting_for_the_slowest_costs_a_share_of_the_work() -> None:
    book = CostBook([Table({LINEAR: 1.0}, "measured")])
    work = Segment("half", ((LINEAR, 4),))
    assert book.cost(Lag(work, 0.25), "t4") == book.cost(LINEAR, "t4")
    assert book.cost(Lag(work, 0.0), "t4").mean_s == 0.0


def test_free_work_needs_no_source() -> None:
    assert CostBook([]).cost(HostLaunch(0), "t4") == Estimate.exact(0.0)


@pytest.mark.parametrize(
    "work",
    [LINEAR, Copy(1), StorageAccess(1), HostLaunch(2), Segment("F"), Segment("F", ((LINEAR, 1),)),
     Collective("all_reduce", 8, (0, 1))],
)  # fmt: skip
def test_missing_prices_say_how_to_get_them(work: Work) -> None:
    book = CostBook([Table({}, "measured")])
    assert not book.can_price(work, "t4")
    with pytest.raises(MissingDataError, match=r"on t4; .*foreplan profile") as caught:
        book.cost(work, "t4")
    assert caught.value.exit_code == 4


class Batches(Table):
    """A source that is told beforehand what it will be asked."""

    def __init__(self, prices: dict[Work, float], source: str, refused: Work | None = None) -> None:
        super().__init__(prices, source)
        self.prepared: list[list[Program]] = []
        self.refused = refused

    def prepare(self, programs: Sequence[Program], device: str) -> None:
        self.prepared.append(list(programs))

    def estimate(self, work: Work, device: str) -> Estimate | None:
        if work == self.refused:
            raise MissingDataError("no")
        return super().estimate(work, device)


def test_sources_price_at_once_what_no_source_before_them_does() -> None:
    works = [replace(LINEAR, sizes=(rows, 16, 32)) for rows in range(1, 7)]
    first = Table({works[0]: 1.0}, "measured")
    later = Batches(dict.fromkeys(works[:4], 2.0), "predicted", refused=works[4])
    book = CostBook([first, later, Table(dict.fromkeys(works[:5], 3.0), "roofline")],
                    given={works[1]: 4.0})  # fmt: skip
    book.prepare([*works, works[2], Copy(8)], "t4")
    assert later.prepared == [[works[0], *works[2:]][1:]]
    asked = first.asked
    assert [book.cost(work, "t4").mean_s for work in works[:4]] == [1.0, 4.0, 2.0, 2.0]
    assert first.asked == asked, "kept"
    for work in works[4:]:  # refused by a source, known to none: as if nobody had prepared it
        with pytest.raises(MissingDataError):
            book.cost(work, "t4")
    assert isinstance(later, BatchSource)
    segment = Segment("F", tuple((work, 1) for work in works[:4]))
    assert book.cost(segment, "slow").mean_s == 2.0 + 4.0 + 4.0 + 4.0
    assert later.prepared[1] == works[2:4]


def test_sums_and_multiples() -> None:
    one = Estimate(1.0, 0.5, 2.0, "measured")
    assert one.times(3) == Estimate(3.0, 1.5, 6.0, "measured")
    assert Estimate.total([one, Estimate.exact(2.0)]) == Estimate(3.0, 2.5, 4.0, "measured")
    assert Estimate.total([]) == Estimate(0.0, 0.0, 0.0, "given")
    worst = Estimate.total(Estimate.exact(1.0, source) for source in SOURCES)
    assert worst.source == SOURCES[-1] == "roofline"


@pytest.mark.parametrize(("work", "figures", "lacking"), [
    (LINEAR, {}, "memory_bandwidth"),
    (LINEAR, {"memory_bandwidth": 1e12}, "peak_flops of bf16"),
    (Copy(8, "device"), {"peak_flops": {"bf16/matrix": 1e14}}, "memory_bandwidth"),
    (Copy(8, "host_to_device"), {"memory_bandwidth": 1e12}, "host_link_bandwidth"),
])  # fmt: skip
def test_the_figure_without_which_there_is_no_price_is_named(
    work: Work, figures: dict[str, Any], lacking: str
) -> None:
    device = Device(
        name="d", chip="c", vendor="v", kind="cuda", compute_capability="8.0", **figures
    )
    with pytest.raises(MissingDataError, match=f"on d, whose figures have no {lacking}; .*it$"):
        CostBook([RooflineSource(device)]).cost(work, "d")


def test_a_work_that_no_figure_prices_lacks_none() -> None:
    device = Device(name="d", chip="c", vendor="v", kind="cuda")
    with pytest.raises(MissingDataError, match="on d; measure it"):
        CostBook([RooflineSource(device)]).cost(StorageAccess(8), "d")
