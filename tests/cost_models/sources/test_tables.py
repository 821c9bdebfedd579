from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.costs import Collective, Copy, CostBook, HostLaunch
from foreplan.cost_models.roofline import (
    ASSUMED_GPU_LAUNCH_S,
    ASSUMED_LAUNCH_S,
    FACTOR,
    RooflineSource,
)
from foreplan.cost_models.sources._device_words import find
from foreplan.cost_models.sources._interpolation import Interpolation
from foreplan.cost_models.sources.tables import FAR, NEAR, InterpolatedSource, MeasuredSource
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import FailedProgramError, MissingDataError

BF16 = Variant("bf16", "bf16", "torch.linear")
INT4 = Variant("int4", "bf16", "torch.int4pack_mm")


def _linear(rows: int, n: int, k: int, variant: Variant = BF16) -> Program:
    return program("linear", variant, rows=rows, n=n, k=k)


def _true_seconds(d: Mapping[str, int]) -> float:
    """A made-up device: ceilings that meet smoothly, and less efficiency on small shapes."""
    flops, words = 2.0 * d["rows"] * d["n"] * d["k"], d["n"] * d["k"] + d["rows"] * d["n"]
    compute = flops / 4e11 * (1 + 8 / d["rows"] ** 0.5)
    memory = 2 * words / 2e10
    return float(3e-6 + (compute**4 + memory**4) ** 0.25)


def _row(item: Program, seconds: float, spread: float = 0.02) -> Row:
    return Row(
        op=item.op, dims=item.dims, variant=str(item.variant), status="ok", samples=9,
        low_s=seconds * (1 - spread), median_s=seconds, high_s=seconds * (1 + spread),
    )  # fmt: skip


def _failed(item: Program) -> Row:
    return Row(
        op=item.op, dims=item.dims, variant=str(item.variant), status="failed", error="crash"
    )


def _profile(rows: Iterable[Row], name: str = "cpu", **figures: float) -> Profile:
    device = Device(name=name, chip="c", vendor="v", kind="cpu", **figures)  # type: ignore[arg-type]
    return Profile(device=device, software={"torch": "2.13"}, rows=tuple(rows))


def _grid(
    seconds: Callable[[Mapping[str, int]], float] = _true_seconds,
    rows: Iterable[int] = (1, 8, 64, 256),
    weights: Iterable[tuple[int, int]] = ((512, 512), (2048, 512), (512, 2048), (2048, 2048)),
) -> list[Row]:
    items = [_linear(r, n, k) for (n, k), r in itertools.product(weights, rows)]
    return [_row(item, seconds(item.dims)) for item in items]


def test_exactly_the_median_where_measured() -> None:
    profile = _profile(_grid())
    measured, interpolated = MeasuredSource(profile), InterpolatedSource(profile)
    for item, row in profile.by_program.items():
        first = measured.estimate(item, "cpu")
        assert first is not None
        assert (first.mean_s, first.low_s, first.high_s) == (row.median_s, row.low_s, row.high_s)
        assert first.source == "measured"
        assert interpolated.estimate(item, "cpu") == first


def test_the_interpolation_itself_passes_through_its_points() -> None:
    rows = _grid()
    fit = Interpolation(
        "linear", [r.dims for r in rows], [float(r.median_s or 0) for r in rows], [0.0] * len(rows)
    )
    for row in rows:
        found = fit.predict(row.dims)
        assert found.seconds == pytest.approx(row.median_s, rel=1e-6)
        assert found.half_width < 1e-3
        assert found.beyond == 1.0


@given(rows=st.integers(1, 256), n=st.integers(512, 2048), k=st.integers(512, 2048))
@settings(max_examples=150, deadline=None)
def test_between_measured_shapes_it_is_close_and_honest(rows: int, n: int, k: int) -> None:
    item = _linear(rows, n, k)
    found = SOURCE.estimate(item, "cpu")
    assert found is not None
    assert found.source in ("interpolated", "measured")
    assert found.low_s <= found.mean_s <= found.high_s
    truth = _true_seconds(item.dims)
    assert abs(math.log(found.mean_s / truth)) < 0.25


