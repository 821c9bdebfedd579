"""The kernel registry: every function that a profile measures and the runtime executes.

A `Variant` names a kernel; the profile times the function found here under that name and the
runtime calls the same function, so that what was measured is what runs. This module knows the
names without importing torch; the functions are imported when one is looked up.

Conventions shared by all kernels: activations between operators are bf16 ``[rows, features]``; a
kernel that computes in another dtype casts inside, and its time includes the casts. Shape legend:
B = batch, T = tokens of a call, N = output features, K = input features, H = heads, G = key/value
heads, L = positions of the cache, D = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from foreplan.datasets.device import Device
from foreplan.datasets.experts import EXPERT_OPERATORS
from foreplan.datasets.kernels.row_shapes import BLOCK_ROWS, takes_blocks
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

#: Device kinds that kernels exist for.
DEVICE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Packed:
    """One weight in a layout, ready for every kernel of that layout.

    Packed bytes are private to the process that packed them (int4 differs by instruction set), so
    they are never stored or sent: a rank packs from the plain weight.

    Attributes:
        layout: name of the layout.
        n: output features.
        k: input features.
        tensors: the bytes, by role (``weight``, ``scale``, ``zero``).
    """

    layout: str
    n: int
    k: int
    tensors: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        """Memory that the weight takes."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def to(self, device: str) -> Packed:
        """The same weight on another torch device."""
        return replace(self, tensors={name: t.to(device) for name, t in self.tensors.items()})


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """One way to compute ``x @ W.T + bias``.

    Attributes:
        variant: storage, compute dtype and kernel name.
        layout: how the weight is packed. Kernels of one layout share one `Packed` weight, so
            prefill and decode may use different kernels on one copy.
        pack: from an fp32 weight ``[N, K]`` to its packed form on the same torch device.
        run: from bf16 ``x[rows, K]``, the packed weight and a bf16 bias ``[N]`` or ``None`` to
            bf16 ``[rows, N]``.
        dequantise: from the packed form to the fp32 weight ``[N, K]`` it stands for.
    """

    variant: Variant
    layout: str
    pack: Callable[[Tensor], Packed]
    run: Callable[[Tensor, Packed, Tensor | None], Tensor]
    dequantise: Callable[[Packed], Tensor]


class _Row(NamedTuple):
    """What is known of a linear kernel without torch."""

    text: str
    layout: str
    kinds: tuple[str, ...]
    n_multiple: int = 1
    k_multiple: int = 1


#: Rows of one call of the fused CUDA kernels, and, on GPUs without blocks for tens of rows, most
#: rows for which several calls of them are faster than unpacking (``measured``, kernels.md: 27-36
#: us a call against 120 us at 8192 x 8192).
ROWS_A_CALL, FEW_ROWS = 32, 96
#: Rows for which torch's packed kernels expand a weight once, and what that takes, in rows.
_PACKED_ROWS, _EXPANDING_ROWS = 4, 3

#: Queries whose scores attention computes at a time where no fused kernel does, by device kind.
#: ``measured`` on a processor (one core of an EPYC, 1024 tokens, 8 over 4 heads of 256, bf16): 27,
#: 43, 58 and 88 ms by blocks of 128, 256, 512 and 1024, whose scores leave the caches. A GPU needs
#: large ones.
SCORED_ROWS: Mapping[str, int] = MappingProxyType({"cpu": 128, "cuda": 512})

#: Compute capability from which on a GPU has the fused kernels' ``mma.m16n8k16`` of bf16
#: (``theory``, PTX ISA 7.0).
_FUSED_FROM = 8.0

