"""Rates of measured processors on figures of others: made-up devices, two real chips, the files."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreplan.datasets
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.rates.known_rates import KnownRates, main
from foreplan.cost_models.rates.onboarding_curve import curve, read_rows
from foreplan.cost_models.rates.operator_rates import LEVELS, groups, rate_terms
from foreplan.cost_models.rates.rate_model import RateModel
from foreplan.cost_models.roofline import ASSUMED_LAUNCH_S
from foreplan.cost_models.sources.device_fit import DeviceFit
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.profile import Profile, Row
from foreplan.datasets.program import Variant, program
from foreplan.datasets.timing.profile_grid import ProfileGrid
from foreplan.errors import SpecError

MEASURED = Path(next(iter(foreplan.datasets.__path__))) / "measured"
#: In the order in which they were timed.
ZEN5, ZEN4, XEON = "epyc_library", "epyc25_library", "xeon_library"
PROGRAMS = list(ProfileGrid.generic("cpu").programs[::3])
UNHEARD = program("linear", Variant("bf16", "bf16", "torch.unheard_of"), rows=8, n=64, k=64)


def processor(chip: str, *, flops: float = 1e11, isa: tuple[str, ...] = ("avx2",)) -> Device:
    return Device(
        name="cpu:threads=1", chip=chip, vendor="test", kind="cpu", isa=isa,
        peak_flops={"fp32/vector": flops, "bf16/vector": 4 * flops, "int8/vector": 8 * flops},
        memory_bandwidth=flops / 3, launch_overhead_s=1e-6,
    )  # fmt: skip


def seconds_on(device: Device, seed: int, spread: float = 0.6) -> np.ndarray:
    """What `PROGRAMS` take where groups of them lose at random, by the seed alone."""
    rng = np.random.default_rng(seed)
    loss: dict[tuple[int, str], np.ndarray] = {}
    rates = np.zeros((len(PROGRAMS), 4))
    for k, item in enumerate(PROGRAMS):
        for level, name in enumerate(groups(item)):
            if (level, name) not in loss:
                loss[level, name] = rng.normal(0, spread / np.sqrt(len(LEVELS)), 4)
            rates[k] += loss[level, name]
    return np.asarray((rate_terms(PROGRAMS, device) * np.exp(rates)).sum(axis=1))


@settings(max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_a_law_alone_says_what_its_model_says(seed: int) -> None:
    device = processor("a")
    model = RateModel(device).fit(PROGRAMS, seconds_on(device, seed))
    believed = model.predict(PROGRAMS)
    same = [i for i, item in enumerate(PROGRAMS)
            if model._trust_.get(groups(item)[1]) == 1.0]  # fmt: skip
    assert len(same) > len(PROGRAMS) / 2
    found = model.law_.seconds(PROGRAMS, device)
    np.testing.assert_allclose(found[same], believed[same], rtol=1e-9)


def test_a_chip_that_loses_alike_is_known_without_a_task() -> None:
    slow, fast = processor("slow"), processor("fast", flops=5e11)
    known = KnownRates.fit([(slow, PROGRAMS, seconds_on(slow, 7))])
    truth = seconds_on(fast, 7)
    found = known.seconds(PROGRAMS, fast)
    assert np.abs(found / truth - 1).mean() < 0.1
    forecast = known.forecast(PROGRAMS, fast)
    assert (forecast.low_s < found).all()
    assert (found < forecast.high_s).all()
    assert (forecast.mean_s >= found).all()


def test_the_likest_instruction_sets_speak() -> None:
    narrow, wide = processor("a", isa=("avx2",)), processor("b", isa=("avx2", "avx512"))
    known = KnownRates.fit([
        (narrow, PROGRAMS, seconds_on(narrow, 1)), (wide, PROGRAMS, seconds_on(wide, 2)),
    ])  # fmt: skip
    asked = processor("c", isa=("avx2", "avx512", "amx"))
    alone = known.without({"a"}).seconds(PROGRAMS, asked)
    np.testing.assert_array_equal(known.seconds(PROGRAMS, asked), alone)
    both = known.seconds(PROGRAMS, processor("d", isa=()))
    means = np.sqrt(
        known.without({"a"}).seconds(PROGRAMS, asked)
        * known.without({"b"}).seconds(PROGRAMS, asked)
    )
    np.testing.assert_allclose(both, means)


def test_a_known_chip_speaks_for_itself() -> None:
    mine, alike = processor("a"), processor("b")
    known = KnownRates.fit([
        (mine, PROGRAMS, seconds_on(mine, 1)), (alike, PROGRAMS, seconds_on(alike, 2)),
    ])  # fmt: skip
    alone = known.without({"b"}).seconds(PROGRAMS, mine)
    np.testing.assert_array_equal(known.seconds(PROGRAMS, mine), alone)


def test_of_what_no_one_timed_nothing_is_said() -> None:
    device = processor("a")
    known = KnownRates.fit([(device, PROGRAMS, seconds_on(device, 3))])
    found = known.seconds([PROGRAMS[0], UNHEARD], device)
    assert np.isfinite(found[0])
    assert np.isnan(found[1])
    assert np.isnan(known.without({"a"}).seconds(PROGRAMS, device)).all()
    # And the fit that starts from nothing is the plain one.
    truth = seconds_on(device, 4)[:20]
    silent = RateModel(device, known.without({"a"}).on(device)).fit(PROGRAMS[:20], truth)
    plain = RateModel(device).fit(PROGRAMS[:20], truth)
    np.testing.assert_allclose(silent.predict(PROGRAMS), plain.predict(PROGRAMS))


@functools.cache
def known_first() -> KnownRates:
    """The two chips that were timed first; a law is of one slice alone, so each is fitted once."""
    return KnownRates.fit([
        read_rows(MEASURED / folder / f"{name}.json.xz")
        for folder in (ZEN5, ZEN4) for name in ("whole", "avx2")
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("target", "name", "most", "most_by_time"),
    [
        (ZEN4, "whole", 0.27, 0.15),
        (ZEN4, "avx2", 0.3, 0.15),
        (XEON, "whole", 0.33, 0.45),
        (XEON, "avx2", 0.27, 0.3),
    ],
)
def test_a_chip_of_another_kind_is_known_from_its_figures(
    target: str, name: str, most: float, most_by_time: float
) -> None:
    """Zen 4 from a Zen 5, a Xeon from both: without a task nearer than with 32 and no other."""
    rows = read_rows(MEASURED / target / f"{name}.json.xz")
    table = curve(rows, known=known_first().without({rows[0].chip}))
    assert table["none, known"]["all"] < most
    assert table["none, known"]["by time"] < most_by_time
    assert table["none, known"]["all"] < table["32 KMeans, fitted"]["all"]
    for count in (8, 16, 32, 64):
        assert table[f"{count} KMeans, known"]["all"] < table[f"{count} KMeans, fitted"]["all"]


@pytest.mark.parametrize(
    ("target", "most"),
    [("epyc26_library", (0.23, 0.19)), (ZEN4, (0.22, 0.2)), (XEON, (0.38, 0.27))],
)
def test_a_shipped_chip_is_known_from_the_two_others(
    target: str, most: tuple[float, float]
) -> None:
    """All of its rows, of which none was used: mean relative error with everything, and AVX2."""
    shipped = KnownRates.load()
    assert len({each.device.chip for each in shipped.known}) == 3
    for name, limit in zip(("whole", "avx2"), most, strict=True):
        device, programs, seconds = read_rows(MEASURED / target / f"{name}.json.xz")
        found = shipped.without({device.chip}).seconds(programs, device)
        known = np.isfinite(found)
        assert known.mean() > 0.97, "convolutions too"
        assert np.abs(found / seconds - 1)[known].mean() < limit


def test_a_known_chip_has_intervals_of_its_own() -> None:
    """Devices that lose unlike each other, and within themselves by a law and some noise."""
    rng = np.random.default_rng(5)
    measured, fresh = [], []
    for seed, chip in enumerate(("a", "b", "c")):
        device, noise = processor(chip), rng.normal(0, 0.05, (2, len(PROGRAMS)))
        truth = seconds_on(device, seed)
        measured.append((device, PROGRAMS, truth * np.exp(noise[0])))
        fresh.append(truth * np.exp(noise[1]))
    plain = KnownRates.fit(measured)
    known = plain.calibrated(measured)
    device = measured[0][0]
    before, after = (rates.forecast(PROGRAMS, device) for rates in (plain, known))
    np.testing.assert_array_equal(after.mean_s, before.mean_s)
    assert (after.low_s <= after.mean_s).all()
    assert (after.mean_s <= after.high_s).all()
    # A known chip's, on measurements that nothing was fitted to: at least what is nominal, nearly,
    # and not much wider than it has to be.
    held = [
        [float(((f.low_s <= seconds) & (seconds <= f.high_s)).mean()), np.log(f.high_s / f.low_s)]
        for rates in (plain, known)
        for (each, _, _), seconds in zip(measured, fresh, strict=True)
        for f in [rates.forecast(PROGRAMS, each)]
    ]
    covers = [float(np.mean([row[0] for row in part])) for part in (held[:3], held[3:])]
    assert 0.85 < covers[1] <= covers[0]
    assert np.mean([row[1] for row in held[3:]]) < np.mean([row[1] for row in held[:3]])
    # Of any other chip nothing changes, nor of one whose own rates are left out.
    others = [(plain, known, processor("d")),
              (plain.without({"a"}), known.without({"a"}), device)]  # fmt: skip
    for one, other, asked in others:
        np.testing.assert_array_equal(
            one.forecast(PROGRAMS, asked).high_s, other.forecast(PROGRAMS, asked).high_s
        )


def test_the_shipped_intervals_are_narrower_where_a_chip_is_known() -> None:
    shipped = KnownRates.load()
    assert set(shipped.own) == set(shipped.off)
    assert all(0 < shipped.own[kind] < shipped.off[kind] for kind in shipped.off)


def test_they_survive_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreplan.cost_models.rates.known_rates._FOLDS", 2)  # as many fits of each
    paths = []
    for folder in (ZEN5, ZEN4):  # every fourth row: what is fitted is not the point
        whole = Profile.load(MEASURED / folder / "avx2.json.xz")
        paths.append(tmp_path / f"{folder}.json")
        whole.model_copy(update={"rows": whole.rows[::4]}).save(paths[-1])
    main([*map(str, paths), "-o", str(tmp_path / "rates")])
    assert "2 devices" in capsys.readouterr().out
    read = KnownRates.load(tmp_path / "rates")
    made = KnownRates.fit([read_rows(path) for path in paths])
    device = device_zoo.device("epyc_9654")
    np.testing.assert_allclose(read.seconds(PROGRAMS, device), made.seconds(PROGRAMS, device))
    assert read.off == pytest.approx(made.off)
    assert {"", "product", "wide"} <= set(read.off)
    assert set(read.own) == set(read.off)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "foreplan.known-rates/0"}, "schema"),
        ({"devices": [{}]}, "known rates"),
        ({"devices": 3}, "known rates"),
        ({"off": None}, "known rates"),
        ({"own": None}, "known rates"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    device = processor("a")
    KnownRates.fit([(device, PROGRAMS[:30], seconds_on(device, 1)[:30])]).save(tmp_path)
    card = tmp_path / "card.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), **change}))
    with pytest.raises(SpecError, match=message):
        KnownRates.load(tmp_path)
    with pytest.raises(SpecError, match="at least one"):
        KnownRates.fit([])


def test_the_shipped_ones_price_processors_of_the_zoo() -> None:
    predictor = Predictor.load()
    asked = [
        program("linear", Variant("bf16", "bf16", "torch.linear"), rows=64, n=2048, k=1024), UNHEARD
    ]  # fmt: skip
    found, nothing = predictor.supported(asked, "epyc_9654")
    assert found is not None
    assert nothing is None
    assert found.source == "predicted"
    assert 0 < found.low_s < found.mean_s < found.high_s
    bare = processor("a").model_copy(update={"memory_bandwidth": None})
    assert predictor.supported(asked, bare) == [None, None]


def test_fp16_takes_what_the_processor_computes_it_by() -> None:
    rates = KnownRates.load()
    bf16, fp16 = (
        program("linear", Variant(dtype, dtype, "torch.linear"), rows=4096, n=4096, k=4096)
        for dtype in ("bf16", "fp16")
    )
    xeon, epyc = device_zoo.device("xeon_8480+"), device_zoo.device("epyc_9654")
    # AMX of Sapphire Rapids multiplies bf16 alone; fp16 runs in its vectors.
    quick, slow = rates.seconds([bf16, fp16], xeon)
    assert slow >= fp16.flops / (xeon.peak("fp16") or 0) > 3 * quick
    # A processor with arithmetic of neither kind converts each value: 4 times as long as in fp32.
    fp32 = replace(bf16, variant=Variant("fp32", "fp32", "torch.linear"))
    assert epyc.peak("fp16") is None
    plain, slow = rates.seconds([fp32, fp16], epyc)
    assert slow == pytest.approx(4.0 * plain, rel=0.01)


def test_nothing_moves_large_operands_faster_than_the_memory() -> None:
    """Additions, sums and picked rows were timed in caches, several times as fast as memory."""
    variant = Variant("fp32", "fp32", "torch.add")
    asked = [
        program("add", variant, rows=65536, cols=8192),
        program("reduction", replace(variant, kernel="torch.sum"), rows=65536, cols=8192),
        program("embedding", replace(variant, kernel="torch.embedding"), rows=65536, cols=4096),
    ]
    rates = KnownRates.load()
    for name in ("epyc_9654", "xeon_8480+", "graviton3"):
        device = device_zoo.device(name)
        cache = (device.l2_bytes or 0) + (device.l3_bytes or 0)
        moved = np.array([item.bytes for item in asked]) - cache
        assert (rates.seconds(asked, device) >= moved / (device.memory_bandwidth or 0)).all()
    # Of a copy's bandwidth, as profiles have it, nothing follows.
    copied = device.model_copy(update={"sources": {"memory_bandwidth": "measured"}})
    assert (rates.seconds(asked, copied) < moved / (device.memory_bandwidth or 0)).all()


@pytest.mark.parametrize("name", ["epyc_9654", "xeon_8480+"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_attention_of_one_query_is_known_by_a_decoders(name: str, dtype: str) -> None:
    variant = Variant(dtype, dtype, "torch.scaled_dot_product_attention")
    asked = program(
        "attention", variant, batch=2, queries=1, keys=512, heads=32, kv_heads=8, head_dim=128
    )
    timed = replace(asked, variant=Variant("bf16", "bf16", "torch.sdpa"))
    seconds = KnownRates.load().seconds([asked, timed], device_zoo.device(name))
    converts = dtype == "fp16" and name == "epyc_9654"  # each value by itself
    assert seconds[0] == pytest.approx((1.55 if converts else 1.0) * seconds[1])
    assert seconds[1] > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", device_zoo.names())
def test_attention_without_a_mask_is_known_in_16_bits(name: str, dtype: str) -> None:
    """torch goes through all keys either way; such an encoder had the roofline's price, or none."""
    device = device_zoo.device(name)
    if device.kind != "cpu":
        return
    variant = Variant(dtype, dtype, "torch.scaled_dot_product_attention")
    sizes = {"batch": 1, "queries": 512, "keys": 512, "heads": 16, "kv_heads": 16, "head_dim": 64}
    full, causal = (program(op, variant, **sizes) for op in ("full_attention", "attention"))
    found = KnownRates.load().seconds([full, causal], device)
    assert 0.9 < found[0] / found[1] < 2.1


