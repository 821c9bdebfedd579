"""The operators that a `Program` can name: their dimensions, FLOP and bytes, one row each.

Shape legend: ``rows`` = tokens that one call handles (batch x tokens), ``n`` = output features,
``k`` = input features, ``queries``/``keys`` = positions of the sequence, ``head_dim`` = features of
one head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from foreplan.datasets.dtypes import DTYPE_BYTES, cache_bytes, weight_bytes
from foreplan.datasets.experts import EXPERT_OPERATORS, touched_experts
from foreplan.datasets.operator_bytes import (
    activation_bytes,
    attention_bytes,
    conv_bytes,
    expanded_bytes,
    expert_bytes,
    latent_bytes,
    recurrent_bytes,
    recurrent_weights,
    visible_pairs,
)
from foreplan.datasets.operator_row import Operator
from foreplan.datasets.training_operators import PASSES, training_operators

#: What the name of a batch norm's kernel says: it norms by the statistics of the batch itself.
OF_BATCH = "_of_batch"


def _grouped(weights: Callable[[Mapping[str, int]], float]) -> Operator:
    """A product of experts: each of ``rows`` goes through ``active``; so many weights move."""
    return Operator(
        ("rows", "experts", "active", "n", "k"),
        lambda d: 2.0 * d["rows"] * d["active"] * d["n"] * d["k"],
        lambda d, v: (
            weights(d) * weight_bytes(d["n"], d["k"], v.storage)
            + d["rows"] * d["active"] * (d["n"] + d["k"]) * DTYPE_BYTES[v.compute]
        ),
    )


#: Attention of a pass over the keys that it sees: queries see those up to their own.
_ATTENTION = Operator(
    ("batch", "queries", "keys", "heads", "kv_heads", "head_dim"),
    lambda d: 4.0 * d["batch"] * d["heads"] * d["head_dim"] * visible_pairs(d),
    attention_bytes,
)
#: Operators that are such: plain, with a learned score a head, with scores that are capped.
ATTENTIONS = frozenset({"attention", "sink_attention", "capped_attention"})

#: Rows that stand by themselves; `training_operators` makes more of some.
_ROWS: Mapping[str, Operator] = MappingProxyType(
    {
        "linear": Operator(
            ("rows", "n", "k"),
            lambda d: 2.0 * d["rows"] * d["n"] * d["k"],
            lambda d, v: (
                d["rows"] * (d["n"] + d["k"]) * DTYPE_BYTES[v.compute]
                + weight_bytes(d["n"], d["k"], v.storage)
            ),
        ),
        **dict.fromkeys(sorted(ATTENTIONS), _ATTENTION),
        "cache_write": Operator(
            ("batch", "tokens", "kv_heads", "head_dim"),
            lambda d: 0.0,
            lambda d, v: (
                (2.0 * d["batch"] * d["tokens"] * d["kv_heads"])
                * (d["head_dim"] * DTYPE_BYTES[v.compute] + cache_bytes(d["head_dim"], v.storage))
            ),
        ),
        "rope": Operator(
            ("rows", "heads", "head_dim"),
            lambda d: 3.0 * d["rows"] * d["heads"] * d["head_dim"],
            lambda d, v: 2.0 * d["rows"] * d["heads"] * d["head_dim"] * DTYPE_BYTES[v.compute],
        ),
        "norm": Operator(
            ("rows", "cols"),
            lambda d: 5.0 * d["rows"] * d["cols"],
            lambda d, v: 2.0 * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        # Norms each channel of images by itself: as many rows as images have channels together.
        # The batch's own statistics are there when all of it has been read.
        "batch_norm": Operator(
            ("rows", "cols", "channels"),
            lambda d: 5.0 * d["rows"] * d["cols"],
            lambda d, v: (
                (2.0 + (OF_BATCH in v.kernel)) * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute]
            ),
        ),
        # Drops elements at random and scales the others, with a mask of a byte each; or the
        # gradient, by that mask.
        "dropout": Operator(
            ("rows", "cols"),
            lambda d: 3.0 * d["rows"] * d["cols"],
            lambda d, v: d["rows"] * d["cols"] * (2.0 * DTYPE_BYTES[v.compute] + 1.0),
        ),
        "activation": Operator(
            ("rows", "cols"),
            lambda d: 6.0 * d["rows"] * d["cols"],
            activation_bytes,
        ),
        "add": Operator(
            ("rows", "cols"),
            lambda d: 1.0 * d["rows"] * d["cols"],
            lambda d, v: 3.0 * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        "cast": Operator(
            ("rows", "cols"),
            lambda d: 0.0,
            lambda d, v: d["rows"] * d["cols"] * (DTYPE_BYTES[v.storage] + DTYPE_BYTES[v.compute]),
        ),
        "embedding": Operator(
            ("rows", "cols"),
            lambda d: 0.0,
            lambda d, v: d["rows"] * d["cols"] * (DTYPE_BYTES[v.storage] + DTYPE_BYTES[v.compute]),
        ),
        "argmax": Operator(
            ("rows", "cols"),
            lambda d: 1.0 * d["rows"] * d["cols"],
            lambda d, v: 1.0 * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        # Scores of every expert, and the best ``active`` of them with their shares.
        "router": Operator(
            ("rows", "experts", "active", "hidden"),
            lambda d: 2.0 * d["rows"] * d["experts"] * d["hidden"],
            lambda d, v: (
                d["rows"] * (d["hidden"] + d["experts"]) * DTYPE_BYTES[v.compute]
                + weight_bytes(d["experts"], d["hidden"], v.storage)
            ),
        ),
        # Gated MLPs, each on the rows that chose it, and the weighted sum of their outputs.
        **dict.fromkeys(
            sorted(EXPERT_OPERATORS),
            Operator(
                ("rows", "experts", "active", "ffn", "hidden"),
                lambda d: 6.0 * d["rows"] * d["active"] * d["ffn"] * d["hidden"],
                expert_bytes,
            ),
        ),
        # One product of a layer of experts, and its gradient by the weights: zeros without rows.
        "grouped": _grouped(lambda d: touched_experts(d["rows"], d["experts"], d["active"])),
        "grouped_gradient": _grouped(lambda d: d["experts"]),
        # ``x * sigmoid(gate(y))`` with a gate of one output.
        "shared_gate": Operator(
            ("rows", "cols"),
            lambda d: 4.0 * d["rows"] * d["cols"],
            lambda d, v: 3.0 * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        # Keys and values of every head, of a latent's products and a key that heads share.
        "expand_heads": Operator(
            ("rows", "heads", "plain", "turned", "value"), lambda d: 0.0, expanded_bytes
        ),
        # One query a head and sequence; keys and values are one and the same, read once.
        "latent_attention": Operator(
            ("batch", "keys", "heads", "latent", "turned"),
            lambda d: 2.0 * d["batch"] * d["heads"] * d["keys"] * (2 * d["latent"] + d["turned"]),
            latent_bytes,
        ),
        # Below: operators of captured graphs, of which the runtime's decoders have
        # ``matmul`` alone, with latents.
        "matmul": Operator(
            ("batch", "m", "n", "k"),
            lambda d: 2.0 * d["batch"] * d["m"] * d["n"] * d["k"],
            lambda d, v: (
                (1.0 * d["batch"] * (d["m"] * d["k"] + d["k"] * d["n"] + d["m"] * d["n"]))
                * DTYPE_BYTES[v.compute]
            ),
        ),
        # ``taps`` = elements of the window, ``inputs``/``outputs`` = positions of the images.
        "conv": Operator(
            ("batch", "groups", "cin", "cout", "taps", "inputs", "outputs"),
            lambda d: (
                2.0 * d["batch"] * d["outputs"] * d["cout"] * (d["cin"] // d["groups"]) * d["taps"]
            ),
            conv_bytes,
        ),
        # Every query sees every key.
        "full_attention": Operator(
            ("batch", "queries", "keys", "heads", "kv_heads", "head_dim"),
            lambda d: 4.0 * d["batch"] * d["heads"] * d["head_dim"] * d["queries"] * d["keys"],
            attention_bytes,
        ),
        "softmax": Operator(
            ("rows", "cols"),
            lambda d: 5.0 * d["rows"] * d["cols"],
            lambda d, v: 2.0 * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        # By a norm's input and (two ``results``) its parameters; of rows, or of ``channels`` > 1.
        "norm_gradient": Operator(
            ("rows", "cols", "channels", "results"),
            lambda d: 10.0 * d["rows"] * d["cols"],
            lambda d, v: (2.0 + d["results"]) * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        # Reads ``inputs`` tensors of this size and writes one.
        "elementwise": Operator(
            ("rows", "cols", "inputs"),
            lambda d: 1.0 * d["rows"] * d["cols"],
            lambda d, v: (d["inputs"] + 1.0) * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        # Nobody knows what it computes, but the tensors that it reads and writes: as `elementwise`.
        "unknown": Operator(
            ("rows", "cols", "inputs"),
            lambda d: 0.0,
            lambda d, v: (d["inputs"] + 1.0) * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        # Goes round along so many dimensions, one after another.
        "roll": Operator(
            ("rows", "cols", "times"),
            lambda d: 0.0,
            lambda d, v: 2.0 * d["times"] * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        "fill": Operator(
            ("rows", "cols"),
            lambda d: 0.0,
            lambda d, v: 1.0 * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        "reduction": Operator(
            ("rows", "cols"),
            lambda d: 1.0 * d["rows"] * d["cols"],
            lambda d, v: 1.0 * d["rows"] * (d["cols"] + 1) * DTYPE_BYTES[v.compute],
        ),
        # ``rows`` outputs of ``cols`` inputs each, whose windows of ``taps`` elements may overlap.
        "pool": Operator(
            ("rows", "cols", "taps"),
            lambda d: 1.0 * d["rows"] * d["taps"],
            lambda d, v: 1.0 * d["rows"] * (d["cols"] + 1) * DTYPE_BYTES[v.compute],
        ),
        # By the inputs: zeros are written, and added to.
        "pool_gradient": Operator(
            ("rows", "cols", "taps"),
            lambda d: 1.0 * d["rows"] * d["taps"],
            lambda d, v: 2.0 * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute],
        ),
        # ``rows`` sequences of ``steps``; the state of ``hidden`` values is computed by so many
        # ``gates``, of ``outputs`` (fewer where projected) before. What it is made of:
        # `foreplan.cost_models.lowering.recurrent_parts`.
        "recurrent": Operator(
            ("steps", "rows", "inputs", "hidden", "outputs", "gates", "layers", "directions"),
            lambda d: 2.0 * d["steps"] * d["rows"] * recurrent_weights(d),
            recurrent_bytes,
        ),
        # ``outputs`` products of ``x[first]``, a matrix and ``y[second]``, each by itself.
        "bilinear": Operator(
            ("rows", "first", "second", "outputs"),
            lambda d: 2.0 * d["rows"] * d["outputs"] * d["second"] * (d["first"] + 1),
            lambda d, v: (
                d["rows"] * (d["first"] + d["second"] + d["outputs"]) * DTYPE_BYTES[v.compute]
                + d["first"] * d["second"] * d["outputs"] * DTYPE_BYTES[v.storage]
            ),
        ),
        # ``rows`` Fourier transforms of ``cols`` numbers, complex (two ``values``) or real (one),
        # which goes over them in ``passes``: 5 n log2 n of a complex one (Cooley, Tukey 1965).
        "fft": Operator(
            ("rows", "cols", "values", "passes"),
            lambda d: 2.5 * d["values"] * d["rows"] * d["cols"] * math.log2(max(2, d["cols"])),
            lambda d, v: (
                2.0 * d["passes"] * d["values"] * d["rows"] * d["cols"] * DTYPE_BYTES[v.compute]
            ),
        ),
        # A compiler's kernel over ``rows x cols`` elements: ``moved`` are read and written, of so
        # many ``inputs`` to a result (`foreplan.cost_models.lowering.fused_program`).
        "fused": Operator(
            ("rows", "cols", "moved", "inputs"),
            lambda d: 1.0 * d["rows"] * d["cols"],
            lambda d, v: 1.0 * d["moved"] * DTYPE_BYTES[v.compute],
        ),
        # One fused update: reads parameter, gradient and two moments, writes all but the gradient.
        # ``kernels`` and ``longest``: `foreplan.datasets.sweeps.update_packing`.
        "adamw": Operator(
            ("parameters", "kernels", "longest"),
            lambda d: 12.0 * d["parameters"],
            lambda d, v: 7.0 * d["parameters"] * DTYPE_BYTES[v.compute],
        ),
    }
)


#: Every operator a program can name. One row each: dimensions, FLOP, bytes.
OPERATORS: Mapping[str, Operator] = MappingProxyType({**_ROWS, **training_operators(_ROWS)})
#: Operators whose time is bound by products, so that a device's peak rate matters.
PRODUCTS = (
    ATTENTIONS
    | EXPERT_OPERATORS
    | frozenset(
        [
            "linear",
            "router",
            "grouped",
            "grouped_gradient",
            "matmul",
            "latent_attention",
        ]
    )
    | {f"{op}_{name}" for op in ("linear", "conv2d", "attention", "matmul") for name in PASSES}
)