_BOTH = ("cpu", "cuda")
_LINEAR_ROWS = (
    _Row("bf16/bf16/torch.linear", "bf16", _BOTH),
    _Row("bf16/fp32/torch.upcast_linear", "bf16", ("cpu",)),
    _Row("fp32/fp32/torch.linear", "fp32", _BOTH),
    _Row("fp32/tf32/torch.linear", "fp32", ("cuda",)),
    _Row("fp8/fp8/torch.scaled_mm", "fp8.rows", ("cuda",), 16, 16),
    # Reads past the end of a row (and crashes) where K is no multiple of its vector.
    _Row("int8/bf16/torch.int8pack_mm", "int8.rows", ("cpu",), 1, 16),
    _Row("int8/bf16/torch.dequant_linear", "int8.rows", _BOTH),
    _Row("int8/fp32/torch.dequant_linear", "int8.rows", ("cpu",)),
    # torch._int_mm returns unset memory for some tiny shapes (1 x 1).
    _Row("int8/int8/torch.int_mm", "int8.rows", ("cpu",), 8, 8),
    _Row("int4/bf16/torch.int4pack_mm", "int4.pack", ("cpu",), 16, 64),
    _Row("int4/bf16/torch.unpack_linear", "int4.pack", ("cpu",), 16, 64),
    _Row("int4/fp32/torch.unpack_linear", "int4.pack", ("cpu",), 16, 64),
    _Row("int4/bf16/torch.dequant_linear", "int4.nibbles", _BOTH),
    _Row("int4/fp32/torch.dequant_linear", "int4.nibbles", ("cpu",)),
    _Row("int8/bf16/foreplan.fragment_linear", "int8.fragments", ("cuda",), 16, 64),
    _Row("int4/bf16/foreplan.fragment_linear", "int4.fragments", ("cuda",), 16, 64),
    _Row("int3/bf16/torch.dequant_linear", "int3.words", _BOTH),
    _Row("int3/fp32/torch.dequant_linear", "int3.words", ("cpu",)),
)
_LINEAR = {Variant.parse(row.text): row for row in _LINEAR_ROWS}

#: Variants of the operators without weights; the same functions run on every device kind.
_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "norm": ("bf16/bf16/torch.rms_norm", "bf16/bf16/torch.layer_norm"),
    "rope": ("bf16/bf16/torch.rope",),
    "cache_write": ("bf16/bf16/torch.copy", "int8/bf16/torch.quantise_copy"),
    "attention": (
        "bf16/bf16/torch.sdpa",
        "bf16/fp32/torch.sdpa",
        "int8/bf16/torch.dequant_sdpa",
        "int8/fp32/torch.dequant_sdpa",
    ),
    # With a learned score a head in its softmax, and with scores that are capped.
    **{
        op: (
            f"bf16/bf16/torch.{kernel}",
            f"bf16/fp32/torch.{kernel}",
            f"int8/bf16/torch.dequant_{kernel}",
            f"int8/fp32/torch.dequant_{kernel}",
        )
        for op, kernel in (("sink_attention", "sink_sdpa"), ("capped_attention", "capped_bmm"))
    },
    "activation": (
        "bf16/bf16/torch.silu_mul",
        "bf16/bf16/torch.clamped_silu_mul",
        "bf16/bf16/torch.gelu_tanh_mul",
        "bf16/bf16/torch.gelu_tanh",
        "bf16/bf16/torch.gelu",
        "bf16/bf16/torch.relu",
    ),
    "add": ("bf16/bf16/torch.add",),
    "embedding": ("bf16/bf16/torch.embedding",),
    "argmax": ("bf16/bf16/torch.argmax",),
    "cast": ("bf16/fp32/torch.to", "fp32/bf16/torch.to"),
    "router": (
        "bf16/bf16/torch.topk",
        "bf16/bf16/torch.sigmoid_topk",
        "bf16/bf16/torch.grouped_topk",
        "bf16/bf16/torch.sigmoid_grouped_topk",
    ),
    "shared_gate": ("bf16/bf16/torch.sigmoid_mul",),
    # Of attention over latents; `latent_programs` says which product is which.
    "matmul": (
        "bf16/bf16/torch.linear",
        "bf16/bf16/torch.bmm",
        "bf16/bf16/torch.bmm_transposed",
    ),
    "expand_heads": ("bf16/bf16/torch.expand_heads",),
    "latent_attention": (
        "bf16/bf16/torch.latent_bmm",
        "bf16/bf16/torch.latent_sdpa",
        "bf16/fp32/torch.latent_sdpa",
    ),
}


