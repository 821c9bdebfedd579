"""What a processor takes for functions of elements and rows, beside moving their tensors.

Profiles time an addition and a GELU. torch computes other functions by polynomials of their own,
some in no vector at all; how quickly a core does that nobody publishes, and how quickly it issues a
call says it best (as of pools, see `pool_windows`).
"""

from __future__ import annotations

from types import MappingProxyType

from foreplan.cost_models.lowering.copy_layout import ZIPPED, plain_kernel
from foreplan.cost_models.rates.chosen_kernels import is_chosen
from foreplan.datasets.device import Device
from foreplan.datasets.program import CHANNELS_LAST, TRANSPOSED, Program

#: Elements in the time of a call, by kernel, beside an addition's bytes. Measured in fp32 on one
#: core of an EPYC (Zen 5, 1.0 us a call) for 8 drawn sizes up to 425,952 elements: 2.0 ns an
#: element of a hyperbolic tangent, 0.9-1.0 of sine, cosine and error function, 0.5 of an
#: exponential, 0.1 of a sigmoid or SiLU, whose gradient takes 0.2
#: (``tests/benchmarks/likeness_figures.py``). The second part likewise, for three sizes
#: (``tests/benchmarks/function_figures.py``): torch computes them by scalars, or row by row. Masks
#: are taken to lie in runs, as causal ones and padding do (drawn ones take 6 to 10 times as long).
#: Powers of 2, 3 and -1 take what an addition takes; a multinomial draws once from each row; a
#: search goes through 30 boundaries; an index is along the last dimension: what else a call may ask
#: for stands in `chosen_kernels`. A dropout is of a tenth or a fifth (4.3-6 ns; 7.1 of 0.3). The
#: gradient of an adaptive mean is of windows of 4 x 4 (2 ns of 2 x 2, 0.25 of 9 x 9). It, searches
#: and gradients of gathers were timed likewise, by hand; products with masks and gradients of means
#: of rows by ``tests/benchmarks/processor_functions.py``. Bessel functions, draws of other
#: distributions, modes and the like by ``function_figures.py --only`` on 2026-11-30: arguments
#: between 0.1 and 0.9, rows of 320 to 758 drawn numbers for a mode, which sorts them.
_IN_A_CALL = MappingProxyType(
    {"tanh": 500, "sin": 1000, "cos": 1000, "erf": 1100, "exp": 2000, "sigmoid": 6000,
     "silu": 6000, "silu_backward": 5000, "softmax": 2200}
    | {"elu": 1350, "selu": 1350, "celu": 1350, "mish": 350, "softplus": 1050,
       "log_sigmoid": 1050, "gelu_tanh": 1100, "atan": 510, "tan": 900, "sinh": 1350,
       "cosh": 1400, "asinh": 60, "erfc": 780, "expm1": 1650, "sqrt": 3600, "rsqrt": 6000,
       "log": 1450, "log2": 1400, "log10": 1300, "log1p": 2500, "acos": 870, "asin": 880,
       "atanh": 1400, "erfinv": 720, "lgamma": 260, "digamma": 125, "logit": 1350,
       "atan2": 1250, "remainder": 1100, "fmod": 1400, "hypot": 1800, "logaddexp": 1000,
       "isnan": 2500, "glu": 4500, "tril": 7000, "triu": 7000, "where": 3100,
       "masked_fill": 1900, "rand_like": 550, "randn_like": 440, "bernoulli": 105,
       "im2col": 1200, "grid_sampler_2d": 950, "log_softmax": 3500, "_log_softmax": 3500,
       "log_softmax_backward": 7700}
    | {"std": 230, "var": 230, "std_mean": 230, "var_mean": 230, "median": 100,
       "logsumexp": 1250, "cumsum": 1550, "cumprod": 1650, "logcumsumexp": 44, "topk": 1200,
       "kthvalue": 125, "histc": 290, "pixel_shuffle": 830, "pixel_unshuffle": 1200,
       "cummax": 2080, "cummin": 2080, "sort": 270, "argsort": 290, "instance_norm": 1050}
    | {"exponential": 70, "uniform": 550, "rand": 550, "normal": 440, "randn": 440, "randint": 790,
       "randint_like": 640, "randperm": 360, "multinomial": 67, "dropout": 180}
    | {"floor_divide": 790, "isfinite": 1120, "isinf": 2600, "sinc": 134, "xlogy": 540, "i0": 44,
       "polygamma": 106, "bucketize": 45, "searchsorted": 45, "take": 1370, "gather": 5000,
       "fake_quantize_per_tensor_affine_cachemask": 366,
       "fake_quantize_per_channel_affine_cachemask": 300, "affine_grid_generator": 310}
    | {"binary_cross_entropy": 90, "binary_cross_entropy_with_logits": 920, "kl_div": 500,
       "soft_margin_loss": 1010, "multi_margin_loss": 465}
    | {"upsample_nearest1d": 4700, "upsample_nearest2d": 4000, "_upsample_nearest_exact2d": 4000,
       "upsample_nearest3d": 2250, "upsample_linear1d": 1700, "upsample_trilinear3d": 290,
       "upsample_bilinear2d": 900, "upsample_bilinear2d_backward": 385,
       "upsample_bicubic2d": 172, "upsample_bicubic2d_backward": 67,
       "grid_sampler_2d_backward": 245, "adaptive_avg_pool2d_backward": 1500}
    | {"mul_by_mask": 2750, "mean_backward_by_row": 4500}
    | {"heaviside": 257, "poisson": 58, "cauchy": 52, "geometric": 91,
       "log_normal": 41, "mode": 30, "nanmedian": 93, "masked_scatter": 2350, "igamma": 31,
       "igammac": 21}
    | {f"special_{name}": elements for name, elements in {
        "bessel_j0": 485, "bessel_j1": 482, "bessel_y0": 194, "bessel_y1": 180,
        "modified_bessel_i0": 48, "modified_bessel_i1": 48, "modified_bessel_k0": 33,
        "modified_bessel_k1": 39, "spherical_bessel_j0": 140, "airy_ai": 44, "i0e": 55, "i1": 114,
        "i1e": 594, "ndtri": 240, "log_ndtr": 71, "erfcx": 62, "entr": 593, "zeta": 8,
      }.items()}
    | dict.fromkeys(("eq", "ne", "gt", "ge", "lt", "le"), 5000)
)  # fmt: skip
#: Likewise where there are several rows; over all elements at once they are quick.
_OF_ROWS = MappingProxyType({"any": 3500, "all": 3500})
#: Likewise of two tensors, where a plain number may be a whole power.
_OF_TWO = MappingProxyType({"pow": 680})
#: Likewise into images of at most so many elements to a side (4,096 in all), where torch goes
#: another way: 1.0-2.7 ns an element, in larger ones 0.17-0.27 (ten sizes); and along rows of at
#: most as many, whose sums do not wait for each other.
_SMALL_SIDE, _OF_SMALL = 64, MappingProxyType({
    "upsample_nearest2d": 700, "_upsample_nearest_exact2d": 700, "cumsum": 2600, "cumprod": 3000,
})  # fmt: skip
#: Likewise of images whose channels lie last, which fill vectors
#: (``tests/benchmarks/processor_functions.py``): 0.12 ns an element of two lines, 0.28 back.
_OF_LAST = MappingProxyType({
    "upsample_nearest2d": 20000, "upsample_bilinear2d": 8000, "upsample_bilinear2d_backward": 3500,
    "adaptive_avg_pool2d_backward": 10000,
})  # fmt: skip
#: Likewise where neighbours of a copy are none in what is copied.
_TURNED = 3200
_COPIES = frozenset({"contiguous", "clone", "reshape"})
#: Likewise where parts take turns, element by element.
_ZIPPED = 850
#: Likewise of what rows are written by an index, beside its bytes (sums 0.08-0.24 ns by the sizes).
_WRITTEN = MappingProxyType({
    "index_add": 7500, "scatter_add": 7500, "scatter_reduce": 6000, "index_put": 2600,
    "scatter": 870, "scatter_value": 430, "gather_backward": 6500,
})  # fmt: skip
#: Likewise of all that is read: columns of windows that are added up, pixels that are weighted.
_READ = MappingProxyType({
    "col2im": 1750, "_upsample_bilinear2d_aa": 750, "_upsample_bicubic2d_aa": 500,
})  # fmt: skip
#: Results in the time of a call, which take theirs beside the values that they are chosen from: 90
#: ns each (6 of 64, 50 of 32,000 and 8 of 512 values, within a tenth), where there are as many
#: values to a result; of fewer 7 ns a value.
_RESULTS_IN_A_CALL, _VALUES = MappingProxyType({"topk": 11}), 13
#: How many times as long doubles take (1.7-2.1 of hyperbolic tangents and exponentials).
_OF_DOUBLES = 1.9
#: Operators that compute functions of elements.
_OPS = frozenset({"elementwise", "softmax", "reduction", "dropout", "norm"})


