"""What a pass leaves in a processor's cache makes its products cheaper, and nothing dearer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import foreplan.datasets
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import PHASES, Phase, Step
from foreplan.cost_models.rates import reuse
from foreplan.cost_models.rates.known_rates import KnownRates
from foreplan.cost_models.rates.rate_law import Waits
from foreplan.cost_models.rates.reuse import (
    pass_waits,
    share_of,
    spilled_share,
    waiting_share,
    working_set,
)
from foreplan.cost_models.rates.reuse_fit import fit, main
from foreplan.cost_models.replay import predict_latency, replay_book, replay_steps
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.graphs.capture import capture
from foreplan.datasets.program import Variant, program
from foreplan.datasets.sweeps.reuse_sweep import DISTANCES, ReuseRow, ReuseTimes, drawn

MEASURED = Path(next(iter(foreplan.datasets.__path__))) / "measured"
FP32 = Variant("fp32", "fp32", "torch.linear")
PRODUCTS = drawn()
MAPS = [
    program("add", Variant("bf16", "bf16", "torch.add"), rows=64, cols=512),
    program("norm", Variant("bf16", "bf16", "torch.layer_norm"), rows=64, cols=512),
]
CORE_BYTES = 1 << 25
CORE = Device(
    name="cpu:threads=1", chip="new", vendor="test", kind="cpu", isa=("avx2",),
    peak_flops={"fp32/vector": 1e11}, memory_bandwidth=2e10, launch_overhead_s=1.2e-6,
    l3_bytes=CORE_BYTES, sources={"memory_bandwidth": "measured"},
)  # fmt: skip


def cached(l3_bytes: int | None, **more: object) -> Device:
    return CORE.model_copy(update={"l3_bytes": l3_bytes, **more})


# The law ----------------------------------------------------------------------------------------


@given(
    filled=st.lists(st.floats(0, 100), min_size=2, max_size=9), near=st.floats(0, 1),
    held=st.floats(0.1, 2), wider=st.floats(1.1, 20),
)  # fmt: skip
def test_the_longer_ago_the_longer_the_wait(
    filled: list[float], near: float, held: float, wider: float
) -> None:
    shares = [share_of(x, near, held, held * wider) for x in sorted(filled)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(shares))
    assert near - 1e-12 <= shares[0]
    assert shares[-1] <= 1 + 1e-12
    assert share_of(held, near, held, held * wider) == near
    assert share_of(held * wider, near, held, held * wider) == pytest.approx(1.0)


def test_only_processors_with_a_known_cache_have_near_operands() -> None:
    assert waiting_share(CORE, 0.0) == waiting_share(CORE, 1 << 20) < 1.0
    assert waiting_share(CORE, 1 << 30) == 1.0
    assert waiting_share(cached(None), 0.0) == 1.0
    # Maps were timed with more in the caches than products were: half a cache is far for them.
    wide, products = ([waiting_share(CORE, CORE_BYTES * f, kind) for f in (0.05, 0.25, 0.5)]
                      for kind in ("wide", "product"))  # fmt: skip
    assert all(a > b for a, b in zip(wide, products, strict=True))
    assert wide[0] < wide[1] < wide[2] == 1.0
    assert waiting_share(cached(None, l2_bytes=1 << 25), 0.0) == waiting_share(CORE, 0.0)
    assert waiting_share(device_zoo.device("h200"), 0.0) == 1.0


#: Reads of 100 GB/s behind 1 MiB, 25 behind 4 to 32, and 10 from memory.
SEEN = tuple(
    (size << 20, rate * 1e9)
    for size, rate in ((1, 100.0), (4, 25.0), (32, 25.0), (64, 9.0), (128, 10.0))
)


def test_operands_are_as_near_as_reads_were_seen_to_be() -> None:
    seen = cached(1 << 30, reread_bandwidth=SEEN)
    assert waiting_share(seen, 1 << 20) == pytest.approx(0.1)
    assert waiting_share(seen, 0.0) == waiting_share(seen, 1.0) == pytest.approx(0.1)
    assert waiting_share(seen, 16 << 20) == pytest.approx(0.4)
    assert waiting_share(seen, 32 << 20) == pytest.approx(0.4)
    assert 0.4 < waiting_share(seen, 40 << 20) < 1.0
    # A gibibyte that the machine names holds nothing of it, noise makes none nearer than memory.
    assert waiting_share(seen, 64 << 20) == waiting_share(seen, 1 << 40) == 1.0
    named = cached(32 << 20)
    for used in (1 << 20, 8 << 20, 64 << 20):
        assert waiting_share(seen, used, "wide") == waiting_share(named, used, "wide")
    # Where nothing was read faster than from memory, only the least was near.
    flat = cached(1 << 30, reread_bandwidth=((1 << 18, 9e9), (1 << 27, 10e9)))
    assert waiting_share(flat, 1 << 18) == 1.0
    assert waiting_share(flat, 1 << 18, "wide") == 1.0


def test_near_caches_are_as_large_as_they_are_named_or_seen() -> None:
    assert spilled_share(CORE, 0.0) == spilled_share(device_zoo.device("h200"), 0.0) == 1.0
    named = cached(1 << 28, l2_bytes=16 << 20, units=8)
    shares = [spilled_share(named, used) for used in (0.0, 2 << 20, 4 << 20, 9 << 20, 1 << 30)]
    assert shares[:2] == [0.0, 0.0]
    assert 0.0 < shares[2] < shares[3] <= shares[4] == 1.0
    # A tenth of what reads at half the fastest rate, here up to 4 MiB; nothing slows down in flat.
    seen = cached(1 << 30, reread_bandwidth=SEEN, l2_bytes=1 << 30)
    tenth = (4 << 20) * reuse._WIDE[1]
    assert spilled_share(seen, tenth) == 0.0 < spilled_share(seen, 2 * tenth) < 1.0
    assert spilled_share(seen, 4 << 20) == 1.0
    flat = cached(1 << 30, reread_bandwidth=((1 << 18, 9e9), (1 << 27, 10e9)))
    assert spilled_share(flat, 1.0) == 1.0
    # Reads that have not sped up yet are no slower cache.
    rising = cached(1 << 30, reread_bandwidth=((1 << 10, 1e9), *SEEN))
    assert spilled_share(rising, tenth) == 0.0


def test_what_near_caches_hold_waits_less() -> None:
    steps = lowered("inference")
    used = int(working_set(steps))
    far = pass_waits(steps, CORE)
    near, between, spilled = (
        pass_waits(steps, cached(CORE_BYTES, l2_bytes=int(over * used))) for over in (2, 0.5, 0.1)
    )
    assert spilled == far
    assert near.weight == pytest.approx(reuse._HOT * far.weight)
    assert near.code == pytest.approx({kind: reuse._HOT * far.code[kind] for kind in far.code})
    assert near.weight < between.weight < far.weight


@given(
    rates=st.lists(st.floats(1e9, 1e12), min_size=1, max_size=12),
    used=st.lists(st.floats(0, 1e12), min_size=2, max_size=9),
    kind=st.sampled_from(("wide", "product")),
)
def test_the_longer_ago_the_longer_the_wait_by_any_reads(
    rates: list[float], used: list[float], kind: str
) -> None:
    pairs = tuple((1 << (18 + k), rate) for k, rate in enumerate(rates))
    shares = [waiting_share(cached(None, reread_bandwidth=pairs), x, kind) for x in sorted(used)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(shares))
    assert all(0.0 < share <= 1.0 + 1e-12 for share in shares)


def test_a_near_price_is_never_above_the_cold_one() -> None:
    known = KnownRates.load()
    cold = known.seconds([*PRODUCTS, *MAPS], CORE)
    before = cold
    for waits in (0.9, 0.6, 0.3, 0.0):
        found = known.seconds([*PRODUCTS, *MAPS], CORE, waits=Waits(waits))
        assert (found < before).all(), "of maps and norms the call"
        assert (found > 0).all()
        before = found
    # All that a large map takes is the memory of operands that were just written.
    large = program("add", Variant("bf16", "bf16", "torch.add"), rows=1 << 14, cols=4096)
    cold, near = (known.seconds([large], CORE, waits=Waits(share)) for share in (1.0, 0.0))
    assert near == pytest.approx(cold, rel=0.01)
    warm = known.forecast(PRODUCTS, CORE, waits=Waits(0.5))
    far = known.forecast(PRODUCTS, CORE)
    for name in ("mean_s", "low_s", "high_s"):
        assert (getattr(warm, name) < getattr(far, name)).all()


# What a pass uses ---------------------------------------------------------------------------------


def test_a_working_set_by_hand() -> None:
    work = program("linear", FP32, rows=8, n=32, k=16)
    weight, moved = 4 * 32 * 16, 4 * 8 * (32 + 16)
    step = Step("linear", "aten.linear", "forward", work)
    assert working_set([step]) == weight + moved
    assert working_set([step] * 3) == 3 * weight + moved
    conv = program(
        "conv", Variant("fp32", "fp32", "torch.conv2d"), batch=2, groups=2, cin=4, cout=8, taps=9,
        inputs=64, outputs=16,
    )  # fmt: skip
    images = 4 * 2 * (4 * 64 + 8 * 16)
    both = [step, Step("convolution", "aten.conv2d", "forward", conv)]
    assert working_set(both) == weight + 4 * 2 * 8 * 9 + max(moved, images)
    update = program(
        "adamw", Variant("fp32", "fp32", "torch.adamw"), parameters=544, kernels=1, longest=512
    )
    training = [step, Step("optimizer", "adamw", "optimizer", update)]
    assert working_set(training) == 4 * 4 * 544 + moved / 2
    recurrent = program(
        "recurrent", Variant("fp32", "fp32", "torch.lstm"), steps=4, rows=2, inputs=8, hidden=16,
        outputs=16, gates=4, layers=1, directions=1,
    )  # fmt: skip
    layers = [step, *[Step("recurrent", "aten.lstm", "forward", recurrent)] * 2]
    assert working_set(layers) == weight + moved + 2 * recurrent.bytes, "all of it comes back"
    assert working_set([]) == 0


def lowered(phase: Phase) -> list[Step]:
    network = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    return lower(capture(network, [torch.zeros(64, 256)], eager=True), phase)


def test_code_waits_for_what_comes_between_two_calls_of_its_kind() -> None:
    linear = Step("linear", "aten.linear", "forward", PRODUCTS[0])
    conv = program(
        "conv", Variant("fp32", "fp32", "torch.conv2d"), batch=1, groups=1, cin=64, cout=64, taps=9,
        inputs=1024, outputs=1024,
    )  # fmt: skip
    alone = Step("convolution", "aten.conv2d", "forward", conv)
    steps = [*[linear] * 40, alone]
    core = cached(int(working_set(steps)))
    found = pass_waits(steps, core)
    whole = waiting_share(core, working_set(steps))
    assert found.weight == whole > waiting_share(core, 0.0)
    # One of 40 products comes behind the convolution, the others behind each other.
    behind = waiting_share(core, conv.bytes)
    near = waiting_share(core, 0.0)
    assert found.code["product"] == pytest.approx((39 * near + behind) / 40)
    assert found.code["convolution"] == whole
    assert found.of_code(PRODUCTS[0]) == found.code["product"]
    back = replace(conv, variant=Variant("fp32", "fp32", "torch.conv2d_input_gradient"))
    assert found.of_code(back) == whole, "not in this pass"


@pytest.mark.parametrize("phase", PHASES)
def test_a_larger_cache_never_makes_a_pass_slower(phase: Phase) -> None:
    steps = lowered(phase)
    used = working_set(steps)
    cold = replay_steps(steps, replay_book(CORE), CORE)
    sizes = [int(used * over) for over in (0.001, 0.01, 0.8, 1.0, 1.5, 3.0, 30.0)]
    found = [
        replay_steps(steps, replay_book(device, steps=steps), device)
        for device in map(cached, sizes)
    ]
    # Of a pass larger than all caches the code of neighbouring calls alone is kept.
    assert found[0].device_s == found[1].device_s < cold.device_s
    assert found[0].by("kind")["activation"] <= cold.by("kind")["activation"]
    times = [each.latency_s for each in found]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
    for warm, price in zip(found[-1].prices, cold.prices, strict=True):
        assert warm.mean_s <= price.mean_s
    by_kind, before = found[-1].by("kind"), cold.by("kind")
    assert by_kind["linear"] < before["linear"]
    assert by_kind["activation"] < before["activation"]


def test_a_prediction_knows_its_pass() -> None:
    network = nn.Linear(256, 256)
    far, near = (
        predict_latency(network, cached(size), inputs=[torch.zeros(8, 256)])
        for size in (1 << 10, 1 << 30)
    )
    assert near.latency_s < far.latency_s


# The fit ------------------------------------------------------------------------------------------


def made_up(near: float, held: float, lost: float, noise: float) -> tuple[KnownRates, ReuseTimes]:
    known = KnownRates.load()
    law, rng = known.known[0].law, np.random.default_rng(0)
    cold = law.seconds(PRODUCTS, CORE)
    seconds = np.stack([
        law.seconds(PRODUCTS, CORE, waits=Waits(share_of(filled, near, held, lost)))
        for filled in DISTANCES
    ], axis=1) * np.exp(rng.normal(0, noise, (len(cold), len(DISTANCES))))  # fmt: skip
    rows = [
        ReuseRow(op=item.op, dims=item.dims, variant=str(item.variant), median_s=tuple(times))
        for item, times in zip(PRODUCTS, seconds.tolist(), strict=True)
    ]
    return known, ReuseTimes(device=CORE, distances=DISTANCES, software={}, rows=tuple(rows))


def test_a_fit_finds_what_the_times_were_made_with() -> None:
    known, times = made_up(0.3, 0.4, 1.6, 0.02)
    found = fit(known.known[0].law, CORE, times, np.arange(len(times.rows)))
    assert found == pytest.approx((0.3, 0.4, 1.6), abs=0.06)


def test_the_numbers_in_use_are_those_of_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """And the law tells the rows that it was not fitted to better than the cold price does."""
    main([str(MEASURED / "epyc26_library" / "whole.json.xz"), str(MEASURED / "epyc_reuse.json.xz")])
    text = capsys.readouterr().out
    numbers = [float(word) for word in text.splitlines()[0].replace(",", "").split()[4::2]]
    assert numbers == pytest.approx([reuse._NEAR, reuse._HELD, reuse._LOST], abs=0.02)
    rows = [line for line in text.splitlines() if line.startswith(("| linear", "| conv2d"))]
    assert len(rows) == 2
    quarter = 2 + DISTANCES.index(0.25)
    for line in rows:
        law, cold = map(float, line.split("|")[quarter].split("/"))
        assert law < 0.7 * cold
