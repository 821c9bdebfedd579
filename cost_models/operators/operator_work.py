"""What an operator of a table has to do, and what the device offers for it: the roofline's inputs.

Every figure here is theory: counted from dimensions or published for the device.

Shape legend: ``N`` rows of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from foreplan.datasets.device import Device
from foreplan.datasets.sweeps.operator_table import UNKNOWN, OperatorTable

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Precision:
    """How a data type of a table is stored and computed.

    Attributes:
        compute: dtypes whose peak bounds the arithmetic; the first that a device has counts.
        activation_bytes: bytes of one element of activations.
        weight_bytes: bytes of one element of weights (attention: of the cache), with scales.
    """

    compute: tuple[str, ...]
    activation_bytes: float
    weight_bytes: float


#: log2 of the alignment beyond which none helps: 64 elements. Assumed.
MOST_ALIGNED = 6

_HALF = ("bf16", "fp16", "fp32")
_EIGHT = ("fp8", *_HALF)  # without an fp8 unit, 8-bit floats are upcast

#: Data type as a source names it to its precision. Groups of 128 weights share a 16-bit scale.
PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": Precision(("fp32",), 4.0, 4.0),
        "float32": Precision(("fp32",), 4.0, 4.0),
        "tf32": Precision(("tf32", "fp32"), 4.0, 4.0),
        "bfloat16": Precision(_HALF, 2.0, 2.0),
        "bf16": Precision(_HALF, 2.0, 2.0),
        "float16": Precision(("fp16", "bf16", "fp32"), 2.0, 2.0),
        "fp16": Precision(("fp16", "bf16", "fp32"), 2.0, 2.0),
        "half": Precision(("fp16", "bf16", "fp32"), 2.0, 2.0),
        "fp8": Precision(_EIGHT, 1.0, 1.0),
        "fp8_static": Precision(_EIGHT, 1.0, 1.0),
        "fp8_block": Precision(_EIGHT, 1.0, 1.0),
        "sq": Precision(("int8", *_HALF), 1.0, 1.0),
        "int8": Precision(("int8", *_HALF), 1.0, 1.0),
        "int8_wo": Precision(_HALF, 2.0, 1.0),
        "int4_wo": Precision(_HALF, 2.0, 0.5 + 2 / 128),
        "bfloat16/bfloat16": Precision(_HALF, 2.0, 2.0),
        "float16/float16": Precision(("fp16", "bf16", "fp32"), 2.0, 2.0),
        "bfloat16/fp8": Precision(_HALF, 2.0, 1.0),
        "fp32/fp32": Precision(("fp32",), 4.0, 4.0),
        "fp8/fp8": Precision(_EIGHT, 2.0, 1.0),
        "bfloat16/int8": Precision(_HALF, 2.0, 1.0),
    }
)


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """Work and offer of every row of a table; NaN where a row cannot be priced.

    Attributes:
        flops: FLOP, multiply-add = 2 (N,).
        bytes: fewest bytes through memory, or over the links of one rank for a collective (N,).
        peak: FLOP/s of the device for the row's data type (N,).
        bandwidth: bytes/s of the memory, or of the links (N,).
        units: streaming multiprocessors (N,).
    """

    flops: Floats
    bytes: Floats
    peak: Floats
    bandwidth: Floats
    units: Floats

    @property
    def roofline_s(self) -> Floats:
        """Seconds that no kernel on this device can beat (N,)."""
        return np.maximum(self.flops / self.peak, self.bytes / self.bandwidth)


def operator_work(table: OperatorTable) -> OperatorWork:
    """Count the work of each row and look up what its device offers."""
    count = len(table)
    flops, moved = np.full(count, np.nan), np.full(count, np.nan)
    activation, weight = widths(table)
    for kind in sorted(set(table.kind) - {UNKNOWN}):
        rows = table.kind == kind
        d = {name: column[rows] for name, column in table.dims.items()}
        flops[rows], moved[rows] = _COUNT[kind](d, activation[rows], weight[rows])
    peak, bandwidth, units = _offer(table)
    return OperatorWork(flops, moved, peak, bandwidth, units)


def peak_flops(device: Device, dtype: str) -> float:
    """FLOP/s that bound a row of this data type, NaN if neither is known."""
    precision = PRECISIONS.get(dtype)
    for name in precision.compute if precision else ():
        rate = device.peak(name)
        if rate is not None:
            return rate
    return float("nan")


def out_size(d: Mapping[str, Floats]) -> Floats:
    """Rows (= columns) of a convolution's output."""
    size: Floats = np.floor((d["size"] + 2 * d["padding"] - d["window"]) / d["stride"]) + 1
    return np.asarray(np.maximum(size, 1), dtype=np.float64)


