"""Features of library operators: dimensionless, so that what one chip teaches holds on another.

Everything is a ratio of the operator's demand to what the device offers (waves of tiles per
multiprocessor, working set to L2, arithmetic intensity to the ridge), never a raw figure of the
device, which would only name the chip. A figure that is not known gives NaN.

`structural_s` is the part with physics in it: the waves of a kernel's tiles (`tile_times`; the idea
is NeuSight's, MIT licence, (c) 2025 Georgia Institute of Technology and Microsoft, the formulas are
our own), bounded below by the bytes that must move. The learned part only corrects it.

Shape legend: ``N`` rows of one family; ``F`` features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.attention_scores import score_columns, written_out_s
from foreplan.cost_models.operators.channel_blocks import channel_block_s
from foreplan.cost_models.operators.channel_tiles import channel_tile_s
from foreplan.cost_models.operators.convolution_kernels import beside_s, kernel_columns
from foreplan.cost_models.operators.decoding_kernels import by_head, decoding_s, is_timed_by_loop
from foreplan.cost_models.operators.idle_kernel import USUAL_CLOCK_HZ, idle_kernel_s
from foreplan.cost_models.operators.memory_time import memory_time, share_from_memory
from foreplan.cost_models.operators.offset_threads import offset_thread_s
from foreplan.cost_models.operators.operator_work import (
    MOST_ALIGNED,
    OperatorWork,
    alignment,
    operator_work,
    out_size,
    visible_pairs,
    widths,
)
from foreplan.cost_models.operators.pool_threads import pool_thread_s
from foreplan.cost_models.operators.power_limit import paid_flops, sustained_share
from foreplan.cost_models.operators.prompt_kernels import is_timed_prompt, prompt_s
from foreplan.cost_models.operators.roofline_columns import collective_columns, layer_columns
from foreplan.cost_models.operators.rounded_inputs import rounding_s
from foreplan.cost_models.operators.row_blocks import row_block_s
from foreplan.cost_models.operators.split_sums import splits_sums
from foreplan.cost_models.operators.sum_blocks import sum_block_s
from foreplan.cost_models.operators.tile_times import (
    CHOSEN,
    Product,
    best_tile_seconds,
    chosen_tile,
    wave_columns,
)
from foreplan.cost_models.operators.update_kernels import update_s
from foreplan.datasets.sweeps.operator_table import OperatorTable

Floats = NDArray[np.float64]

#: Families of operators that go through their bytes once or a few times.
_WIDE = ("wide", "channels", "sums", "rows")
#: Families that are learned together, and the kinds in each.
FAMILIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "product": ("bmm", "linear"),
        "conv": ("conv", "conv_input_gradient", "conv_weight_gradient"),
        "wide": ("elementwise", "softmax", "layernorm", "layernorm_gradient"),
        "channels": ("batchnorm", "batchnorm_gradient"),
        "sums": ("reduction", "pool", "pool_gradient"),
        "rows": ("embedding", "embedding_gradient"),
        "context": ("context_attention", "context_attention_gradient"),
        "generation": ("generation_attention",),
        "collective": ("collective",),
        "layer": ("decoder_layer",),
    }
)  # fmt: skip

#: Power of that share that a convolution feels. Fitted on P4 and T4, each of which asks for 0.5
#: alone; presumably because Winograd's kernels multiply less than is counted.
_CONV_POWER = 0.5

#: Multiprocessors of a large GPU whose number is not published. Assumed.
USUAL_UNITS = 140.0

#: Channels of a group from which on a convolution is a product of matrix units. Assumed.
_MATRIX_CHANNELS = 8


@dataclass(frozen=True, slots=True)
class Features:
    """Features of the rows of one family.

    Attributes:
        names: of the features (F,).
        values: (N, F), float32, NaN where unknown.
        structural_s: seconds of the device's work by the tile and wave structure (N,).
        bound_s: seconds no kernel can beat, even with what fits in L2 already there (N,).
        roofline_s: seconds of the plain roofline (N,).
    """

    names: tuple[str, ...]
    values: NDArray[np.float32]
    structural_s: Floats
    bound_s: Floats
    roofline_s: Floats

    def take(self, rows: NDArray[np.int64]) -> Features:
        """The chosen rows."""
        return Features(
            self.names, self.values[rows], self.structural_s[rows], self.bound_s[rows],
            self.roofline_s[rows],
        )  # fmt: skip


def features(table: OperatorTable, family: str, tile: NDArray[np.int64] | None = None) -> Features:
    """Features of a table whose rows are all of one family.

    Args:
        table: the rows (N,).
        family: one of `FAMILIES`.
        tile: of products, what the kernel takes, as an index into `tile_times.KERNEL_TILES`, -1
            where it is not known (N,); ``None`` if it is known nowhere.
    """
    work = operator_work(table)
    work = replace(work, units=np.nan_to_num(work.units, nan=USUAL_UNITS))
    offer = _offers(table)
    with np.errstate(divide="ignore", invalid="ignore"):
        columns, structural = (
            _product(table, work, offer, tile) if family == "product"
            else _FAMILY[family](table, work, offer)
        )  # fmt: skip
        columns |= _common(work, offer)
        columns |= _later(table, family)
        if family in ("context", "generation"):
            columns |= score_columns(table, work, offer, structural)
        if family == "generation":
            alone = is_timed_by_loop(table) & by_head(table, work, offer)
            columns["by_head"] = alone.astype(np.float64)
        if family == "conv":
            columns |= kernel_columns(table, work, offer["l2"], structural)
    values = np.column_stack([np.asarray(column, dtype=np.float32) for column in columns.values()])
    values[~np.isfinite(values)] = np.nan
    bound = _bound(table, work, offer)
    return Features(tuple(columns), values, structural, bound, work.roofline_s)


def _bound(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> Floats:
    """Seconds no kernel can beat: arithmetic at peak, and bytes that no cache can have kept."""
    # A cache of keys alone is half as large, and heads that share it read it once; `_attention`.
    half = np.where(is_timed_by_loop(table), 2.0, 1.0)
    missing = np.maximum(1 - half * np.nan_to_num(offer["l2"] / work.bytes), 0)
    missing = missing * np.where(_grouped(table), 0.5, 1.0)
    # Winograd's F(4x4, 3x3) needs a quarter of the multiplications.
    few = np.isin(table.kind, FAMILIES["conv"])
    few &= (table.dims["window"] > 1) & (table.dims["stride"] == 1)
    return np.asarray(
        np.maximum(
            work.flops / work.peak * np.where(few, 0.25, 1.0), work.bytes * missing / work.bandwidth
        )
    )


def _grouped(table: OperatorTable) -> NDArray[np.bool_]:
    return np.asarray(
        (table.kind == "generation_attention") & (table.dims["heads"] > table.dims["kv_heads"])
    )


def _offers(table: OperatorTable) -> dict[str, Floats]:
    """Figures of each row's device (N,), NaN where unknown."""
    names = ("l2", "clock", "paid", "threads", "fp32", "shared", "capability")
    found: dict[str, tuple[float, ...]] = {}
    nan = float("nan")
    for name in set(table.device):
        device = table.device_of(name)
        if device is None:
            found[name] = (nan,) * len(names)
            continue
        found[name] = (
            float(device.l2_bytes or nan),
            float(device.clock_hz or nan),
            paid_flops(device),
            float(device.max_threads_per_unit or nan),
            float(device.peak("fp32") or nan),
            float(device.shared_memory_bytes_per_unit or nan),
            float(device.compute_capability or nan) if device.kind == "cuda" else nan,
        )
    rows = np.array([found[name] for name in table.device], dtype=np.float64)
    return {name: rows[:, i] for i, name in enumerate(names)}