def kernels_for(
    op: str, device_kind: str, *, n: int | None = None, k: int | None = None
) -> list[Variant]:
    """Variants that compute ``op`` on a kind of device, in a fixed order.

    Args:
        op: operator name, as in `foreplan.datasets.operators.OPERATORS`; ``experts`` have the
            kernels of ``linear``.
        device_kind: ``cpu`` or ``cuda``.
        n: for ``linear``: keep only kernels that take this number of output features.
        k: for ``linear``: likewise for input features.

    Raises:
        SpecError: unknown operator or device kind.
    """
    if device_kind not in DEVICE_KINDS:
        raise SpecError("device kind", got=device_kind, expected=f"one of {list(DEVICE_KINDS)}")
    if op == "linear" or op in EXPERT_OPERATORS:
        return [
            variant
            for variant, row in _LINEAR.items()
            if device_kind in row.kinds
            and (n or 0) % row.n_multiple == 0
            and (k or 0) % row.k_multiple == 0
        ]
    return [Variant.parse(text) for text in _function_names(op)]


def layout_of(variant: Variant) -> str:
    """Name of the weight layout that a linear variant works on.

    Two variants with one layout can share one copy of a weight.

    Raises:
        SpecError: no such linear kernel.
    """
    return _linear_row(variant).layout


def quantises_activations(variant: Variant) -> bool:
    """Whether a linear variant rounds its input to 8 bits too, which weight-only ones do not."""
    return variant.compute in ("int8", "fp8")


def writes_weight(rows: int, compute_capability: str | None = None) -> bool:
    """Whether the fused kernel of a weight writes it out in bf16 and multiplies that.

    Args:
        rows: of the input.
        compute_capability: of the GPU, ``None`` = unknown, as of one without blocks of rows.
    """
    return rows > FEW_ROWS and not takes_blocks(rows, compute_capability)