def function_s(program: Program, device: Device, launch_s: float) -> float:
    """Seconds that go into the function of a map or a reduction; 0 of other work and devices.

    Args:
        program: what is asked for.
        device: its cores share the elements out.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or program.op not in _OPS or is_chosen(program):
        return 0.0
    name = plain_kernel(program.variant.kernel).removeprefix("torch.").removesuffix("_")
    rows, cols = program.dims["rows"], program.dims["cols"]
    count, elements = rows * cols, _IN_A_CALL.get(name)
    if cols <= _SMALL_SIDE:
        elements = _OF_SMALL.get(name, elements)
    inputs = program.dims.get("inputs", 1)
    if elements is None and rows > 1:
        elements = _OF_ROWS.get(name)
    if elements is None and inputs > 1:
        elements = _OF_TWO.get(name)
    if name in _COPIES and any(w in program.variant.kernel for w in (TRANSPOSED, CHANNELS_LAST)):
        elements = _TURNED
    if CHANNELS_LAST in program.variant.kernel:
        elements = _OF_LAST.get(name, elements)
    if ZIPPED in program.variant.kernel:
        elements = _ZIPPED
    if name in _WRITTEN:  # one operand is as large as the result, the others are written to it
        count, elements = count * max(1, inputs - 1), _WRITTEN[name]
    if name in _READ:
        count, elements = count * inputs, _READ[name]
    if elements is None:
        return 0.0
    calls = count / elements
    if name in _RESULTS_IN_A_CALL:
        calls += rows * min(1.0, cols / _VALUES) / _RESULTS_IN_A_CALL[name]
    wide = _OF_DOUBLES if program.variant.compute == "fp64" else 1.0
    return launch_s * wide * calls / (device.units or 1)