def alignment(size: Floats) -> Floats:
    """log2 of the largest power of two, at most ``2**MOST_ALIGNED``, that divides a size."""
    whole = np.maximum(size, 1).astype(np.int64)
    return np.asarray(np.log2(np.minimum(whole & -whole, 2**MOST_ALIGNED)), dtype=np.float64)


def visible_pairs(d: Mapping[str, Floats]) -> Floats:
    """Pairs of (query, key) that the causal mask and the sliding window leave."""
    queries, keys = d["queries"], d["keys"]
    window = np.where(d["window"] > 0, np.minimum(d["window"], keys), keys)
    # Query i (the last sees every key) sees min(keys - queries + i, window) keys.
    first = keys - queries + 1
    growing = np.clip(window - first + 1, 0, queries)
    return growing * (first + first + growing - 1) / 2 + (queries - growing) * window


def widths(table: OperatorTable) -> tuple[Floats, Floats]:
    """Bytes of one element of activations and of weights, NaN where unknown (N,) each."""
    missing = Precision((), float("nan"), float("nan"))
    known = {name: PRECISIONS.get(name, missing) for name in set(table.dtype)}
    activation = np.array([known[name].activation_bytes for name in table.dtype])
    return activation, np.array([known[name].weight_bytes for name in table.dtype])


def _offer(table: OperatorTable) -> tuple[Floats, Floats, Floats]:
    found: dict[tuple[str, str, bool], tuple[float, float, float]] = {}
    nan = float("nan")
    keys = list(zip(table.device, table.dtype, table.kind == "collective", strict=True))
    for key in set(keys):
        name, dtype, link = key
        device = table.device_of(name)
        if device is None:
            found[key] = (nan, nan, nan)
        elif link:
            # A link that the device may or may not have (NVLink bridge): the host's then.
            speed = device.peer_link_bandwidth or device.host_link_bandwidth
            found[key] = (1.0, float(speed or nan), float(device.units or nan))
        else:
            rate = float(device.memory_bandwidth or nan)
            found[key] = (peak_flops(device, dtype), rate, float(device.units or nan))
    rows = np.array([found[key] for key in keys], dtype=np.float64).reshape(-1, 3)
    return rows[:, 0], rows[:, 1], rows[:, 2]


_Dims = Mapping[str, Floats]
_Pair = tuple[Floats, Floats]