def _common(work: OperatorWork, offer: Mapping[str, Floats]) -> dict[str, Floats]:
    compute, memory = work.flops / work.peak, work.bytes / work.bandwidth
    return {
        "log_roofline_us": np.log(work.roofline_s * 1e6),
        "log_compute_us": np.log(np.maximum(compute, 1e-12) * 1e6),
        "log_compute_to_memory": np.log(np.maximum(compute, 1e-12) / memory),
        "log_bytes_to_l2": np.log(work.bytes / offer["l2"]),
        "log_bytes_per_unit": np.log(work.bytes / work.units),
        "log_bytes_per_clock_unit": np.log(work.bandwidth / (offer["clock"] * work.units)),
        "log_flops_per_clock_unit": np.log(work.peak / (offer["clock"] * work.units)),
        "log_l2_per_unit": np.log(offer["l2"] / work.units),
        "log_power_share": np.log(offer["paid"] / offer["fp32"]),
        "capability": offer["capability"],
    }


def _later(table: OperatorTable, family: str) -> dict[str, Floats]:
    """Features that stand last, because the trees of shipped weights count columns."""
    d, kind = table.dims, table.kind
    asked: dict[str, NDArray[Any]] = {}
    if family == "conv":
        groups = np.maximum(d["groups"], 1)
        asked = {
            "log_groups": np.log(groups),
            "log_group_cin": np.log(d["cin"] / groups),
            "channels_last": d["channels_last"],
            "is_input_gradient": kind == "conv_input_gradient",
            "is_weight_gradient": kind == "conv_weight_gradient",
            "bias": d["bias"],
            "log_group_cout": np.log(d["cout"] / groups),
            "align_group_cin": alignment(d["cin"] / groups),
            "align_group_cout": alignment(d["cout"] / groups),
        }
    if family in _WIDE:
        names = ("batchnorm", "reduction", "embedding")
        asked = {"strided": d["strided"]} | {f"is_{name}": kind == name for name in names}
        # Of a norm of rows the number is not asked for: that its rows are groups of channels is.
        of_rows = np.isin(kind, ("layernorm", "layernorm_gradient"))
        channels = np.where(of_rows, np.minimum(d["channels"], 1), d["channels"])
        channels = np.where(channels > 0, channels, np.nan)
        asked |= {
            "broadcast": d["broadcast"], "converts": d["converts"], "training": d["training"],
            "is_layernorm_gradient": kind == "layernorm_gradient",
            "is_batchnorm_gradient": kind == "batchnorm_gradient",
            "log_channels": np.log(channels),
            "log_channel_values": np.log(d["rows"] * d["cols"] / channels),
            "channels_last": d["channels_last"], "rms": d["rms"],
            "is_embedding_gradient": kind == "embedding_gradient",
            "log_values": np.log(np.where(d["values"] > 0, d["values"], np.nan)),
            "function": np.where(d["function"] > 0, d["function"], np.nan),
            "window": d["window"], "average": d["average"],
            "is_pool": kind == "pool", "is_pool_gradient": kind == "pool_gradient",
            "log_side": np.log(np.where(d["side"] > 0, d["side"], np.nan)),
        }  # fmt: skip
    if family == "product":
        asked = {"turned": d["turned"]}
    if family == "context":
        asked = {"is_gradient": kind == "context_attention_gradient"}
    return {name: np.asarray(column, dtype=np.float64) for name, column in asked.items()}


