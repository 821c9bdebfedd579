"""The predictor fitted to a device by a few tasks: laws on made-up devices, and its document."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.costs import Copy, HostLaunch
from foreplan.cost_models.rates.operator_rates import LEVELS, family, groups, rate_terms, roofline
from foreplan.cost_models.rates.rate_model import RateModel
from foreplan.cost_models.rates.rescaled_roofline import RescaledRoofline
from foreplan.cost_models.rates.task_choice import choose_tasks, choose_telling, widened
from foreplan.cost_models.sources.device_fit import DeviceFit, FittedSource, fit_path
from foreplan.datasets.device import Device
from foreplan.datasets.kernels.training_programs import linear_program
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.timing.profile_grid import ProfileGrid
from foreplan.errors import FailedProgramError, MissingDataError, SpecError

DEVICE = Device(
    name="cpu:threads=1", chip="test", vendor="test", kind="cpu",
    peak_flops={"fp32/vector": 1e11, "bf16/vector": 4e11, "int8/vector": 8e11},
    memory_bandwidth=4e10, launch_overhead_s=1e-6,
    sources=dict.fromkeys(("peak_flops.fp32/vector", "peak_flops.bf16/vector",
                           "peak_flops.int8/vector", "memory_bandwidth", "launch_overhead_s"),
                          "measured"),
)  # fmt: skip
PROGRAMS = ProfileGrid.generic("cpu").programs[::3]


def made_up(programs: list[Program], seed: int, spread: float) -> np.ndarray:
    """Times of a device whose groups of programs lose at random, a little of it by no law."""
    rng = np.random.default_rng(seed)
    loss: dict[tuple[int, str], np.ndarray] = {}
    rates = np.zeros((len(programs), 4))
    for k, item in enumerate(programs):
        for level, name in enumerate(groups(item)):
            if (level, name) not in loss:
                loss[level, name] = rng.normal(0, spread / np.sqrt(len(LEVELS)), 4)
            rates[k] += loss[level, name]
    seconds = (rate_terms(programs, DEVICE) * np.exp(rates)).sum(axis=1)
    return np.asarray(seconds * np.exp(rng.normal(0, 0.03, len(programs))))


def error(predicted: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(predicted / truth - 1).mean())


@settings(max_examples=6)
@given(seed=st.integers(0, 2**31), count=st.sampled_from([10, 20, 40]), spread=st.floats(0.3, 1.2))
def test_no_family_is_worse_off_than_with_the_rescaled_roofline(
    seed: int, count: int, spread: float
) -> None:
    """The law that few rows never hurt, over devices: on one in 150 chance breaks it (measured)."""
    programs = list(PROGRAMS)
    tasks = choose_tasks(programs, DEVICE, count, seed=0)
    rest = np.setdiff1d(np.arange(len(programs)), tasks)
    given_, asked = [programs[i] for i in tasks], [programs[i] for i in rest]
    kinds = np.array([family(item) for item in asked])
    common = [kind for kind in set(kinds) if (kinds == kind).sum() >= 20]
    whole, by_family = [], []
    for device in range(8):
        truth = made_up(programs, seed + device, spread)
        models = RateModel(DEVICE), RescaledRoofline(DEVICE)
        found = [model.fit(given_, truth[tasks]).predict(asked) for model in models]
        whole.append([error(predicted, truth[rest]) for predicted in found])
        log = [np.abs(np.log(predicted / truth[rest])) for predicted in found]
        by_family.append([[each[kinds == kind].mean() for each in log] for kind in common])
    ours, theirs = np.mean(whole, axis=0)
    assert ours <= theirs
    for kind, (mine, other) in zip(common, np.mean(by_family, axis=0), strict=True):
        assert mine <= 1.1 * other + 0.05, kind
    assert (np.array(by_family)[..., 0] <= 1.5 * np.array(by_family)[..., 1] + 0.1).all()


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_the_interval_covers_most(seed: int) -> None:
    programs = list(PROGRAMS)
    truth = made_up(programs, seed, 0.9)
    tasks = choose_tasks(programs, DEVICE, 30, seed=0)
    rest = np.setdiff1d(np.arange(len(programs)), tasks)
    model = RateModel(DEVICE).fit([programs[i] for i in tasks], truth[tasks])
    found = model.forecast([programs[i] for i in rest])
    inside = (found.low_s <= truth[rest]) & (truth[rest] <= found.high_s)
    assert inside.mean() >= 0.7
    assert (found.low_s < found.mean_s).all()


def test_what_was_timed_is_predicted_as_timed() -> None:
    programs = list(PROGRAMS)
    truth = made_up(programs, 3, 0.8)
    tasks = choose_tasks(programs, DEVICE, 30, seed=1)
    given_ = [programs[i] for i in tasks]
    assert error(RateModel(DEVICE).fit(given_, truth[tasks]).predict(given_), truth[tasks]) < 0.05


def test_one_task_says_little_of_others_and_much_of_its_like() -> None:
    timed = linear_program("forward", 256, 512, 512, "fp32/fp32/torch.linear")
    like = linear_program("forward", 512, 512, 512, "fp32/fp32/torch.linear")
    other = program("norm", Variant("bf16", "bf16", "torch.rms_norm"), rows=4096, cols=1024)
    terms = rate_terms([timed, like, other], DEVICE)
    slow = 4 * terms.sum(axis=1)
    model = RateModel(DEVICE).fit([timed], slow[:1])
    ratio = model.predict([timed, like, other]) / terms.sum(axis=1)
    assert ratio[0] == pytest.approx(4, rel=0.05)
    assert ratio[1] == pytest.approx(4, rel=0.15)
    assert 1 < ratio[2] < 3.8


def test_kernels_that_dequantise_first_pay_for_it() -> None:
    sizes = {"rows": 1, "n": 1024, "k": 1024}
    unpacked = program("linear", Variant("int4", "fp32", "torch.dequant_linear"), **sizes)
    packed = program("linear", Variant("int4", "bf16", "torch.int4pack_mm"), **sizes)
    terms = rate_terms([unpacked, packed], DEVICE)
    assert terms[0, 3] == pytest.approx(4 * 1024 * 1024 / 4e10)
    assert terms[1, 3] == 0
    assert (roofline(terms, [unpacked, packed]) <= terms.sum(axis=1)).all()


def test_choosing_tasks_skips_what_earlier_ones_cover() -> None:
    programs = list(PROGRAMS)
    first = choose_tasks(programs, DEVICE, 12, seed=0)
    assert len(first) == 12
    assert list(choose_tasks(programs, DEVICE, 12, seed=0)) == list(first)
    again = choose_tasks(programs, DEVICE, 12, known=[programs[i] for i in first], seed=0)
    assert len(again) == 0
    assert len(choose_tasks(programs[:5], DEVICE, 12)) == 5


def test_bad_tasks_are_refused() -> None:
    with pytest.raises(SpecError, match="times > 0"):
        RateModel(DEVICE).fit([], [])
    with pytest.raises(SpecError, match="times > 0"):
        RateModel(DEVICE).fit(PROGRAMS[:1], [0.0])
    with pytest.raises(SpecError, match="each once"):
        RateModel(DEVICE).fit([PROGRAMS[0]] * 2, [1.0, 1.0])
    bare = DEVICE.model_copy(update={"memory_bandwidth": None})
    with pytest.raises(MissingDataError, match="memory bandwidth"):
        RateModel(bare).fit(PROGRAMS[:1], [1.0])


# --------------------------------------------------------------------------------------- document


def fit(count: int = 20) -> DeviceFit:
    programs = list(PROGRAMS)
    truth = made_up(programs, 5, 0.8)
    tasks = choose_tasks(programs, DEVICE, count, seed=0)
    rows = [
        Row(op=programs[i].op, dims=programs[i].dims, variant=str(programs[i].variant),
            status="ok", low_s=truth[i], median_s=truth[i], high_s=truth[i])
        for i in tasks
    ]  # fmt: skip
    failed = program("argmax", Variant("bf16", "bf16", "torch.argmax"), rows=7, cols=7)
    rows.append(Row(op="argmax", dims=failed.dims, variant=str(failed.variant), status="failed",
                    error="no memory"))  # fmt: skip
    return DeviceFit.of(DEVICE, rows, {"torch": "2"})


def test_a_fit_survives_its_file(tmp_path: Path) -> None:
    made = fit()
    path = fit_path(tmp_path / "cpu-threads-1.json")
    assert path.name == "cpu-threads-1.fit.json"
    made.save(path)
    read = DeviceFit.load(path)
    assert read == made
    assert read.to_json() == made.to_json()
    np.testing.assert_array_equal(read.model.predict(PROGRAMS), made.model.predict(PROGRAMS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "foreplan.fit/0"}, "schema"),
        ({"law": "rates/0"}, "law"),
        ({"predictor": "0" * 64}, "predictor"),
        ({"tasks": []}, "tasks"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_fit_of_something_else_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "x.fit.json"
    path.write_text(json.dumps({**json.loads(fit().to_json()), **change}))
    with pytest.raises(SpecError, match=message):
        DeviceFit.load(path)


def test_a_fitted_source_prices_all_operators_of_its_device_alone() -> None:
    made = fit()
    source = FittedSource({"here/cpu:threads=1": made})
    for item in PROGRAMS:
        found = source.estimate(item, "here/cpu:threads=1")
        assert found is not None
        row = made.tried.get(item)
        assert found.source == ("predicted" if row is None else "measured")
        assert row is None or found.mean_s == row.median_s
        assert row is not None or 0 < found.low_s < found.mean_s < found.high_s
    failed = made.tasks[-1].program()
    with pytest.raises(FailedProgramError, match="argmax"):
        source.estimate(failed, "here/cpu:threads=1")
    assert source.estimate(PROGRAMS[0], "there/cpu:threads=1") is None
    launch = source.estimate(HostLaunch(3), "here/cpu:threads=1")
    assert launch is not None
    assert launch.mean_s == pytest.approx(3e-6)
    copy = source.estimate(Copy(4000), "here/cpu:threads=1")
    assert copy is not None
    assert copy.mean_s == pytest.approx(1e-6 + 8000 / 4e10)
    assert source.estimate(Copy(4000, "host_to_device"), "here/cpu:threads=1") is None


def test_many_programs_at_once_cost_what_each_does_alone() -> None:
    made, label = fit(), "here/cpu:threads=1"
    at_once, alone = FittedSource({label: made}), FittedSource({label: made})
    law = made.model.forecast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.model, "forecast", lambda programs: batches.append(1) or law(programs))
        batches: list[int] = []
        at_once.prepare([*PROGRAMS, made.tasks[-1].program()], label)
        found = [at_once.estimate(item, label) for item in PROGRAMS]
        assert len(batches) == 1
    for item, estimate in zip(PROGRAMS, found, strict=True):
        one = alone.estimate(item, label)
        assert one is not None
        assert estimate is not None
        assert estimate.source == one.source
        assert (estimate.low_s, estimate.mean_s, estimate.high_s) == pytest.approx(
            (one.low_s, one.mean_s, one.high_s), rel=1e-12
        )
    with pytest.raises(FailedProgramError):
        at_once.estimate(made.tasks[-1].program(), label)
    at_once.prepare(PROGRAMS, "there/cpu:threads=1")
    assert at_once.estimate(PROGRAMS[0], "there/cpu:threads=1") is None


def test_errors_are_of_tasks_that_the_others_predict() -> None:
    errors = fit(30).errors()
    assert errors["all"]["tasks"] == 30
    assert errors["all"]["fitted"] < errors["all"]["rescaled"]
    assert sum(row["tasks"] for name, row in errors.items() if name != "all") == 30


def test_a_gpu_falls_back_to_what_the_shipped_predictor_says() -> None:
    """Where a price was shipped and no task is near, it stays; a task moves its own kind alone."""
    gpu = DEVICE.model_copy(update={"kind": "cuda", "name": "cuda:0"})
    linears = [
        linear_program("forward", rows, 512, 512, "fp32/fp32/torch.linear")
        for rows in (128, 256, 512, 4096)
    ]
    far = program("norm", Variant("bf16", "bf16", "torch.rms_norm"), rows=4096, cols=1024)
    programs = [*linears, far]
    said = dict(zip(programs, 3 * rate_terms(programs, gpu).sum(axis=1), strict=True))

    def shipped(asked: list[Program]) -> np.ndarray:
        return np.array([said[item] for item in asked])

    seconds = np.array([2 * said[item] for item in linears[:3]])
    found = RateModel(gpu, shipped).fit(linears[:3], seconds).predict(programs)
    ratio = found / np.array([said[item] for item in programs])
    assert (ratio[:4] > 1.3).all()
    assert 1 <= ratio[4] < ratio[3]


def test_predictions_of_a_profiled_device_take_the_fit_beside_its_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foreplan.cost_models.predict_command import predict_model
    from foreplan.cost_models.replay import predict_latency

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    profile = Profile.model_validate(
        {
            "schema": "foreplan.profile/1", "device": DEVICE, "cores": (0,),
            "software": {"torch": "2"}, "rows": (),
        }
    )  # fmt: skip
    path = tmp_path / "here.json"
    profile.save(path)

    def latency_s(costs: str = "predicted") -> float:
        found = predict_model("tiny-llama-random", [], costs=costs, profile=path)
        there = fit_path(path).exists() and costs != "roofline"
        assert found["fit"] == ("here.fit.json" if there else None)
        in_python = predict_latency("tiny-llama-random", DEVICE, costs=costs, profile=path)  # type: ignore[arg-type]
        assert in_python.latency_s == found["devices"][0]["latency_s"]
        return in_python.latency_s

    before, roofline = latency_s(), latency_s("roofline")
    fit().save(fit_path(path))
    assert latency_s() != before
    assert latency_s("roofline") == roofline
    other = profile.model_copy(update={"software": {"torch": "3"}})
    other.save(path)
    with pytest.raises(SpecError, match=r"here\.fit\.json: software"):
        latency_s()


def test_the_covariance_is_the_interval_s() -> None:
    programs = list(PROGRAMS)
    truth = made_up(programs, 4, 0.8)
    tasks = choose_tasks(programs, DEVICE, 20, seed=0)
    model = RateModel(DEVICE).fit([programs[i] for i in tasks], truth[tasks])
    covariance, noise = model.covariance(programs)
    found = model.forecast(programs)
    spread = np.log(found.high_s / found.low_s) / (2 * 1.645)
    assert np.sqrt(np.diag(covariance) + noise) == pytest.approx(spread, rel=1e-6)
    assert covariance == pytest.approx(covariance.T)
    assert (found.mean_s >= model.predict(programs)).all()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 12), count=st.integers(0, 15))
def test_the_most_telling_task_lowers_what_is_at_stake_most(
    seed: int, size: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    factor = rng.normal(0, 0.1, (size, size))
    covariance, noise = factor @ factor.T, np.full(size, 1e-3)
    stakes = rng.random((2, size))
    chosen = choose_telling(covariance, noise, stakes, count, least=0.0)
    assert len(chosen) == len(set(chosen)) == min(count, size)
    if chosen:
        wide = stakes * widened(np.diag(covariance) + noise)

        def left(k: int) -> float:
            known = covariance[k] / (covariance[k, k] + noise[k])
            after = covariance - np.outer(covariance[k], known)
            return float(np.trace(wide @ after @ wide.T))

        assert left(chosen[0]) == pytest.approx(min(left(k) for k in range(size)))
    assert choose_telling(covariance, noise, stakes, count, least=1e9) == []


def test_a_gpus_tasks_hold_no_launch_by_the_host() -> None:
    """They are replayed from a graph; a launch of 7 us must not bound kernels of 1.5."""
    gpu = DEVICE.model_copy(update={
        "kind": "cuda", "name": "cuda:0", "launch_overhead_s": 7e-6, "memory_bandwidth": 4e12,
    })  # fmt: skip
    adds = [program("add", Variant("fp32", "fp32", "torch.add"), rows=2**k, cols=512)
            for k in range(4, 17)]  # fmt: skip
    truth = np.array([1.5e-6 + item.bytes / 4e12 for item in adds])
    rows = [
        Row(op="add", dims=item.dims, variant=str(item.variant), status="ok",
            low_s=time, median_s=time, high_s=time)
        for item, time in zip(adds[::3], truth[::3], strict=True)
    ]  # fmt: skip
    made = DeviceFit(device=gpu, tasks=tuple(rows), law="rates/2")
    bf16 = ("bf16", "bf16")
    others = [
        program("norm", Variant(*bf16, "torch.layer_norm"), rows=4, cols=512),
        program("linear", Variant(*bf16, "torch.linear"), rows=4, n=64, k=64),
    ]
    # Other kinds of operators, of which no task was timed and as small: 3 and 5 us with the launch.
    np.testing.assert_allclose(made.model.predict(others), truth[0], rtol=0.1)
    launch = FittedSource({"cuda:0": made}).estimate(HostLaunch(1), "cuda:0")
    assert launch is not None
    assert launch.mean_s == 7e-6
