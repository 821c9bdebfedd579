"""What an ATen operator is and how much it computes, by name. Imports no torch.

FLOP follow the convention of `foreplan.datasets.operators.OPERATORS`: a multiply-add is 2, a norm 5
and a smooth activation 6 per element, anything else element by element 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the traced graph.

    Attributes:
        shape: its extents.
        dtype: our name.
        bytes: of the distinct elements; an expanded dimension counts once.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @property
    def elements(self) -> int:
        """Number of elements, expanded ones included."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an ATen operator.

    Attributes:
        name: without namespace, overload and trailing underscore (``linear``).
        tensors: tensor arguments in order, repeated ones included.
        outputs: results.
        arguments: every argument by the schema's names; tensors are `TensorInfo`.
        tags: names of torch's tags (``pointwise``, ``reduction``).
    """

    name: str
    tensors: Sequence[TensorInfo]
    outputs: Sequence[TensorInfo]
    arguments: Mapping[str, Any]
    tags: frozenset[str]


_BIAS_FIRST = frozenset({"addmm", "baddbmm", "addbmm", "_addmm_activation"})


def _matmul(call: Call) -> float:
    # The operands are the last two tensors that are no bias: addmm(bias, a, b), mm(a, b).
    left = call.tensors[call.name in _BIAS_FIRST]
    return 2.0 * call.outputs[0].elements * left.shape[-1]


def _grouped(call: Call) -> float:
    """Each row is multiplied by the weight of its own group, of all that there are."""
    return 2.0 * call.outputs[0].elements * call.tensors[0].shape[-1]


def _convolution(call: Call) -> float:
    source, weight = call.tensors[0], call.tensors[1]
    transposed = "transpose" in call.name or bool(call.arguments.get("transposed", False))
    # [out, in / groups, kernel...], or [in, out / groups, kernel...] when transposed.
    work = math.prod(weight.shape[1:])
    return 2.0 * (source if transposed else call.outputs[0]).elements * work


def _attention(call: Call) -> float:
    query, key, value = call.tensors[:3]
    queries, keys = query.shape[-2], key.shape[-2]
    pairs = float(queries * keys)
    if call.arguments.get("is_causal", False):
        pairs -= min(queries, keys) * (min(queries, keys) - 1) / 2
    return 2.0 * math.prod(query.shape[:-2]) * pairs * (query.shape[-1] + value.shape[-1])


def _einsum(call: Call) -> float:
    terms = str(call.arguments["equation"]).replace(" ", "").split("->")[0].split(",")
    extents: dict[str, int] = {}
    for term, tensor in zip(terms, call.tensors, strict=True):
        before, dots, behind = term.partition("...")
        # Dimensions under an ellipsis have no letters; operands share them from the last one on.
        unnamed = len(tensor.shape) - len(before) - len(behind) if dots else 0
        names = [*before, *(f"...{at}" for at in reversed(range(unnamed))), *behind]
        for name, extent in zip(names, tensor.shape, strict=True):
            extents[name] = max(extent, extents.get(name, 1))  # an extent of 1 is broadcast
    return 2.0 * math.prod(extents.values())


def _per_output(weight: float) -> Callable[[Call], float]:
    return lambda call: weight * sum(output.elements for output in call.outputs[:1])


def _per_input(call: Call) -> float:
    return float(call.tensors[0].elements)


def _windows(call: Call) -> float:
    """Elements of the windows of all outputs; an adaptive pool's windows share out the input."""
    given = call.arguments.get("kernel_size")
    if given is None:
        return _per_input(call)
    sizes = [given] if isinstance(given, int) else list(given)
    # One size is that of each spatial dimension.
    spatial = int(call.name.partition("pool")[2][0])
    sizes = sizes * spatial if len(sizes) == 1 else sizes
    # A window as large as any image ends where the image does.
    image = call.tensors[0].shape[-spatial:]
    window = math.prod(min(size, extent) for size, extent in zip(sizes, image, strict=True))
    return float(call.outputs[0].elements * window)


def _bags(call: Call) -> float:
    table, indices = call.tensors[:2]
    return float(indices.elements * table.shape[-1])


def _recurrent(call: Call) -> float:
    """Each row of each step is multiplied by every weight once; states have three dimensions."""
    source = call.tensors[0]
    weights = sum(t.elements for t in call.tensors[1:] if len(t.shape) == 2)
    return 2.0 * source.elements / source.shape[-1] * weights


def _trilinear(call: Call) -> float:
    """Of `torch.nn.functional.bilinear`: rows, a matrix an output, rows."""
    first, weight = call.tensors[:2]
    rows = first.elements / first.shape[-1]
    return 2.0 * rows * weight.elements * (1 + 1 / weight.shape[-2])


def _transform(call: Call) -> float:
    """5 n log2 n of a complex Fourier transform, half of it where one side is real."""
    source, out = call.tensors[0], call.outputs[0]
    cols, rows, values, _ = fourier(call.name, source.shape, out.shape, call.arguments["dim"])
    return 2.5 * values * rows * cols * math.log2(max(2, cols))


def _pairs(call: Call) -> float:
    """A difference, a power and a sum of each element of each pair of rows."""
    return 3.0 * call.outputs[0].elements * call.tensors[0].shape[-1]


def _nothing(call: Call) -> float:
    return 0.0


#: Points of a Fourier transform that go over memory once: what shared memory holds (theory).
_POINTS_A_PASS = 4096