_Block = tuple[dict[str, Floats], Floats]


def _product(
    table: OperatorTable,
    work: OperatorWork,
    offer: Mapping[str, Floats],
    tile: NDArray[np.int64] | None = None,
) -> _Block:
    d = table.dims
    b, m, n, k = d["b"], d["m"], d["n"], d["k"]
    peak = work.peak * sustained_share(work, offer)
    item = Product(
        b, m, n, k, peak, work.units, work.bandwidth, work.bytes, split=splits_sums(table)
    )
    if tile is None:
        chosen, compute = dict.fromkeys(CHOSEN, np.full(len(m), np.nan)), best_tile_seconds(item)
    else:
        chosen, compute = chosen_tile(item, tile, widths=widths(table), l2=offer["l2"])
    structural = np.maximum(compute, memory_time(table, work, offer)) + rounding_s(table, work)
    structural = structural + idle_kernel_s(offer["clock"])
    columns = wave_columns(item) | {
        "log_compute_to_roofline": np.log(compute / work.roofline_s),
        "log_m": np.log(m), "log_n": np.log(n), "log_k": np.log(k), "log_b": np.log(b),
        "align_m": alignment(m), "align_n": alignment(n),
        # Operands that both lie along other sizes are loaded alike whatever ``k``.
        "align_k": np.where(d["turned"] == 2, MOST_ALIGNED, alignment(k)),
        "log_weights_to_l2": np.log(b * n * k * 4 / offer["l2"]),
        "log_stripe_to_l2": np.log((m + n) * k * 4 / offer["l2"]),
        "is_batched": (table.kind == "bmm").astype(np.float64),
        **chosen,
    }  # fmt: skip
    return columns, structural


