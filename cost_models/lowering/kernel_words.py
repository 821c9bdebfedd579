"""`kernel_words`: what names of kernels say of how operands lie, and of which types they are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from types import MappingProxyType

from foreplan.cost_models.lowering.activated_product import GELU
from foreplan.cost_models.lowering.argument_words import CROWDED, argument_words
from foreplan.cost_models.lowering.attention_mask import AttentionMask
from foreplan.cost_models.lowering.attention_parts import dropout_word
from foreplan.cost_models.lowering.copy_layout import ACROSS, copy_words, map_words
from foreplan.cost_models.lowering.gradient_maps import SCANS
from foreplan.cost_models.lowering.graph_gradients import BIAS_FIRST
from foreplan.cost_models.lowering.graph_step import Phase
from foreplan.cost_models.lowering.map_kernel import TANH, is_map
from foreplan.datasets.graphs.operator_call import (
    ELEMENT_BYTES,
    OperatorCall,
    described_tensors,
    row_strides,
)
from foreplan.datasets.operators import OF_BATCH
from foreplan.datasets.program import CHANNELS_LAST, TRANSPOSED

#: What the name of a volume's convolution says, and elements from which on it is large.
LARGE, SMALL, LARGE_VOLUME = "_large", "_small", 20480
#: Products whose second operand lies along its columns, but where it is a transposed view.
_COLUMNS_FIRST = frozenset({"addmm", "mm", "matmul", "bmm", "baddbmm", "addbmm"})
#: Interpolations, which go by vectors where channels lie last.
_OF_IMAGES = ("upsample_nearest2d", "upsample_bilinear2d")
#: A processor's nearest cache.
_LINE_BYTES, _SETS, _WAYS = 64, 64, 12
#: What goes through one dimension or several, and the place of these among its arguments.
_THROUGH = MappingProxyType(
    dict.fromkeys(
        ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod",
         "var", "std", "var_mean", "std_mean", "logsumexp", "median", "nanmedian", "softmax",
         "_softmax", "log_softmax", "_log_softmax", *SCANS), 1,
    )
    | dict.fromkeys(("norm", "linalg_vector_norm", "topk", "kthvalue"), 2)
)  # fmt: skip


def kernel_words(calls: Iterable[OperatorCall], phase: Phase) -> dict[str, str]:
    """Words behind the names of operators' kernels, by the operator; none of plain operands.

    Args:
        calls: of a captured graph.
        phase: of the pass; what an attention adds has a gradient in a training step.
    """
    found: dict[str, str] = {}
    for call in calls:
        name = call.target.split(".")[1] if "." in call.target else call.target
        tensors = described_tensors(call.arguments)
        if call.operator and ("conv" in name or "pool" in name):
            shape, strides, _ = tensors[0]
            last = shape[1] > 1 and strides[1] == 1 < math.prod(shape[2:])
            found[call.operator] = CHANNELS_LAST * last
            if name == "conv3d":
                found[call.operator] += volume_word(call.arguments)
        elif call.operator and name.startswith(_OF_IMAGES):
            shape, strides, _ = tensors[0]
            last = len(shape) == 4 and shape[1] > 1 and strides[1] == 1 < math.prod(shape[2:])
            found[call.operator] = CHANNELS_LAST * last
        elif call.operator and (words := copy_words(name, call.arguments)):
            found[call.operator] = words
        elif call.operator and name == "batch_norm":
            found[call.operator] = batch_norm_words(call.arguments)
        elif call.operator and name in _THROUGH:
            lies = not (name in SCANS or "softmax" in name)  # which copy what lies otherwise
            words = through_words(call.arguments, _THROUGH[name], as_it_lies=lies)
            crowded = CROWDED * (name in SCANS and _crowds(call.arguments))
            found[call.operator] = crowded + words
        elif call.operator and name == "_addmm_activation":
            found[call.operator] = GELU * ('"use_gelu":true' in call.arguments)
        elif call.operator and name in _COLUMNS_FIRST:
            shape, strides, _ = tensors[2 if name in BIAS_FIRST else 1]
            if len(shape) > 1 and strides[-2] == 1 < strides[-1]:
                found[call.operator] = TRANSPOSED
        elif call.operator and name == "scaled_dot_product_attention":
            mask = AttentionMask.of_call(call, training=phase == "training")
            found[call.operator] = dropout_word(call.arguments) + (mask.word if mask else "")
        elif call.operator and is_map(name):
            inner = TANH * (name == "gelu" and '"tanh"' in call.arguments)
            inner += argument_words(name, call.arguments)
            shape = described_tensors(call.result)[0][0]
            found[call.operator] = inner + map_words(shape, call.arguments)
        elif call.operator and (words := argument_words(name, call.arguments)):
            found[call.operator] = words
    return found


def volume_word(arguments: str) -> str:
    """What the name of a volume's convolution says: whether torch gives its library so large ones.

    It does so on processors, one image at a time, by all extents but the last (``Convolution.cpp``,
    ``use_mkldnn``), and where windows are no lines along the first dimension, or take steps.

    Args:
        arguments: of the call, as `OperatorCall` has them.
    """
    (shape, _, _), (window, _, _), *_ = described_tensors(arguments)
    positional, named = json.loads(arguments)
    ways = [*positional[3:6], *named.values()]
    steps = any(size != 1 for way in ways[:1] for size in (way if isinstance(way, list) else [way]))
    whole = math.prod(shape[:-1]) > LARGE_VOLUME and (steps or math.prod(window[-2:]) > 1)
    return LARGE if whole else SMALL


def batch_norm_words(arguments: str) -> str:
    """What the name of a batch norm's kernel says of its images and statistics.

    Rows of features, and images of one pixel, are channels last to torch (``Normalization.cu``,
    ``batch_norm_use_channels_last_kernels``), whose kernels do not give a block to each channel.

    Args:
        arguments: of the call, as `OperatorCall` has them.
    """
    shape, strides, _ = described_tensors(arguments)[0]
    last = strides[1] == 1 < shape[1]
    # (input, weight, bias, mean, variance, training, ...), as torch.export leaves them.
    positional, named = json.loads(arguments)
    of_batch = positional[5] if len(positional) > 5 else named.get("training", False)
    return CHANNELS_LAST * last + OF_BATCH * bool(of_batch)


def through_words(arguments: str, place: int = 1, *, as_it_lies: bool = True) -> str:
    """What the name of a sum's, softmax's or scan's kernel says: no neighbours in memory meet.

    Args:
        arguments: of the call, as `OperatorCall` has them.
        place: of the dimensions that it goes through.
        as_it_lies: whether neighbours are those in memory, not those in the order of dimensions.
    """
    shape, strides, _ = described_tensors(arguments)[0]
    strides = strides if as_it_lies else row_strides(shape)
    dims = _through(arguments, place)
    extents = [at for at, size in enumerate(shape) if size > 1]
    if not dims or not extents or not dims & set(extents):
        return ""
    return ACROSS * (min(extents, key=lambda at: strides[at]) not in dims)


def scanned(arguments: str) -> int:
    """Elements that follow on each other in a scan or a softmax; 0 where no dimension is named.

    Args:
        arguments: of the call, as `OperatorCall` has them.
    """
    shape = described_tensors(arguments)[0][0]
    dims = _through(arguments, 1)
    return math.prod(shape[at] for at in dims) if dims else 0


def _crowds(arguments: str) -> bool:
    """Whether the lines that a scan steps on drive each other out of the nearest cache.

    Of 64 sets of 12 lines of 64 bytes (Zen 4 and 5, Intel's from Ice Lake on: 48 KiB) a step of
    ``n`` lines falls into ``64 / gcd(n, 64)``.
    """
    shape, _, dtype = described_tensors(arguments)[0]
    dims = _through(arguments, 1)
    if len(dims) != 1:
        return False
    (dim,) = dims
    lines, rest = divmod(math.prod(shape[dim + 1 :]) * ELEMENT_BYTES.get(dtype, 4), _LINE_BYTES)
    return not rest and lines > 0 and shape[dim] > _WAYS * _SETS // math.gcd(lines, _SETS)


def _through(arguments: str, place: int) -> set[int]:
    """Dimensions of the first operand that a call goes through, as far as it names them."""
    dimensions = len(described_tensors(arguments)[0][0])
    positional, named = json.loads(arguments)
    given = positional[place] if len(positional) > place else named.get("dim")
    listed = given if isinstance(given, list) else [given]
    # ``max`` of two tensors and ``std`` with a flag name none.
    named_ones = [at for at in listed if isinstance(at, int) and not isinstance(at, bool)]
    return {at % dimensions for at in named_ones} if dimensions else set()
