"""Calibration: planted factors are found, the left-out error never grows, prices are corrected."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.costs import Copy, CostBook
from foreplan.cost_models.roofline import RooflineSource, compute_share
from foreplan.cost_models.sources.calibration import (
    CalibratedSource,
    Calibration,
    MeasuredPass,
    calibration_path,
    fit_factors,
)
from foreplan.datasets import device_zoo
from foreplan.datasets.program import Variant, program
from foreplan.errors import SpecError


def passes(seed, factors, noise=0.0, count=12):
    rng = np.random.default_rng(seed)
    made = []
    for k in range(count):
        compute, memory = rng.uniform(0.001, 0.1, 2) * (rng.random(2) < 0.8) + 1e-4
        programs = float(rng.integers(20, 400))
        truth = factors[0] * compute + factors[1] * memory + factors[2] * programs
        seconds = truth * float(np.exp(noise * rng.standard_normal()))
        made.append(MeasuredPass(f"w{k // 2}", compute, memory, programs, seconds))
    return made


@pytest.mark.parametrize(
    ("factors", "form"),
    [
        ((1.0, 1.0, 0.0), "as priced"), ((1.7, 1.7, 0.0), "one scale"),
        ((2.0, 0.8, 0.0), "compute and memory"),
        ((1.5, 1.1, 5e-5), "compute, memory and launch"),
    ],
)  # fmt: skip
def test_planted_factors_are_found(factors, form):
    found = fit_factors(passes(0, factors))
    assert (found.compute, found.memory) == pytest.approx(factors[:2], rel=0.02)
    assert found.launch_s == pytest.approx(factors[2], rel=0.05, abs=1e-6)
    assert found.error_after <= 0.02
    if form == "as priced":
        assert found.error_after == found.error_before


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 1.5), st.integers(3, 14))
def test_the_left_out_error_never_grows(seed, noise, count):
    rng = np.random.default_rng(seed)
    factors = (*rng.uniform(0.5, 2.0, 2).tolist(), float(rng.choice([0.0, 1e-5])))
    found = fit_factors(passes(seed, factors, noise, count))
    assert found.error_after <= found.error_before
    if found.error_after == found.error_before:
        assert (found.compute, found.memory, found.launch_s) == (1.0, 1.0, 0.0)


def test_noise_alone_leaves_prices_as_they_are_or_helps_on_new_rows():
    better = []
    for seed in range(12):
        found = fit_factors(passes(seed, (1.4, 0.9, 1e-5), 0.1))
        fresh = passes(seed + 1000, (1.4, 0.9, 1e-5), 0.1, 60)
        terms = np.array([[p.compute_s, p.memory_s, p.programs] for p in fresh])
        seconds = np.array([p.latency_s for p in fresh])
        error = np.abs(terms @ [found.compute, found.memory, found.launch_s] / seconds - 1).mean()
        before = np.abs(terms @ [1, 1, 0] / seconds - 1).mean()
        better.append(error < before)
    assert np.mean(better) >= 0.9


def test_too_few_rows_and_no_times_are_refused():
    with pytest.raises(SpecError, match="at least 3"):
        fit_factors(passes(0, (1, 1, 0), count=2))
    with pytest.raises(SpecError, match="above 0"):
        fit_factors([MeasuredPass("a", 1.0, 1.0, 1.0, 0.0)] * 3)


def test_programs_are_corrected_and_nothing_else():
    t4 = device_zoo.device("t4")
    source = RooflineSource({"here/t4": t4})
    calibration = Calibration(
        device="t4", costs="roofline", form="f", compute=2.0, memory=0.5, launch_s=1e-5, rows=3,
        error_before=0.5, error_after=0.1, measured_digest="x",
    )  # fmt: skip
    corrected = CalibratedSource([source], {"here/t4": calibration}, {"here/t4": t4})
    variant = Variant("bf16", "bf16", "torch.linear")
    for rows in (1, 4096):
        linear = program("linear", variant, rows=rows, n=4096, k=4096)
        share = compute_share(linear, t4)
        plain, found = source.estimate(linear, "here/t4"), corrected.estimate(linear, "here/t4")
        assert found.mean_s == pytest.approx(plain.mean_s * (1.5 * share + 0.5) + 1e-5)
        assert found.source == plain.source
        assert found.low_s <= found.mean_s <= found.high_s
    assert 0 <= compute_share(program("linear", variant, rows=1, n=64, k=64), t4) < 0.5
    assert corrected.estimate(Copy(1 << 20), "here/t4") == source.estimate(Copy(1 << 20), "here/t4")
    assert corrected.estimate(Copy(1 << 20), "there/t4") is None
    book = CostBook([corrected])
    works = [program("linear", variant, rows=rows, n=64, k=64) for rows in (1, 2)]
    book.prepare(works, "here/t4")
    assert [book.cost(work, "here/t4") for work in works] == [
        corrected.estimate(work, "here/t4") for work in works
    ]


def test_it_stands_beside_the_profile_and_reads_back(tmp_path):
    path = calibration_path(tmp_path / "cpu-threads-1.json")
    assert path.name == "cpu-threads-1.calibration.json"
    made = Calibration(
        device="t4", costs="measured", form="f", compute=2.0, memory=0.5, launch_s=0.0, rows=3,
        error_before=0.5, error_after=0.1, measured_digest="x",
    )  # fmt: skip
    made.save(path)
    assert Calibration.load(path) == made
    path.write_text("{}")
    with pytest.raises(SpecError):
        Calibration.load(path)