def _conv(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> _Block:
    d = table.dims
    out, groups, rank = out_size(d), np.maximum(d["groups"], 1), 2 - d["line"]
    pixels, taps, skipped = d["b"] * out**rank, d["window"] ** rank, d["stride"] ** rank
    cin, cout = d["cin"] / groups, d["cout"] / groups
    to_input, to_weight = (table.kind == f"conv_{by}_gradient" for by in ("input", "weight"))
    # The product that a convolution and each of its gradients is, one a group.
    m = np.where(to_weight, cout, np.where(to_input, pixels * skipped, pixels))
    n = np.where(to_weight, cin * taps, np.where(to_input, cin, cout))
    k = np.where(to_weight, pixels, np.where(to_input, cout * taps / skipped, cin * taps))
    m, n, k = (np.maximum(np.round(size), 1) for size in (m, n, k))
    peak = work.peak * sustained_share(work, offer, _CONV_POWER)
    item = Product(groups, m, n, k, peak, work.units, work.bandwidth, work.bytes, split=to_weight)
    # Few channels a group leave nothing to matrix units (assumed: below 8).
    few = (groups > 1) & (np.minimum(cin, cout) < _MATRIX_CHANNELS)
    compute = np.where(few, work.flops / offer["fp32"], best_tile_seconds(item))
    columns = wave_columns(item) | {
        "log_m": np.log(m), "log_n": np.log(n), "log_k": np.log(k), "log_b": np.log(d["b"]),
        "cin": np.log(d["cin"]), "window": d["window"], "stride": d["stride"],
        "padding": d["padding"], "log_out": np.log(out), "align_cin": alignment(d["cin"]),
        "align_cout": alignment(d["cout"]),
    }  # fmt: skip
    beside = idle_kernel_s(offer["clock"]) + beside_s(table, work, offer["l2"])
    return columns, np.maximum(compute, memory_time(table, work, offer)) + beside


def _wide(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> _Block:
    d = table.dims
    softmax, norm = table.kind == "softmax", table.kind == "layernorm"
    by_row = softmax | norm | (table.kind == "layernorm_gradient")
    # Rows that reduce take one block each; an elementwise block takes 512 elements.
    blocks = np.where(by_row, d["rows"], d["rows"] * d["cols"] / 512)
    columns = {
        "log_rows": np.log(d["rows"]), "log_cols": np.log(d["cols"]),
        "align_cols": alignment(d["cols"]),
        "align_all": alignment(d["rows"] * d["cols"]),
        "inputs": d["inputs"], "cost": d["cost"],
        "is_softmax": softmax.astype(np.float64), "is_norm": norm.astype(np.float64),
        "log_blocks_per_unit": np.log(blocks / work.units),
        "wave_fill": blocks / work.units / np.ceil(blocks / work.units / 8) / 8,
        "log_row_threads": np.log(d["cols"] / offer["threads"]),
        "log_two_passes_to_l2": np.log(work.bytes / 2 / offer["l2"]),
    }  # fmt: skip
    clock = np.nan_to_num(offer["clock"], nan=USUAL_CLOCK_HZ)
    memory = memory_time(table, work, offer)
    beside = row_block_s(table, work, clock) + update_s(table, memory, clock)
    missing = share_from_memory(table, work, offer)
    beside += channel_block_s(table, work, memory, missing, clock)
    beside += channel_tile_s(table, work, memory, clock)
    beside += sum_block_s(table, work, offer["threads"], clock)
    threads = pool_thread_s(table, work, clock) + offset_thread_s(table, work, clock)
    beside += np.maximum(threads - memory, 0)
    columns["log_beside"] = np.log1p(np.maximum(beside, 0) / memory)
    # An update counts its own kernels.
    fixed = np.where(d["kernels"] > 0, 0.0, idle_kernel_s(offer["clock"]))
    return columns, fixed + memory + beside


def _attention(table: OperatorTable, work: OperatorWork, offer: Mapping[str, Floats]) -> _Block:
    d = table.dims
    group = d["heads"] / d["kv_heads"]
    query_tiles = np.ceil(d["queries"] / 128)
    tasks = d["b"] * d["heads"] * query_tiles
    pairs = visible_pairs(d)
    # Tensor-core tiles of 128 queries compute whole blocks of the causal mask.
    padded = d["b"] * d["heads"] * query_tiles * 128 * np.maximum(pairs / d["queries"], 64)
    back = np.where(table.kind == "context_attention_gradient", 2.5, 1.0)
    compute = back * 4 * padded * d["head_dim"] / work.peak
    waves = np.ceil(tasks / work.units)
    generation = table.kind == "generation_attention"
    kv_tasks = d["b"] * d["kv_heads"]
    compute = compute * np.where(generation, 1.0, waves * work.units / tasks)
    # Of other tables than TensorRT-LLM's, whose caches hold keys alone (`decoding_kernels`). Fitted
    # before that was known.
    memory = memory_time(table, work, offer) * np.where(_grouped(table), 0.55, 1.0)
    fused = np.maximum(np.where(generation, 0, compute), memory)
    for rows, kernels in ((is_timed_by_loop, decoding_s), (is_timed_prompt, prompt_s)):
        fused = np.where(rows(table), kernels(table, work, offer), fused)
    written = written_out_s(table, work, offer)
    structural = idle_kernel_s(offer["clock"]) + np.where(np.isnan(written), fused, written)
    columns = {
        "log_b": np.log(d["b"]), "log_queries": np.log(d["queries"]), "log_keys": np.log(d["keys"]),
        "log_heads": np.log(d["heads"]), "log_kv_heads": np.log(d["kv_heads"]),
        "log_group": np.log(group), "head_dim": d["head_dim"],
        "window": (d["window"] > 0).astype(np.float64),
        "align_keys": alignment(d["keys"]),
        "log_tasks_per_unit": np.log(tasks / work.units),
        "wave_fill": tasks / work.units / waves,
        "log_kv_tasks_per_unit": np.log(kv_tasks / work.units),
        "kv_wave_fill": kv_tasks / work.units / np.ceil(kv_tasks / work.units),
        "log_pairs_per_query": np.log(pairs / d["queries"]),
        "log_kv_bytes_per_task": np.log(work.bytes / kv_tasks),
        "log_compute_to_roofline": np.log(compute / work.roofline_s),
    }  # fmt: skip
    return columns, structural


_FAMILY = MappingProxyType(
    {
        "conv": _conv, **dict.fromkeys(_WIDE, _wide), "context": _attention,
        "generation": _attention, "collective": collective_columns, "layer": layer_columns,
    }
)  # fmt: skip
