"""Which programs tell a machine's pace, of profiles and forecasts made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from foreplan.cost_models.costs import CostBook
from foreplan.cost_models.sources.tables import MeasuredSource
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.device import Device
from foreplan.datasets.kernels.training_programs import optimizer_program
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.contention import contended
from foreplan.planner.pace import PaceProgram, RankPace
from foreplan.planner.pace_choice import MOST, pace_of_ranks

BF16 = Variant("bf16", "bf16", "torch.linear")
FP32 = Variant("fp32", "fp32", "torch.linear")
LABELS = ("localhost/cpu:threads=1#0", "localhost/cpu:threads=1#1")


def linear(rows: int, variant: Variant = BF16) -> Program:
    return program("linear", variant, rows=rows, n=512, k=256)


def row(item: Program, seconds: float, issue_s: float | None = None) -> Row:
    return Row(
        op=item.op, dims=item.dims, variant=str(item.variant), status="ok", samples=9,
        low_s=seconds, median_s=seconds, high_s=seconds, issue_s=issue_s,
    )  # fmt: skip


def profile(*rows: Row) -> Profile:
    device = Device(
        name="cpu:threads=1", chip="c", vendor="v", kind="cpu", launch_overhead_s=1e-12,
        memory_bandwidth=1e9,
    )  # fmt: skip
    return Profile(device=device, software={"torch": "2.13"}, rows=rows)


def choose(
    seconds: dict[tuple[Program, int], float], known: Profile, *, lanes: int = 1,
    contention: float | None = None, ranks: int = 2, training: Mapping[int, float] | None = None,
    calls: Mapping[Program, int] | None = None, contends: str | None = None,
    labels: Sequence[str] = LABELS, issues: bool = False,
) -> tuple[RankPace, ...]:  # fmt: skip
    """The choice for a schedule of ``ranks`` ranks, each a process or ``lanes`` of them."""
    document: dict[str, Any] = {"devices": [{"name": "cpu:threads=1", "count": 2}]}
    if labels != LABELS:
        document["devices"] = [{"name": f"cuda:{k}"} for k in range(2)]
    if contention is not None:
        document["contention"] = [{"kind": "memory", "factors": {2: contention}}]
    if training is not None:
        document["contention"] = [{"kind": "training", "factors": dict(training)}]
    cluster = validate(Cluster, document, "cluster")
    assert tuple(rank.label for rank in cluster.ranks()) == labels
    everyone = tuple(range(ranks * lanes))
    planner: Any = SimpleNamespace(
        issues=issues, real=lambda *_: (None, everyone), occupied=lambda *_: everyone,
        ranks=lambda *_: tuple(range(0, ranks * lanes, lanes)),
        contends=lambda problem: contends or contended(problem.cluster),
    )  # fmt: skip
    devices = [labels[rank * lanes] for rank in range(ranks)]
    forecast: Any = SimpleNamespace(
        schedule=SimpleNamespace(devices=devices),
        program_seconds=lambda _: {(p, labels[k]): s for (p, k), s in seconds.items()},
        program_calls=lambda: {(p, label): n for p, n in (calls or {}).items() for label in labels},
    )
    costs = CostBook([MeasuredSource(dict.fromkeys(labels, known))])
    problem: Any = SimpleNamespace(cluster=cluster, costs=costs)
    return pace_of_ranks(planner, problem, None, forecast, dict.fromkeys(labels, known))


def test_each_rank_has_what_most_of_it_is_priced_by() -> None:
    items = [linear(2**k) for k in range(MOST + 2)]
    known = profile(*(row(item, 0.01 * (k + 1)) for k, item in enumerate(items)))
    seconds = {(item, 0): float(k + 1) for k, item in enumerate(items)}
    first, second = choose({**seconds, (items[0], 1): 9.0}, known)
    assert (first.device, second.device) == LABELS
    assert [p.program for p in first.programs] == items[:1:-1]
    most = range(MOST + 2, 2, -1)
    assert [p.priced_s for p in first.programs] == [float(k) for k in most]
    assert [p.expected_s for p in first.programs] == pytest.approx([0.01 * k for k in most])
    assert [p.program for p in second.programs] == [items[0]]
    assert not first.in_pass, "as each was profiled"


def test_what_was_interpolated_is_told_by_the_nearest_row() -> None:
    known = profile(row(linear(4), 0.1), row(linear(64), 0.4), row(linear(30, FP32), 0.2))
    (rank, _) = choose({(linear(32), 0): 2.0, (linear(48), 0): 1.0, (linear(4), 1): 1.0}, known)
    (timed,) = rank.programs
    assert timed.program == linear(64)
    assert (timed.priced_s, timed.expected_s) == (3.0, 0.4)


def test_lanes_time_what_their_rank_does() -> None:
    found = choose({(linear(4), 0): 1.0}, profile(row(linear(4), 0.1)), lanes=2, ranks=1)
    assert [rank.device for rank in found] == list(LABELS)
    assert found[0].programs == found[1].programs


def test_what_neighbours_take_by_the_plans_prices_is_expected() -> None:
    """At 1 GB/s and 0.4 ms for 0.27 MB, two thirds of the program are bound by memory."""
    item = linear(4)
    known = profile(row(item, 4e-4))
    share = item.bytes / 1e9 / 4e-4
    assert 0.5 < share < 0.8
    seconds = {(item, rank): 1.0 for rank in (0, 1)}
    for pace in choose(seconds, known, contention=1.5):
        # The other runs the same, and so slows this one in the share of its time.
        expected = 4e-4 * (1 + share * share * 0.5)
        assert pace.programs[0].expected_s == pytest.approx(expected)


def test_passes_are_expected_to_take_what_ranks_took_together() -> None:
    """Of two processes: a program of the step by their factor, others by memory's, unmeasured."""
    item = program(
        "linear_forward", Variant("fp32", "fp32", "torch.linear"), rows=8, n=64, k=64
    )  # fmt: skip
    known = profile(row(item, 4e-4), row(linear(4), 1e-3))
    seconds = {(p, 0): 1.0 for p in (item, linear(4))}
    (found, *_) = choose(
        seconds, known, ranks=1, lanes=2, training={1: 0.9, 2: 1.2}, calls={item: 5}
    )
    expected = {p.program: (p.expected_s, p.calls) for p in found.programs}
    assert expected[item] == (pytest.approx(4e-4 * 1.2), 5)
    assert expected[linear(4)] == (pytest.approx(1e-3), 1), "not of a training step"
    assert found.in_pass, "as the profile knows passes"


