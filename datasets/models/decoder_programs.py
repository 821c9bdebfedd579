"""The tensor programs that a decoder runs: what is profiled, priced and executed for a pass.

A *pass* takes ``queries`` new tokens of each of ``batch`` sequences through a layer, with ``keys``
positions in the cache afterwards: ``queries = keys = prompt`` for prefill, ``queries = 1`` for
decode. `foreplan.planner.verify.decoder` executes exactly these programs, in this order; a test
compares the two call by call.

One layer, with ``rows = batch * queries``::

    norm -> linear qkv -> [norm q, norm k] -> rope -> cache_write -> attention -> linear out -> add
         -> norm -> linear up (with gate) -> activation -> linear down -> add

Norms behind attention and MLP come before each ``add``, instead of or beside those in front. Where
the MLP takes the layer's input (``parallel``) it is the same list.

In a layer of experts the MLP's line is::

         -> norm -> router -> experts -> [linear shared_up -> activation -> linear shared_down
         -> [shared_gate] -> add] -> add

Attention is the operator that `latent_programs.attention_call` names. Within a sliding window it is
several programs of that name (`attention_window.spans`); latents have programs of their own instead
of qkv and attention, see `latent_programs`.

Linears are fused: one for query, key and value, one for gate and up. All linears of a layer have
the layer's precision, those of its experts too (one program, ``experts``, with the variant of the
linears); a router keeps bf16. The rotation takes queries and keys in one call, unless they are
normalised one by one before (Qwen3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from foreplan.datasets.experts import EXPERT_OPERATORS, LayerClass
from foreplan.datasets.models.attention_window import spans
from foreplan.datasets.models.latent_programs import (
    attention_call,
    count_attention,
    count_before,
)
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import SpecError

#: Names the variant of an operator that has a choice (``linear`` and each kind of attention) from
#: its dimensions; supplied by whoever plans.
Choose = Callable[[str, Mapping[str, int]], Variant]

#: Programs and how often each runs.
Counts = list[tuple[Program, int]]

_NORM = {"rms": "torch.rms_norm", "layer": "torch.layer_norm"}
_GATED = {
    "silu": "torch.silu_mul",
    "gelu_tanh": "torch.gelu_tanh_mul",
    "clamped_silu": "torch.clamped_silu_mul",
}
_ACTIVATION = {
    "gelu": "torch.gelu",
    "gelu_tanh": "torch.gelu_tanh",
    "relu": "torch.relu",
}
_FIXED = {
    "rope": "torch.rope",
    "cache_write": "torch.copy",
    "add": "torch.add",
    "embedding": "torch.embedding",
    "argmax": "torch.argmax",
    "shared_gate": "torch.sigmoid_mul",
}


def fixed_variant(model: Model, op: str) -> Variant:
    """The one variant of an operator that leaves no choice, as the model determines it.

    Raises:
        SpecError: the operator has a choice, or is not part of a decoder.
    """
    if op == "norm":
        kernel = _NORM[model.norm]
    elif op == "activation":
        kernel = (_GATED if model.gated else _ACTIVATION)[model.activation]
    elif op == "router" and model.experts is not None:
        routing = model.experts.routing
        words = "sigmoid_" * routing.corrected, "grouped_" * routing.grouped
        kernel = f"torch.{''.join(words)}topk"
    elif op in _FIXED:
        kernel = _FIXED[op]
    else:
        raise SpecError(
            "operator", got=op, expected=f"norm, activation, router or one of {list(_FIXED)}"
        )
    return Variant("bf16", "bf16", kernel)


#: How new keys and values get into a cache, by the storage that attention reads; else copied.
_CACHE_WRITE = {"int8": Variant("int8", "bf16", "torch.quantise_copy")}


def cache_write_variant(model: Model, attention: Variant) -> Variant:
    """The variant that writes the cache which ``attention`` reads."""
    return _CACHE_WRITE.get(attention.storage) or fixed_variant(model, "cache_write")


#: Norms over single heads of queries and keys, and of latents, are always RMS norms.
HEAD_NORM = Variant("bf16", "bf16", "torch.rms_norm")


class _Counter:
    """Collects programs in the order they first run."""

    def __init__(self, model: Model, choose: Choose | None = None) -> None:
        self.model = model
        self.choose = choose
        self.counts: dict[Program, int] = {}

    def add(self, op: str, /, **dims: int) -> None:
        """Count one call; the variant is chosen where the operator has a choice."""
        if self.choose is not None and op == "linear":
            self.add_as(op, self.choose(op, dims), **dims)
        elif self.choose is not None and op in EXPERT_OPERATORS:
            self.add_as(op, self.choose("linear", dims), **dims)
        else:
            self.add_as(op, fixed_variant(self.model, op), **dims)

    def add_as(self, op: str, variant: Variant, /, **dims: int) -> None:
        """Count one call of a given variant."""
        made = program(op, variant, **dims)
        self.counts[made] = self.counts.get(made, 0) + 1

    def result(self) -> Counts:
        return list(self.counts.items())


def layer_programs(
    model: Model, batch: int, queries: int, keys: int, choose: Choose,
    layer_class: LayerClass | None = None, window: int | None = None,
) -> Counts:  # fmt: skip
    """What one decoder layer runs for a pass.

    Args:
        model: the model.
        batch: sequences.
        queries: new tokens of each sequence.
        keys: positions in the cache after the pass, the new ones included.
        choose: variant of each linear and of the attention; asked for experts with the dimensions
            of their program.
        layer_class: of the layer; ``None`` where the model has only one.
        window: keys that a query sees at most; ``None`` = all.

    Raises:
        SpecError: a size below 1, fewer keys than queries, or no class for a model of both.
    """
    layer_class = layer_class or only_class(model)
    if keys < queries:
        raise SpecError("pass.keys", got=keys, expected=f"at least the {queries} queries")
    rows = batch * queries
    linears = {s.name: {"n": s.n, "k": s.k} for s in model.linears_of(layer_class)}
    run = _Counter(model, choose)
    wide = {"rows": rows, "cols": model.hidden}
    if model.norms_before:
        run.add("norm", **wide)
    if model.latent is not None:
        count_before(run, model, model.latent, HEAD_NORM, rows, linears)
    else:
        _project(run, rows, linears)
    op, seen = attention_call(model, batch, queries, keys)
    attend = choose(op, seen)
    parts, cached_heads, features = model.cache_shape
    run.add_as(
        "cache_write", cache_write_variant(model, attend),
        batch=batch, tokens=queries, kv_heads=cached_heads, head_dim=features * parts // 2,
    )  # fmt: skip
    if model.latent is not None:
        count_attention(run, model, model.latent, attend, (batch, queries, keys))
    else:
        for span in spans(queries, keys, window):
            run.add_as(op, attend, **seen | {"queries": span.queries, "keys": span.keys})
    run.add("linear", rows=rows, **linears["out"])
    if model.norms_behind:
        run.add("norm", **wide)
    run.add("add", **wide)
    if model.norms_before:
        run.add("norm", **wide)
    if layer_class == "moe":
        _mixture(run, rows, linears)
    else:
        run.add("linear", rows=rows, **linears["up"])
        run.add("activation", rows=rows, cols=model.ffn)
        run.add("linear", rows=rows, **linears["down"])
    if model.norms_behind:
        run.add("norm", **wide)
    run.add("add", **wide)
    return run.result()


def product_programs(model: Model, rows: int, variant: Variant) -> Counts:
    """Linears and experts of all of a model's layers, all in one variant, on so many rows."""
    found: dict[Program, int] = {}
    for layer_class, layers in Counter(model.layer_classes).items():
        for made, count in layer_programs(model, rows, 1, 1, lambda *_: variant, layer_class):
            if made.op == "linear" or made.op in EXPERT_OPERATORS:
                found[made] = found.get(made, 0) + count * layers
    return list(found.items())


