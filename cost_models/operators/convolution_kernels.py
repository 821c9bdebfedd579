"""What torch runs for a convolution beside, or in place of, cuDNN's product of its sizes.

Of torch's own dispatch (``aten/src/ATen/native/Convolution.cpp``, 2.11), from its sizes alone:

- **One filter a channel, plain**: torch's own kernel and not cuDNN's, but for FP16 of sizes that a
  table there trusts cuDNN with. So BF16 and FP16, alike everywhere else, run other kernels.
- **16 bits, plain**: cuDNN's matrix kernels know channels last alone, so that images, filters and
  results are each copied into the other layout, by a kernel of their own.
- **Windows of one pixel, plain, of round images**: such a convolution is a product an image as it
  lies, and cuDNN copies nothing where the pixels of an image divide by 8 (rows of the sweep: of
  16 and more 1.3-3.3 TB/s of images and results, of 1 or 4 some 0.6), by 64 for filters' gradients.
- **Channels last with plain filters**: these are copied first (not for their gradient).
- **Bias**: added to the results by a kernel of its own.
- **Groups** of 16 bits with as many filters as channels, a power of two: cuDNN has kernels for them
  (16 and 32 channels, channels last, are up to ten times as fast as 24 and 40; rows of the sweep).

Counted for libraries timed inside CUDA graphs; a call that holds its launch hides short kernels
behind the host, and no such row is of 16 bits.

Shape legend: ``N`` rows of convolutions and their gradients.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.operators.operator_work import OperatorWork, out_size, widths
from foreplan.datasets.sweeps.operator_table import OperatorTable, includes_launch

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Seconds of a copy that moves next to nothing. Assumed.
_COPY_S = 1.2e-6
#: Share of the memory's bandwidth that a copy reaches. Assumed, as `memory_time`.
_REACHED = 0.85
#: Share of L2 up to which a tensor is found there by the kernel behind, and what of a copy's time
#: that leaves. Assumed.
_CACHED, _CACHED_TIME = 0.4, 0.6

#: Windows and the narrowest image of FP16 that torch trusts cuDNN's filters of a channel with, and
#: fewest channels (``check_cudnn_depthwise_workload_with_filter``).
_TRUSTED_WINDOWS, _TRUSTED_SIZE, _TRUSTED_CHANNELS = (1, 3, 5), 7, 32


def own_depthwise(table: OperatorTable) -> Mask:
    """Rows of one filter a channel that torch computes by its own kernel, not by cuDNN (N,)."""
    d = table.dims
    window, stride, size, batch, channels = (
        d[name] for name in ("window", "stride", "size", "b", "cin")
    )  # fmt: skip
    depthwise = (d["groups"] > 1) & (channels == d["groups"]) & (d["channels_last"] == 0)
    one_image = ((window == 1) & (size <= 28)) | (window > 1)
    wide = (channels >= 512) | ((channels >= 256) & (size >= 28))
    pointwise = (batch <= 16) & (channels >= 128) & (size <= 7)
    strided = np.where(batch == 1, one_image, np.where(window == 1, pointwise, wide))
    square = np.isin(window, _TRUSTED_WINDOWS) & (size >= _TRUSTED_SIZE)
    square &= (stride == 1) | ((stride == 2) & strided)
    # Along a line windows are 1 x n, and only those of stride 1 are trusted.
    trusted = np.where(d["line"] > 0, stride == 1, square) & (channels >= _TRUSTED_CHANNELS)
    half = np.isin(table.dtype, ("float16", "fp16", "half"))
    return np.asarray(depthwise & ~(half & trusted))


def as_it_lies(table: OperatorTable) -> Mask:
    """Rows of 16 bits that are a product of each plain image as it lies, without copies (N,)."""
    round_to = np.where(table.kind == "conv_weight_gradient", 64, 8)
    return np.asarray(_pointwise(table) & (_pixels(table) % round_to == 0))


def _pointwise(table: OperatorTable) -> Mask:
    """Plain images of 16 bits, each of whose pixels is one result (N,)."""
    d = table.dims
    one = (d["window"] == 1) & (d["stride"] == 1) & (d["padding"] == 0) & (d["groups"] <= 1)
    return np.asarray(one & (d["channels_last"] == 0) & (widths(table)[0] == 2))


def _pixels(table: OperatorTable) -> NDArray[np.int64]:
    d = table.dims
    return np.asarray((d["size"] ** (2 - d["line"])).astype(np.int64))


def beside_s(table: OperatorTable, work: OperatorWork, l2: Floats) -> Floats:
    """Seconds of the copies and sums that run beside the product itself (N,).

    Args:
        table: the rows (N,).
        work: of the rows.
        l2: bytes of the devices' L2 (N,), NaN where unknown.
    """
    d, (activation, weight) = table.dims, widths(table)
    rank, groups = 2 - d["line"], np.maximum(d["groups"], 1)
    images = d["b"] * d["cin"] * d["size"] ** rank * activation
    results = d["b"] * d["cout"] * out_size(d) ** rank * activation
    filters = d["cin"] / groups * d["cout"] * d["window"] ** rank * weight
    last = d["channels_last"] > 0

    def copy(moved: Floats) -> Floats:
        cached = np.where(moved < _CACHED * l2, _CACHED_TIME, 1.0)
        return np.asarray(_COPY_S + 2 * moved / (_REACHED * work.bandwidth) * cached)

    turned = (activation == 2) & ~last & ~own_depthwise(table) & ~as_it_lies(table)
    # One value a channel, or one channel a group, lies alike in both layouts.
    plain_filters = last & (d["window"] > 1) & (d["cin"] > groups)
    plain_filters &= table.kind != "conv_weight_gradient"
    seconds = np.where(turned, copy(images) + copy(results), 0.0)
    seconds += np.where(turned | plain_filters, copy(filters), 0.0)
    seconds += np.where(d["bias"] > 0, copy(results), 0.0)
    return np.where(_recorded(table), seconds, 0.0)


def kernel_columns(
    table: OperatorTable, work: OperatorWork, l2: Floats, structural_s: Floats
) -> dict[str, Floats]:
    """Features of what runs beside the product, NaN for libraries whose times hold a launch.

    Args:
        table: the rows (N,).
        work: of the rows.
        l2: as `beside_s` (N,).
        structural_s: of all of a row's kernels (N,).
    """
    recorded, beside = _recorded(table), beside_s(table, work, l2)
    d = table.dims
    groups = np.maximum(d["groups"], 1)
    channels = (d["cin"] / groups).astype(np.int64)
    equal = d["cin"] == d["cout"]
    grouped = (groups > 1) & (channels > 1) & (widths(table)[0] == 2)
    columns = {
        "own_depthwise": own_depthwise(table),
        "log_beside_us": np.log(np.where(beside > 0, beside, np.nan) * 1e6),
        "beside_share": beside / structural_s,
        "equal_groups": np.where(grouped, equal, np.nan),
        "power_groups": np.where(grouped, equal & (channels & (channels - 1) == 0), np.nan),
        "align_pixels": np.where(_pointwise(table), np.log2(np.gcd(_pixels(table), 64)), np.nan),
    }
    return {name: np.where(recorded, column, np.nan) for name, column in columns.items()}


def _recorded(table: OperatorTable) -> Mask:
    return np.array([not includes_launch(name) for name in table.library], dtype=np.bool_)