def computed_rows(variant: Variant, rows: int, compute_capability: str | None = None) -> int:
    """Rows in whose number a linear kernel's time has no steps.

    The fused kernels take tiles of 8 rows, 1, 2 or 4 at a time, in calls of at most 32 rows, or
    blocks of 64 (see `_fragment_linear`): what lies between costs the same. torch's packed kernels
    for processors read and expand the weight once for every four rows (``BLOCK_M`` of
    ``int8mm_kernel.cpp`` and ``int4mm_kernel.cpp``), which takes as long as three more rows: int4
    of 1 to 9 rows 27.6 to 28.5 us a unit so counted (docs/results/serving_cpu_history.md). Of other
    kernels nothing is known.

    Args:
        variant: of the kernel.
        rows: of the input.
        compute_capability: of a GPU, ``None`` = unknown.
    """
    if variant.kernel in ("torch.int8pack_mm", "torch.int4pack_mm"):
        return rows + _EXPANDING_ROWS * -(-rows // _PACKED_ROWS)
    if variant.kernel != "foreplan.fragment_linear":
        return rows
    if rows > ROWS_A_CALL and takes_blocks(rows, compute_capability):
        return -(-rows // BLOCK_ROWS) * BLOCK_ROWS
    if rows > FEW_ROWS:
        return rows
    calls, rest = divmod(rows, ROWS_A_CALL)
    return calls * ROWS_A_CALL + next(size for size in (0, 8, 16, ROWS_A_CALL) if rest <= size)


def runs_on(variant: Variant, device: Device) -> bool:
    """Whether a GPU has the instructions that a kernel is written in, as far as that is known.

    Args:
        variant: of a kernel that GPUs take.
        device: figures of a GPU.
    """
    if variant.kernel != "foreplan.fragment_linear":
        return True
    if device.kind != "cuda":
        return False
    return device.compute_capability is None or float(device.compute_capability) >= _FUSED_FROM


def linear_kernel(variant: Variant, device_kind: str) -> LinearKernel:
    """Look up a linear kernel; imports torch.

    Raises:
        SpecError: no such kernel, or not on this kind of device.
    """
    row = _linear_row(variant)
    if device_kind not in row.kinds:
        raise SpecError(f"kernel {variant}", got=device_kind, expected=f"one of {list(row.kinds)}")
    from foreplan.datasets.kernels import _kernels_cpu, _kernels_cuda
    from foreplan.datasets.kernels._kernel_layouts import LAYOUTS

    layout = LAYOUTS[row.layout]
    run = (_kernels_cpu if device_kind == "cpu" else _kernels_cuda).RUN[variant]
    return LinearKernel(variant, row.layout, layout.pack, run, layout.dequantise)


def function(op: str, variant: Variant) -> Callable[..., Any]:
    """Look up the function of an operator without weights; imports torch.

    Signatures (all tensors bf16 unless said; a fp32 tensor in gives fp32 out, which reference runs
    use):

    - norm: ``f(x[rows, cols], weight[cols], bias[cols] | None, eps) -> [rows, cols]``
    - rope: ``f(x[rows, H, D], cos[rows, D], sin[rows, D]) -> [rows, H, D]``
    - cache_write: ``f(cache_k[B, G, L, D], cache_v, k[B, T, G, D], v, position) -> None``
    - attention: ``f(q[B, T, H, D], cache_k[B, G, L, D], cache_v, keys[, window]) -> [B, T, H, D]``;
      causal, the last query sees all of the first ``keys`` positions; of fewer queries than keys
      each sees its last ``window`` at most
    - sink_attention, capped_attention: as attention, with ``sinks[H]`` fp32 or ``cap``, a number,
      by name
    - caches of ``int8`` storage are a `foreplan.datasets.kernels.quantised_cache.QuantisedCache`
      each
    - activation: ``f(x[rows, cols])``, or ``f(gate, up)`` where the kernel's name ends in ``_mul``
    - add: ``f(a, b)``; embedding: ``f(table[vocab, cols], ids[rows] int64)``; argmax:
      ``f(logits[rows, cols]) -> [rows] int64``; cast: ``f(x)`` to the variant's compute dtype
    - router: ``f(x[rows, hidden], weight[experts, hidden], active, normalise, correction[experts]
      fp32 | None, groups, kept groups, bias[experts] | None) -> (chosen[rows, active] int64,
      share[rows, active] fp32)``;
      ``sigmoid`` kernels have a correction, ``grouped`` ones keep fewer groups than there are
    - shared_gate: ``f(x[rows, hidden], y[rows, hidden], weight[1, hidden])``, which is ``x *
      sigmoid(y @ weight.T)``
    - matmul: ``f(x[batch, m, k], weight[batch, k, n]) -> [batch, m, n]``; the weight of ``linear``
      and ``transposed`` kernels is ``[batch, n, k]``
    - expand_heads: ``f(q[B, T, H, P + E], turned_q[B, T, H, E], turned_key[B, T, 1, E], wide[B, T,
      H, P + V]) -> (q, k[B, H, T, P + E], v[B, H, T, P + E])``, with the turned features in the
      given ``q`` and zeros behind values
    - latent_attention: ``f(q[H, B, R], turned_q[B, 1, H, E], cache[B, 1, L, R + E], keys, scale) ->
      [H, B, R]``; one query a head and sequence

    The experts of a layer are computed with a linear's kernel; see `expert_kernels`.

    Raises:
        SpecError: no such operator or kernel.
    """
    names = _function_names(op)
    if str(variant) not in names:
        raise SpecError(f"kernel of {op}", got=str(variant), expected=f"one of {list(names)}")
    from foreplan.datasets.kernels._kernel_functions import FUNCTIONS

    return FUNCTIONS[op, variant]


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Linear in fp32 on a dequantised weight; what every kernel of the weight is compared to.

    Args:
        x: ``[rows, K]``, any float dtype.
        weight: fp32 ``[N, K]``, from `LinearKernel.dequantise`.
        bias: ``[N]`` or ``None``.

    Returns:
        ``[rows, N]`` in the dtype of ``x``.
    """
    from torch.nn import functional as F

    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def _linear_row(variant: Variant) -> _Row:
    row = _LINEAR.get(variant)
    if row is None:
        known = sorted(str(v) for v in _LINEAR)
        raise SpecError("linear kernel", got=str(variant), expected=f"one of {known}")
    return row


def _function_names(op: str) -> tuple[str, ...]:
    if op not in _FUNCTIONS:
        known = ["linear", *_FUNCTIONS]
        raise SpecError("operator", got=op, expected=f"one of {known}")
    return _FUNCTIONS[op]