def test_interval_covers_most_of_what_it_did_not_see() -> None:
    dice = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        rows = int(2 ** dice.uniform(0, 8))
        n, k = (int(2 ** dice.uniform(9, 11)) for _ in "nk")
        found = SOURCE.estimate(_linear(rows, n, k), "cpu")
        assert found is not None
        inside += found.low_s <= _true_seconds({"rows": rows, "n": n, "k": k}) <= found.high_s
    assert inside / 300 > 0.8


def test_leave_one_out_is_far_better_than_the_trend_alone() -> None:
    rows = _grid(rows=(1, 2, 4, 8, 16, 32, 64, 128, 256))
    times = [float(r.median_s or 0) for r in rows]
    fit = Interpolation("linear", [r.dims for r in rows], times, [0.0] * len(rows))
    trend = fit._trend(np.array([fit._features(r.dims) for r in rows], dtype=float))
    ours = np.median(np.abs(fit.leave_one_out))
    assert ours < 0.04
    assert ours < 0.5 * np.median(np.abs(np.log(trend / times)))


def test_more_rows_never_cost_much_less() -> None:
    times = [
        SOURCE.estimate(_linear(rows, 1024, 1024), "cpu").mean_s  # type: ignore[union-attr]
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ]
    for before, after in itertools.pairwise(times):
        assert after > 0.95 * before
    assert times[-1] > 5 * times[0]


def test_prices_change_little_between_neighbours() -> None:
    for rows in range(2, 256):
        a = SOURCE.estimate(_linear(rows, 1000, 1500), "cpu")
        b = SOURCE.estimate(_linear(rows + 1, 1000, 1500), "cpu")
        assert a is not None
        assert b is not None
        assert abs(math.log(b.mean_s / a.mean_s)) < 1.5 / rows + 0.01


def test_beyond_the_range_it_says_so_and_then_stops() -> None:
    def at(rows: int) -> tuple[str, float] | None:
        found = SOURCE.estimate(_linear(rows, 2048, 2048), "cpu")
        return None if found is None else (found.source, found.high_s / found.low_s)

    near, far = at(int(256 * NEAR)), at(int(256 * NEAR) + 1)
    farther = at(int(256 * FAR))
    assert near is not None
    assert far is not None
    assert farther is not None
    assert (near[0], far[0], farther[0]) == ("interpolated", "extrapolated", "extrapolated")
    assert farther[1] > far[1] > 1
    assert at(int(256 * FAR) + 1) is None


def test_other_variants_devices_and_works_have_no_price() -> None:
    profile = _profile(_grid())
    for source in (MeasuredSource(profile), InterpolatedSource(profile)):
        assert source.estimate(_linear(8, 1024, 1024, INT4), "cpu") is None
        assert source.estimate(_linear(8, 512, 512), "t4") is None
        assert source.estimate(Collective("p2p", 8, (0, 1)), "cpu") is None


def test_what_failed_is_refused_and_its_neighbours_are_not() -> None:
    failed, ran = _linear(4, 1024, 1024), _linear(8, 1024, 1024)
    never = _linear(8, 1024, 1024, INT4)
    profile = _profile([*_grid(), _failed(failed), _failed(never)])
    for source in (MeasuredSource(profile), InterpolatedSource(profile)):
        book = CostBook([source, RooflineSource(device_zoo.device("t4"))])
        for work in (failed, never, _linear(64, 2048, 2048, INT4)):
            with pytest.raises(FailedProgramError, match=r"cpu.*crash.*'foreplan profile'"):
                source.estimate(work, "cpu")
            assert not book.can_price(work, "cpu")
            assert book.can_price(work, "t4")
    found = InterpolatedSource(profile).estimate(ran, "cpu")
    assert found is not None
    assert found.source == "interpolated"


def test_decode_attention_that_failed_leaves_prefill() -> None:
    def attention(queries: int) -> Program:
        return program(
            "attention", Variant("bf16", "bf16", "torch.sdpa"), batch=1, queries=queries,
            keys=64, heads=8, kv_heads=8, head_dim=64,
        )  # fmt: skip

    source = InterpolatedSource(_profile([_failed(attention(1)), _row(attention(64), 1e-3)]))
    assert source.estimate(attention(32), "cpu") is not None
    with pytest.raises(FailedProgramError):
        source.estimate(attention(1), "cpu")