def only_class(model: Model) -> LayerClass:
    """The class of all layers.

    Raises:
        SpecError: the model has dense layers and layers of experts.
    """
    classes = sorted(set(model.layer_classes))
    if len(classes) > 1:
        raise SpecError("layer class", got=None, expected=f"one of {classes}: the model has both")
    return classes[0]


def _project(run: _Counter, rows: int, linears: Mapping[str, Mapping[str, int]]) -> None:
    """Queries, keys and values of heads, normed and turned."""
    model = run.model
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    run.add("linear", rows=rows, **linears["qkv"])
    if model.qk_norm:
        for count, cols in zip((heads, kv_heads), model.head_norm_sizes, strict=True):
            run.add_as("norm", HEAD_NORM, rows=rows * count * head_dim // cols, cols=cols)
    if model.position == "rope":
        for turned in (heads, kv_heads) if model.qk_norm else (heads + kv_heads,):
            run.add("rope", rows=rows, heads=turned, head_dim=head_dim)


def _mixture(run: _Counter, rows: int, linears: Mapping[str, Mapping[str, int]]) -> None:
    experts, hidden = run.model.experts, run.model.hidden
    assert experts is not None  # only such models have layers of this class
    chosen = {"experts": experts.count, "active": experts.active, "hidden": hidden}
    run.add("router", rows=rows, **chosen)
    op = "biased_experts" if experts.routing.biased else "experts"
    run.add(op, rows=rows, ffn=experts.ffn, **chosen)
    if experts.shared_ffn:
        run.add("linear", rows=rows, **linears["shared_up"])
        run.add("activation", rows=rows, cols=experts.shared_ffn)
        run.add("linear", rows=rows, **linears["shared_down"])
        if experts.shared_gate:
            run.add("shared_gate", rows=rows, cols=hidden)
        run.add("add", rows=rows, cols=hidden)


def embedding_programs(model: Model, batch: int, queries: int) -> Counts:
    """What the first stage runs before its layers: embedding, and learned positions added."""
    rows = batch * queries
    run = _Counter(model)
    run.add("embedding", rows=rows, cols=model.hidden)
    if model.position == "learned":
        run.add("add", rows=rows, cols=model.hidden)
    return run.result()


def head_programs(model: Model, batch: int, choose: Choose) -> Counts:
    """What the last stage runs behind its layers: final norm, head, argmax.

    Prefill and decode alike need them for one token a sequence: the last.
    """
    run = _Counter(model, choose)
    run.add("norm", rows=batch, cols=model.hidden)
    run.add("linear", rows=batch, n=model.vocab, k=model.hidden)
    run.add("argmax", rows=batch, cols=model.vocab)
    return run.result()