def test_what_corrects_prices_is_expected_whatever_ranks_contend_in() -> None:
    item = program(
        "linear_forward", Variant("fp32", "fp32", "torch.linear"), rows=8, n=64, k=64
    )  # fmt: skip
    known = profile(row(item, 4e-4), row(linear(4), 1e-3))
    seconds = {(p, 0): 1.0 for p in (item, linear(4))}
    (found, *_) = choose(seconds, known, training={1: 0.9, 2: 1.2}, contends="memory")
    expected = {p.program: p.expected_s for p in found.programs}
    assert expected == {item: pytest.approx(4e-4 * 0.9), linear(4): pytest.approx(1e-3)}


@pytest.mark.parametrize("issues", [True, False])
def test_calls_that_a_gpu_is_issued_are_expected_to_take_the_longer_of_it_and_its_host(
    issues: bool,
) -> None:
    labels = ("localhost/cuda:0", "localhost/cuda:1")
    known = profile(row(linear(4), 1e-5, 4e-5), row(linear(64), 9e-5, 4e-5), row(linear(8), 2e-5))
    seconds = {(linear(rows), 0): 1.0 for rows in (4, 64, 8)}
    (found,) = choose(seconds, known, labels=labels, issues=issues)
    assert found.issued is issues
    expected = {p.dims["rows"]: p.expected_s for p in found.programs}
    assert expected == {4: 4e-5 if issues else 1e-5, 64: 9e-5, 8: 2e-5}


def test_processors_are_their_own_hosts() -> None:
    (found,) = choose({(linear(4), 0): 1.0}, profile(row(linear(4), 1e-5, 4e-5)), issues=True)
    assert (found.issued, found.programs[0].expected_s) == (False, 1e-5)


def test_gpus_whose_passes_were_recorded_have_no_pace() -> None:
    """Their clock in a pass is not that of programs by themselves."""
    labels = ("localhost/cuda:0", "localhost/cuda:1")
    item = program("linear_forward", BF16, rows=8, n=512, k=256)
    priced, known = {(item, 0): 1.0, (item, 1): 1.0}, profile(row(item, 0.5))
    assert len(choose(priced, known, labels=labels)) == 2
    assert choose(priced, known, labels=labels, training={1: 0.4}) == ()
    assert len(choose(priced, known, training={1: 0.4})) == 2


def test_an_optimizer_is_no_part_of_a_pass() -> None:
    once = optimizer_program("adamw", 1 << 20, 2)
    known = profile(row(linear(4), 1e-3), row(once, 1e-2))
    (found,) = choose({(linear(4), 0): 1.0, (once, 0): 9.0}, known)
    assert [p.program for p in found.programs] == [linear(4)]


def test_without_a_profile_or_a_row_nothing_is_timed() -> None:
    seconds = {(linear(4), 0): 1.0, (linear(4), 1): 1.0}
    assert choose(seconds, profile(row(linear(4, FP32), 0.1))) == ()
    none: Any = None
    assert pace_of_ranks(none, none, none, none, {}) == ()


def test_a_strangers_program_is_refused() -> None:
    made = PaceProgram(
        op="rm", dims={"rows": 1}, variant="bf16/bf16/torch.rm", expected_s=1.0, priced_s=1.0
    )
    with pytest.raises(SpecError):
        _ = made.program