def _product(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    flops = 2 * d["b"] * d["m"] * d["n"] * d["k"]
    inputs = d["m"] * d["k"] * act + d["n"] * d["k"] * weight
    # 8-bit products write 16-bit results.
    return flops, d["b"] * (inputs + d["m"] * d["n"] * np.maximum(act, 2.0))


def _conv(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    out, rank = out_size(d), 2 - d["line"]
    kernel = d["cin"] / np.maximum(d["groups"], 1) * d["cout"] * d["window"] ** rank
    pixels = d["cin"] * d["size"] ** rank + d["cout"] * out**rank
    return 2 * d["b"] * kernel * out**rank, d["b"] * pixels * act + kernel * weight


def _elementwise(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    count = d["rows"] * d["cols"]
    # FP32 made of 16 bits reads half as much as it writes; of two as large one is FP32 itself.
    halved = (d["converts"] == 1) & (act == 4.0)
    half = np.where((d["converts"] == 2) & (d["inputs"] > 1), 0.5, 0.0)
    return d["cost"] * count, np.where(halved, 1.5, d["inputs"] + 1 - half) * count * act


def _normalise(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    count = d["rows"] * d["cols"]
    return 5 * count, 2 * count * act


def _normalise_back(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    count = d["rows"] * d["cols"]
    return 10 * count, 3 * count * act


def _reduce(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    return d["rows"] * d["cols"], d["rows"] * (d["cols"] + 1) * act


def _pool(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    # A maximum has its place beside it, a number of 8 bytes; its gradient goes the same way back.
    place = np.where(d["average"] > 0, 0, 8)
    return d["rows"] * d["window"] ** 2, d["rows"] * ((d["cols"] + 1) * act + place)


def _gather(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    return np.zeros_like(act), d["rows"] * d["cols"] * (act + weight)


def _scatter(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    # A table of zeros, to which rows are added.
    return d["rows"] * d["cols"], (d["values"] * d["cols"] + 2 * d["rows"] * d["cols"]) * act


def _attention(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    seen = np.where(d["window"] > 0, np.minimum(d["keys"], d["queries"] + d["window"]), d["keys"])
    cache = 2 * seen * d["kv_heads"] * weight
    moved = d["b"] * d["head_dim"] * (2 * d["queries"] * d["heads"] * act + cache)
    pairs = visible_pairs(d)
    added = d["masks"] * pairs / np.where(d["broadcast"] > 0, d["queries"], 1)
    return 4 * d["b"] * d["heads"] * d["head_dim"] * pairs, moved + added * act


def _attention_back(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    # Five products for two (Dao, FlashAttention-2, 2023); each tensor has a gradient.
    flops, moved = _attention(d, act, weight)
    # By what is added to scores: written for every sequence and head, then summed up.
    learned = np.where(d["training"] > 0, 2 * d["b"] * d["heads"] * visible_pairs(d) * act, 0)
    return 2.5 * flops, 2 * moved + learned


def _layer(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    parameters = (4 * d["hidden"] ** 2 + 3 * d["hidden"] * d["intermediate"]) / d["shards"]
    decode = d["context"] > 0
    pairs = np.where(decode, d["tokens"] * d["context"], d["tokens"] * (d["tokens"] + 1) / 2)
    cached = np.where(decode, d["tokens"] * d["context"], d["tokens"])
    attention = 4 * pairs * d["hidden"] / d["shards"]
    moved = parameters * weight + 2 * cached * d["hidden"] / d["shards"] * act
    moved = moved + d["tokens"] * (10 * d["hidden"] + 3 * d["intermediate"] / d["shards"]) * act
    return 2 * d["tokens"] * parameters + attention, moved


def _collective(d: _Dims, act: Floats, weight: Floats) -> _Pair:
    # Ring algorithms: an all-reduce is a reduce-scatter and an all-gather.
    share = (d["ranks"] - 1) / d["ranks"] * np.where(d["pattern"] == 1, 2.0, 1.0)
    return np.zeros_like(share), d["message_bytes"] * share


_COUNT: Mapping[str, Callable[[_Dims, Floats, Floats], _Pair]] = MappingProxyType(
    {
        "bmm": _product,
        "linear": _product,
        # Gradients multiply as often, and read and write tensors of the same sizes.
        **dict.fromkeys(("conv", "conv_input_gradient", "conv_weight_gradient"), _conv),
        "elementwise": _elementwise,
        **dict.fromkeys(("softmax", "layernorm", "batchnorm"), _normalise),
        **dict.fromkeys(("layernorm_gradient", "batchnorm_gradient"), _normalise_back),
        "reduction": _reduce,
        **dict.fromkeys(("pool", "pool_gradient"), _pool),
        "embedding": _gather,
        "embedding_gradient": _scatter,
        "context_attention": _attention,
        "context_attention_gradient": _attention_back,
        "generation_attention": _attention,
        "collective": _collective,
        "decoder_layer": _layer,
    }
)