def test_decode_attention_is_not_taken_for_prefill() -> None:
    def attention(queries: int, keys: int) -> Program:
        return program(
            "attention", Variant("bf16", "bf16", "torch.sdpa"), batch=1, queries=queries,
            keys=keys, heads=8, kv_heads=8, head_dim=64,
        )  # fmt: skip

    rows = [_row(attention(q, q), 1e-3 * q * q) for q in (16, 64, 256)]
    profile = _profile(rows)
    assert InterpolatedSource(profile).estimate(attention(1, 64), "cpu") is None
    assert InterpolatedSource(profile).estimate(attention(32, 32), "cpu") is not None


def test_one_measured_shape_is_enough_for_a_wide_price() -> None:
    source = InterpolatedSource(_profile([_row(_linear(8, 1024, 1024), 1e-3)]))
    found = source.estimate(_linear(8, 2048, 1024), "cpu")
    assert found is not None
    assert found.high_s / found.low_s > 1.5


def test_launches_and_copies_come_from_the_measured_figures() -> None:
    source = MeasuredSource(_profile([], launch_overhead_s=1e-6, memory_bandwidth=2e10))
    launch, copy = source.estimate(HostLaunch(7), "cpu"), source.estimate(Copy(10**9), "cpu")
    assert launch is not None
    assert copy is not None
    assert launch.mean_s == pytest.approx(7e-6)
    assert copy.mean_s == pytest.approx(0.1, rel=1e-3)
    assert source.estimate(Copy(1, "host_to_device"), "cpu") is None
    assert MeasuredSource(_profile([])).estimate(HostLaunch(), "cpu") is None


def test_book_prefers_measured_over_interpolated_over_roofline() -> None:
    profile = _profile(_grid(), memory_bandwidth=2e10, launch_overhead_s=1e-6)
    t4 = device_zoo.device("t4")
    sources = [MeasuredSource(profile), InterpolatedSource(profile), RooflineSource(t4)]
    book = CostBook(sources)
    assert book.cost(_linear(8, 512, 512), "cpu").source == "measured"
    assert book.cost(_linear(9, 512, 512), "cpu").source == "interpolated"
    half = Variant("fp16", "fp16", "torch.linear")
    assert book.cost(_linear(9, 512, 512, half), "t4").source == "roofline"
    with pytest.raises(MissingDataError, match="foreplan profile"):
        book.cost(_linear(9, 512, 512, INT4), "cpu")


def test_devices_are_found_by_label_host_and_name() -> None:
    table = {"cuda:0/sms=32": 1, "hosta/cuda:0": 2, "cuda:0": 3}
    assert find(table, "hostb/cuda:0/sms=32") == 1
    assert find(table, "cuda:0/sms=32") == 1
    assert find(table, "hosta/cuda:0#1") == 2
    assert find(table, "hostb/cuda:0#1") == 3
    assert find(table, "hostb/cuda:1") is None
    here = MeasuredSource({"hosta/cpu": _profile(_grid())})
    assert here.estimate(_linear(8, 512, 512), "hosta/cpu#3") is not None
    assert here.estimate(_linear(8, 512, 512), "hostb/cpu#3") is None


