"""Tiles, waves and split sums of matrix products, and the trees that foretell the tile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.operators.operator_features import features
from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
from foreplan.cost_models.operators.tile_selector import (
    fit_selector,
    kernel_line,
    kernel_tiles,
    select,
)
from foreplan.cost_models.operators.tile_times import (
    KERNEL_TILES,
    Product,
    best_tile_seconds,
    chosen_tile,
    tile_seconds,
)
from foreplan.datasets import device_zoo
from foreplan.datasets.sweeps.operator_table import OperatorTable, operator_table, texts

SIZES = st.integers(1, 5000)


def product(b: float, m: float, n: float, k: float, *, split: bool = False) -> Product:
    """On 100 multiprocessors of 1e11 FLOP/s each, memory at 1e12 bytes/s."""
    size = [np.array([float(value)]) for value in (b, m, n, k)]
    offer = [np.array([value]) for value in (1e13, 100.0, 1e12, 4.0 * (m * k + n * k + m * n))]
    return Product(*size, *offer, split=np.array([split]))


def test_waves_by_hand() -> None:
    # 101 tiles of 128 x 128 need two rounds of 2 x 128 x 128 x (112 + 16) FLOP at 1e11 x 1 / 1.15.
    two = tile_seconds(product(101, 128, 128, 112), 128, 128)
    assert two[0] == pytest.approx(2 * 2 * 128 * 128 * 128 / 1e11 * 1.15)
    one = tile_seconds(product(100, 128, 128, 112), 128, 128)
    assert two[0] == pytest.approx(2 * one[0])


def test_a_long_sum_is_split_where_units_idle() -> None:
    whole, parts = (tile_seconds(product(1, 128, 128, 8192, split=s), 128, 128)[0]
                    for s in (False, True))  # fmt: skip
    steps = 8192 / 16 + 16
    added = 128 * 128 * 4 * 17 / 1e12
    assert parts == pytest.approx(2 * 128 * 128 * steps / 1e11 * 1.15 + added)
    assert parts < whole / 10


@given(SIZES, SIZES, SIZES, SIZES)
@settings(max_examples=60)
def test_no_tile_beats_the_peak_and_splitting_never_hurts(b: int, m: int, n: int, k: int) -> None:
    whole, parts = product(b, m, n, k), product(b, m, n, k, split=True)
    flops = 2.0 * b * m * n * k
    for tile in KERNEL_TILES:
        assert tile_seconds(whole, *tile)[0] >= flops / 1e13
        assert tile_seconds(parts, *tile)[0] <= tile_seconds(whole, *tile)[0]


@given(SIZES, SIZES, SIZES)
@settings(max_examples=60)
def test_lost_reuse_only_adds(m: int, n: int, k: int) -> None:
    item, widths = product(1, m, n, k), (np.array([4.0]), np.array([4.0]))
    for index, tile in enumerate(KERNEL_TILES):
        small, large = (
            chosen_tile(item, np.array([index]), widths=widths, l2=np.array([size]))[1][0]
            for size in (2e6, 1e12)
        )
        assert small >= large == pytest.approx(tile_seconds(item, *tile)[0])


def test_unknown_tiles_are_the_best_and_say_nothing() -> None:
    item, widths = product(3, 500, 700, 90), (np.array([4.0]), np.array([4.0]))
    columns, seconds = chosen_tile(item, np.array([-1]), widths=widths, l2=np.array([1e6]))
    assert seconds == pytest.approx(best_tile_seconds(item))
    assert all(np.isnan(column).all() for column in columns.values())


def test_kernel_names() -> None:
    names = ["volta_sgemm_128x64_nn", "ampere_sgemm_32x32_sliced1x4_tn", "gemv2T_kernel_val", ""]
    found = kernel_tiles(names)
    assert [KERNEL_TILES[i] if i >= 0 else None for i in found] == [(64, 128), (32, 32), None, None]


def test_lines_of_kernels() -> None:
    lines = {n: kernel_line(device_zoo.device(n)) for n in ("p4", "v100_pcie_32gb", "t4", "h200")}
    assert lines == {"p4": 0, "v100_pcie_32gb": 1, "t4": 1, "h200": 2}


def test_a_selector_finds_a_rule_again() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(0, 10, (2000, 3)).astype(np.float32)
    values[::50, 1] = np.nan
    tile = np.where(values[:, 0] < 3, 4, np.where(values[:, 2] < 5, 1, 6))
    found = fit_selector(values, tile)
    assert found is not None
    assert (select(found, values) == tile).mean() > 0.99
    assert fit_selector(values, np.where(np.arange(2000) < 100, tile, -1)) is None


def _named(device: str, names: list[str], rows: int = 300) -> OperatorTable:
    """Batched products that take 1.3 times their tile's time and 20 us."""
    rng = np.random.default_rng(0)
    dims = {name: np.round(2 ** rng.uniform(4, 10, rows)) for name in ("b", "m", "n", "k")}
    kernel = texts(names[0] if n < 128 else names[1] for n in dims["n"])
    table = operator_table(
        op=texts(["bmm"] * rows), kind=texts(["bmm"] * rows), dtype=texts(["fp32"] * rows),
        library=texts(["torch-2.1-cuda"] * rows), device=texts([device] * rows), dims=dims,
        latency_s=np.ones(rows), kernel=kernel,
    )  # fmt: skip
    made = features(table, "product", kernel_tiles(kernel)).structural_s
    return operator_table(
        op=table.op, kind=table.kind, dtype=table.dtype, library=table.library,
        device=table.device, dims=table.dims, latency_s=2e-5 + 1.3 * made, kernel=kernel,
    )  # fmt: skip


def test_a_device_takes_the_tiles_of_its_line() -> None:
    """T4 and A100 take unlike tiles; a V100 that nobody timed is of T4's line."""
    volta, ampere = ["volta_sgemm_64x64_nn", "volta_sgemm_128x64_nn"], ["ampere_sgemm_128x128_nn"]
    train = OperatorTable.concat([_named("t4", volta), _named("a100_pcie_40gb", ampere * 2)])
    model = OperatorPredictor(trees=60).fit(train)
    asked = _named("v100_pcie_32gb", volta)
    blind = operator_table(
        op=asked.op, kind=asked.kind, dtype=asked.dtype, library=asked.library,
        device=asked.device, dims=asked.dims, latency_s=asked.latency_s,
    )  # fmt: skip
    found = model.predict(blind)
    assert np.median(np.abs(found / asked.latency_s - 1)) < 0.1
    # A kernel's name in the table that asks changes nothing.
    assert np.array_equal(found, model.predict(_named("v100_pcie_32gb", ampere * 2)))