def test_a_fit_can_leave_its_own_chip_out(tmp_path: Path) -> None:
    device, programs, seconds = read_rows(MEASURED / "epyc25_library" / "whole.json.xz")
    rows = [
        Row(op=programs[i].op, dims=programs[i].dims, variant=str(programs[i].variant),
            status="ok", low_s=seconds[i], median_s=seconds[i], high_s=seconds[i])
        for i in range(0, len(programs), 80)
    ]  # fmt: skip
    errors = {}
    for unseen in (False, True):
        made = DeviceFit.of(device, rows, {"torch": "2"}, unseen=unseen)
        made.save(tmp_path / "x.fit.json")
        read = DeviceFit.load(tmp_path / "x.fit.json")
        assert read.unseen is unseen
        assert read == made
        errors[unseen] = float(np.abs(read.model.predict(programs) / seconds - 1).mean())
    plain = RateModel(device).fit(made.programs, made.seconds).predict(programs)
    assert errors[False] < errors[True] < np.abs(plain / seconds - 1).mean()


@pytest.mark.parametrize(("chip", "error", "ratio"), [
    ("zen3", 0.205, 1.0), ("xeon167", 0.22, 0.85),
])  # fmt: skip
def test_a_chip_measured_when_all_was_fixed_is_known_and_its_intervals_hold(
    chip: str, error: float, ratio: float
) -> None:
    """Floors a little off what onboarding.md has of chips that are in no weights."""
    device, programs, seconds = read_rows(MEASURED / f"{chip}_library" / "whole.json.xz")
    shipped = KnownRates.load()
    assert device.chip not in {each.device.chip for each in shipped.known}
    found = shipped.forecast(programs, device)
    ratios = shipped.seconds(programs, device) / seconds
    assert np.abs(ratios - 1.0).mean() < error
    assert ratio - 0.05 < np.median(ratios) < ratio + 0.05
    assert 0.85 < np.mean((found.low_s <= seconds) & (seconds <= found.high_s)) < 0.95