def test_roofline_is_the_higher_ceiling_times_the_factor() -> None:
    device = Device(
        name="d", chip="c", vendor="v", kind="cuda", peak_flops={"bf16/matrix": 1e14},
        memory_bandwidth=10**12, launch_overhead_s=5e-6,
    )  # fmt: skip
    source = RooflineSource(device)
    big, small = _linear(8192, 8192, 8192), _linear(1, 8192, 8192)
    found = source.estimate(big, "d")
    assert found is not None
    assert found.mean_s == pytest.approx(FACTOR[1] * big.flops / 1e14 + 5e-6)
    assert found.high_s / found.low_s > 4
    memory_bound = source.estimate(small, "d")
    assert memory_bound is not None
    assert memory_bound.mean_s == pytest.approx(FACTOR[1] * small.bytes / 1e12 + 5e-6)
    assert source.estimate(_linear(1, 64, 64, Variant("fp8", "fp8", "x")), "d") is None
    assert source.estimate(big, "e") is None
    assert source.estimate(HostLaunch(2), "d").mean_s == pytest.approx(1e-5)  # type: ignore[union-attr]
    bare = RooflineSource({"x": Device(name="d", chip="c", vendor="v", kind="cuda")})
    assert bare.estimate(big, "x") is None
    assert bare.estimate(Copy(1), "x") is None
    for kind, assumed in (("cuda", ASSUMED_GPU_LAUNCH_S), ("cpu", ASSUMED_LAUNCH_S)):
        bare = RooflineSource({"x": Device(name="d", chip="c", vendor="v", kind=kind)})
        launch = bare.estimate(HostLaunch(), "x")
        assert launch is not None
        assert launch.mean_s == assumed


SOURCE = InterpolatedSource(_profile(_grid()))


def test_programs_cost_what_they_take_behind_others() -> None:
    def of(kind: str, **more: float) -> Profile:
        device = Device(
            name=f"{kind}:0" if kind == "cuda" else kind, chip="c", vendor="v", kind=kind,  # type: ignore[arg-type]
            launch_overhead_s=1e-6,
        )  # fmt: skip
        return Profile(device=device, software={}, rows=tuple(_grid()), **more)  # type: ignore[arg-type]

    graphs, switched, host = of("cuda"), of("cuda", switch_s=2e-6), of("cpu")
    priced = 0
    for item in (_linear(8, 512, 512), _linear(12, 512, 512)):
        for made in (MeasuredSource, InterpolatedSource):
            alone = made(graphs).estimate(item, "cuda:0")
            if alone is None:
                continue
            priced += 1
            for profile, more in ((switched, 2e-6), (host, 5e-6)):
                found = made(profile).estimate(item, profile.device.name)
                assert found is not None
                assert found.mean_s == pytest.approx(alone.mean_s + more)
    assert priced == 3  # what is between measured shapes, interpolation alone knows
    trained = program("norm_backward", Variant.parse("bf16/bf16/torch.rms_norm"), rows=8, cols=512)
    profile = _profile([_row(trained, 1e-4)], launch_overhead_s=1e-6)
    step = MeasuredSource(profile).estimate(trained, "cpu")
    assert step is not None
    assert step.mean_s == pytest.approx(1e-4)  # a step's host work is not a pass's


@given(rows=st.integers(1, 40), each=st.floats(1e-6, 1e-4))
@settings(max_examples=50, deadline=None)
def test_packed_kernels_take_a_step_at_every_fourth_row(rows: int, each: float) -> None:
    def seconds(count: int) -> float:  # the weight is expanded once for four rows
        return each * (count + 3 * math.ceil(count / 4))

    grid = [_row(_linear(r, 512, 512, INT4), seconds(r)) for r in (1, 2, 4, 8, 16, 32)]
    found = InterpolatedSource(_profile(grid)).estimate(_linear(rows, 512, 512, INT4), "cpu")
    assert found is not None
    assert found.mean_s == pytest.approx(seconds(rows), rel=0.02)


def test_rows_of_a_fused_kernel_cost_the_same_within_a_tile() -> None:
    fused = Variant("int4", "bf16", "foreplan.fragment_linear")
    times = {1: 10e-6, 8: 10.2e-6, 16: 12e-6, 32: 20e-6, 64: 40e-6}
    rows = [
        _row(_linear(r, n, 512, fused), s * n / 512) for n in (512, 2048) for r, s in times.items()
    ]
    source = InterpolatedSource(_profile(rows))

    def seconds(count: int) -> float:
        found = source.estimate(_linear(count, 512, 512, fused), "cpu")
        assert found is not None
        return found.mean_s

    assert seconds(17) == seconds(25) == pytest.approx(20e-6, rel=1e-3)
    assert seconds(5) == pytest.approx((10e-6 * 10.2e-6) ** 0.5, rel=1e-3)
    assert seconds(49) == pytest.approx(40e-6, rel=1e-3)