def fourier(
    name: str, source: Sequence[int], result: Sequence[int], dims: Sequence[int]
) -> tuple[int, int, int, int]:
    """Points, transforms, values of a point (two of a complex one) and passes over memory.

    Args:
        name: ``_fft_c2c``; ``_fft_r2c`` and ``_fft_c2r`` have one real side.
        source: shape of what is transformed.
        result: shape of what comes out.
        dims: along which dimensions.
    """
    whole = source if name == "_fft_r2c" else result  # the side that holds all points
    extents = [max(1, whole[dim]) for dim in dims]
    points = math.prod(extents)
    passes = sum(max(1, math.ceil(math.log(n, _POINTS_A_PASS) - 1e-9)) for n in extents)
    rows = max(1, math.prod(whole) // points)
    return points, rows, 2 if name == "_fft_c2c" else 1, max(1, passes)


_RULES: dict[str, tuple[str, Callable[[Call], float]]] = {}
for _kind, _flops, _names in (
    (
        "matmul",
        _matmul,
        "linear addmm mm bmm matmul baddbmm addbmm mv dot vdot _addmm_activation _int_mm "
        "_scaled_mm",
    ),
    ("matmul", _einsum, "einsum"),
    (
        "convolution",
        _convolution,
        "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    ("experts", _grouped, "_grouped_mm grouped_mm grouped_mm_fallback"),
    ("attention", _attention, "scaled_dot_product_attention"),
    ("recurrent", _recurrent, "lstm gru rnn_tanh rnn_relu"),
    ("bilinear", _trilinear, "_trilinear"),
    ("fft", _transform, "_fft_r2c _fft_c2c _fft_c2r"),
    (
        "norm",
        _per_output(5.0),
        "layer_norm native_layer_norm rms_norm group_norm native_group_norm batch_norm "
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
        "instance_norm",
    ),
    (
        "softmax",
        _per_output(5.0),
        "softmax _softmax log_softmax _log_softmax _safe_softmax _masked_softmax",
    ),
    (
        "activation",
        _per_output(6.0),
        "silu gelu sigmoid tanh mish softplus elu selu hardswish log_sigmoid exp erf glu",
    ),
    (
        "elementwise",
        _per_output(6.0),
        "affine_grid_generator linalg_cross polar renorm "
        "fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask",
    ),
    ("activation", _per_output(1.0), "relu relu6 leaky_relu hardtanh hardsigmoid prelu"),
    (
        "reduction",
        _per_input,
        "sum mean amax amin max min argmax argmin var std var_mean cumsum cumprod any all prod "
        "logsumexp norm linalg_vector_norm topk sort argsort diff median nanmedian kthvalue mode "
        "cummax cummin mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
        "binary_cross_entropy_with_logits nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward "
        "multi_margin_loss multilabel_margin_loss_forward soft_margin_loss logcumsumexp "
        "multinomial histc",
    ),
    ("reduction", _pairs, "_cdist_forward _pdist_forward"),
    (
        "pool",
        _windows,
        "max_pool1d max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d "
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d max_pool3d "
        "max_pool3d_with_indices adaptive_avg_pool3d fractional_max_pool2d",
    ),
    ("embedding", _nothing, "embedding"),
    ("embedding", _bags, "embedding_bag"),
    (
        "copy",
        _nothing,
        "cat stack clone copy to _to_copy contiguous reshape flatten index index_select gather "
        "pad constant_pad_nd roll flip repeat repeat_interleave tile index_put scatter "
        "slice_scatter select_scatter masked_select tril triu upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d pixel_shuffle pixel_unshuffle channel_shuffle "
        "native_channel_shuffle unfold im2col col2im meshgrid scatter_add scatter_reduce "
        "index_add index_copy index_fill masked_scatter take diag_embed complex block_diag "
        "max_unpool2d max_unpool3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d",
    ),
    (
        "create",
        _nothing,
        "arange zeros ones full empty zeros_like ones_like full_like empty_like new_ones new_zeros "
        "new_full new_empty scalar_tensor lift_fresh_copy eye linspace tril_indices rand randn "
        "randint randperm rand_like randn_like randint_like normal fill hann_window "
        "hamming_window blackman_window bartlett_window kaiser_window triu_indices "
        "logspace exponential uniform zero cauchy geometric log_normal",
    ),
    (
        "elementwise",
        _per_output(1.0),
        "and or xor one_hot floor_divide where masked_fill upsample_linear1d upsample_bilinear2d "
        "upsample_bicubic2d "
        "upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d "
        "grid_sampler_3d isin bucketize searchsorted bernoulli poisson",
    ),
    # Draws a number, compares it, and multiplies.
    ("elementwise", _per_output(3.0), "dropout"),
    # Two passes over the weight: its norms, and the weight scaled.
    ("elementwise", _per_output(3.0), "_weight_norm _weight_norm_interface"),
):
    for _name in _names.split():
        _RULES[_name] = (_kind, _flops)

#: Checks that leave no trace in the work.
IGNORED = frozenset(
    {
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range_for_size",
        "_linalg_check_errors",
    }
)


def rule(name: str, tags: Iterable[str]) -> tuple[str, Callable[[Call], float]] | None:
    """Kind of an operator and its FLOP, or ``None`` for one that nothing is known of.

    Args:
        name: as in `Call`.
        tags: as in `Call`.
    """
    found = _RULES.get(name)
    if found is None and "pointwise" in tags:
        return "elementwise", _per_output(1.0)
    if found is None and "reduction" in tags:
        return "reduction", _per_input
    return found


def classify(call: Call) -> tuple[str, float] | None:
    """Kind and FLOP of a call, or ``None`` for an operator that nothing is known of."""
    found = rule(call.name, call.tags)
    return found and (found[0], found[1](call))