def test_an_unseen_chip_is_priced_by_the_others_alone() -> None:
    device, programs, seconds = read_rows(MEASURED / "epyc25_library" / "whole.json.xz")
    asked = [i for i, item in enumerate(programs) if item.op == "linear"][::10]
    shipped = Predictor.load()
    unseen = shipped.unseen(device.chip)
    errors = {}
    for name, predictor in (("shipped", shipped), ("unseen", unseen)):
        found = [each.mean_s for each in predictor.predict([programs[i] for i in asked], device)]
        errors[name] = float(np.abs(np.array(found) / seconds[asked] - 1).mean())
    assert errors["shipped"] < errors["unseen"] < 0.5
    convolution = next(item for item in programs if item.op == "conv2d_forward")
    others, own = (found.supported([convolution], device)[0] for found in (unseen, shipped))
    assert own is not None
    assert others is not None, "other chips have some"
    assert others != own
    for folder in (XEON, ZEN5):
        unseen = unseen.unseen(read_rows(MEASURED / folder / "whole.json.xz")[0].chip)
    assert unseen.supported([convolution], device) == [None], "no other chip is left"


def test_a_call_that_nobody_measured_takes_what_those_of_the_shipped_rates_do() -> None:
    # Pages, slow functions and a network's code are priced in calls, too.
    calls = [known.device.launch_overhead_s or 0.0 for known in KnownRates.load().known]
    assert len(calls) >= 6
    assert min(calls) < ASSUMED_LAUNCH_S < max(calls)
