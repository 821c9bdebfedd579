"""`fused_layers`: torch's own transformer layers in a trace as inference runs them, by one call.

``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` (self-attention) hand a pass without
gradients to one operator that makes several others itself. Their ``forward`` decides that, by many
conditions (evaluation mode, batch first, even heads, equal epsilons, relu or gelu, biases, no
autocast, no hooks, ...); whether something traces it is one of them. Here that one is lifted, so
that torch's code asks the others of the module and of its inputs. `WRITTEN_OUT` says what such an
operator makes, as `expand_composites` takes it apart.

Padding is computed: torch leaves it out of an encoder with ``enable_nested_tensor`` that is given a
mask, but how much there is, values say.

Shape legend: ``B`` batch, ``T`` tokens, ``E`` width, ``H`` heads, ``D`` = E / H.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Kernels of fused attention on GPUs take heads of a multiple of this (``attention.cu``).
_HEAD_MULTIPLE = 8


@contextlib.contextmanager
def fused_layers(module: torch.nn.Module) -> Iterator[None]:
    """Let torch's transformer layers take their fast path for a while, in a trace and its parts.

    Args:
        module: what is traced.
    """
    import torch
    from torch._subclasses.fake_impls import op_implementations_dict
    from torch.nn.modules import activation
    from torch.utils import backend_registration

    fast = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    if not any(isinstance(each, fast) for each in module.modules()):
        yield  # nothing to let: what else traces, as torch.cond, may mind
        return
    encoders = [each for each in module.modules() if isinstance(each, torch.nn.TransformerEncoder)]
    nested = [each.use_nested_tensor for each in encoders]
    before: list[tuple[Any, str, Any]] = [
        (owner, name, getattr(owner, name))
        for owner, name in (
            # A trace stands as a mode in which tensors may be no plain ones.
            (torch.overrides, "has_torch_function"), (activation, "_is_make_fx_tracing"),
            # Devices that have the operators, by name: a module without data has no other.
            (backend_registration, "_privateuse1_backend_name"),
        )
    ]  # fmt: skip
    results = {
        torch.ops.aten._transformer_encoder_layer_fwd.default: _alike,
        torch.ops.aten._native_multi_head_attention.default: _attention_result,
        torch.ops.aten._masked_softmax.default: _alike,
    }
    known: Any = op_implementations_dict
    own = {operator: known[operator] for operator in results if operator in known}
    try:
        for each in encoders:
            each.use_nested_tensor = False
        for (owner, name, _), found in zip(before, (_never, _never, "meta"), strict=True):
            setattr(owner, name, found)
        known.update(results)
        yield
    finally:
        for operator in results:
            known.pop(operator, None)
        known.update(own)
        for owner, name, found in before:
            setattr(owner, name, found)
        for each, was in zip(encoders, nested, strict=True):
            each.use_nested_tensor = was


def _never(*_: object) -> bool:
    return False


def _alike(mode: Any, func: Any, source: torch.Tensor, *_: Any) -> torch.Tensor:
    with mode:
        return source.new_empty(source.shape)


def _attention_result(
    mode: Any, func: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    embed_dim: int, num_heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any,
    proj_bias: Any, mask: Any = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    batch, tokens, _ = query.shape
    heads = () if average_attn_weights else (num_heads,)
    with mode:
        shown = query.new_empty(batch, *heads, tokens, tokens) if need_weights else None
        return query.new_empty(query.shape), shown


# ------------------------------------------------------------------------------ what runs


def _encoder_layer(
    source: torch.Tensor, embed_dim: int, num_heads: int,
    qkv_weight: torch.Tensor, qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor, proj_bias: torch.Tensor,
    use_gelu: bool, norm_first: bool, eps: float,
    norm_weight_1: torch.Tensor, norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor, norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor, ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor, ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None, mask_type: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """As ``transformer_encoder_layer_forward`` (``transformer.cpp``), (B, T, E)."""
    import torch
    from torch.nn import functional as F

    def norm_1(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    read = norm_1(source) if norm_first else source
    attended, _ = _self_attention(
        read, read, read, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias,
        mask, False, True, mask_type,
    )  # fmt: skip
    x = attended.add_(source)
    if not norm_first:
        x = norm_1(x)
    rows = (norm_2(x) if norm_first else x).view(-1, embed_dim)
    wide = torch._addmm_activation(ffn_bias_1, rows, ffn_weight_1.t(), use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, wide, ffn_weight_2.t()).view(source.shape).add_(x)
    return x if norm_first else norm_2(x)


def _self_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, embed_dim: int, num_heads: int,
    qkv_weight: torch.Tensor, qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor, proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """As ``native_multi_head_attention`` (``attention.cpp``, ``attention.cu``), (B, T, E).

    With neither mask nor weights a GPU takes fused attention, which stands here for what a
    processor runs then, too (`attention_parts` says what of). What runs, not what comes out:
    queries are not scaled where attention is written out.
    """
    import torch
    from torch.nn import functional as F

    B, T, E = query.shape
    H, D = num_heads, embed_dim // num_heads
    packed = F.linear(query, qkv_weight, qkv_bias).view(B, T, 3, H, D)
    if mask is None and not need_weights and D % _HEAD_MULTIPLE == 0:
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        read = F.scaled_dot_product_attention(q, k, v)
        # Fused kernels leave tokens first; a trace without a device takes attention as written out.
        read = (read if read.is_contiguous() else read.transpose(1, 2)).reshape(B, T, E)
        return F.linear(read, proj_weight, proj_bias), None
    # One kernel lays heads out, adds the bias and scales queries; no work but the first of them.
    q, k, v = packed.permute(2, 0, 3, 1, 4).contiguous().view(3, B * H, T, D).unbind(0)
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, T, T)
    if mask is None:
        shares = torch.softmax(scores, -1)
    else:
        shares = torch._masked_softmax(scores, mask.to(torch.bool), 3, mask_type)
    read = torch.bmm(shares.view(B * H, T, T), v).view(B, H, T, D)
    read = read.transpose(1, 2).contiguous().view(B, T, E)
    shown = None
    if need_weights:
        shown = shares.mean(1) if average_attn_weights else shares
    return F.linear(read, proj_weight, proj_bias), shown


#: What torch's fused operators make, by their names.
WRITTEN_OUT: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "_native_multi_head_attention": _self_attention,
})  # fmt: skip
