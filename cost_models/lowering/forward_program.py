"""`forward_program`: the program that an operator's forward pass is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import MappingProxyType

from foreplan.cost_models.lowering.attention_parts import WITHIN
from foreplan.cost_models.lowering.backward_steps import broadcast, flat, picked
from foreplan.cost_models.lowering.copy_layout import MIXED, copied_sizes
from foreplan.cost_models.lowering.einsum_terms import EinsumTerms
from foreplan.cost_models.lowering.gradient_maps import PADS, SCANS
from foreplan.cost_models.lowering.graph_backward import channels
from foreplan.cost_models.lowering.kernel_words import scanned
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.graphs.operator_call import OperatorCall, described_tensors
from foreplan.datasets.graphs.operator_graph import OperatorNode
from foreplan.datasets.program import CHANNELS_LAST, INPUT_GRADIENT, Program, Variant, program

#: Kernel of a product of two vectors.
DOT = "torch.sum"
#: What the name of a kernel says: a convolution adds a bias.
BIAS = "_bias"
#: Maps that broadcast an operand.
_BROADCASTS = frozenset({"add", "sub", "mul", "div", "where", "maximum", "minimum"})

#: Products whose operands are of 8 bits, and their results of more.
_NARROW = MappingProxyType({"_int_mm": "int8", "_scaled_mm": "fp8"})

#: Complex numbers are two real ones.
_PARTS = MappingProxyType({"complex64": "fp32", "complex128": "fp64", "complex32": "fp16"})


def forward_program(node: OperatorNode, layout: str, call: OperatorCall | None) -> Program:
    """The program of one operator's forward pass.

    Args:
        node: the operator, none that others make up (`whole_program`).
        layout: words on how its operands lie, from `kernel_words`.
        call: the same with its arguments, ``None`` where the graph has none.
    """
    variant = node_variant(node, layout)
    if node.op in ("linear", "matmul") and node.inputs:
        return _product(node, variant, call)
    if node.op == "convolution":
        return _convolution(node, variant)
    if node.op == "attention":
        return _attention(node, variant)
    rows, cols = flat(node.outputs[0] if node.outputs else ())
    if channels(node) > 1:
        cols = max(1, math.prod(node.outputs[0][2:]))
        rows = max(1, math.prod(node.outputs[0]) // cols)
    elif node.target.endswith("layer_norm") and len(node.inputs) > 1:  # of several extents
        cols = math.prod(node.inputs[1])
        rows = max(1, math.prod(node.outputs[0]) // cols)
    elif call and (node.op == "softmax" or node.target.rpartition(".")[2] in SCANS):
        cols = scanned(call.arguments) or cols
        rows = max(1, math.prod(node.outputs[0]) // cols)
    if channels(node) > 1:
        return program("batch_norm", variant, rows=rows, cols=cols, channels=channels(node))
    if node.op in ("norm", "softmax"):
        return program(node.op, variant, rows=rows, cols=cols)
    if node.target.endswith(".dropout"):
        return program("dropout", variant, rows=rows, cols=cols)
    if node.op == "embedding":  # as many rows as are read, though a bag writes their sum alone
        return program("embedding", variant, rows=max(1, math.prod(node.inputs[1])), cols=cols)
    if node.target.endswith(".index") and len(node.inputs) > 1:  # rows of a table, as wide as left
        cols = picked(node.inputs[0], node.outputs[0])
        rows = max(1, math.prod(node.outputs[0]) // cols)
        return program("embedding", variant, rows=rows, cols=cols)
    if node.target.rpartition(".")[2] in SCANS:
        return program("reduction", variant, rows=rows, cols=cols)
    if node.op in ("reduction", "pool") and node.inputs:
        elements = max(1, math.prod(node.inputs[0]))
        kept = max(1, min(rows * cols, elements))
        size = {"rows": kept, "cols": max(1, round(elements / kept))}
        if node.op == "reduction":
            return program("reduction", variant, **size)
        return program("pool", variant, **size, taps=max(1, round(node.flops / (rows * cols))))
    if call and layout == CHANNELS_LAST:
        rows, cols = copied_sizes(call.arguments)
    cols *= 2 if node.dtype in _PARTS else 1
    written = rows * cols * DTYPE_BYTES[variant.compute]
    # Broadcast operands are smaller than the result: as many inputs as there are bytes.
    inputs = max(1, round(node.bytes / written) - 1)
    if node.target.rpartition(".")[2] in PADS:  # which moves as much as one more input
        inputs += node.inputs[:1] != node.outputs[:1]  # else nothing is added, and it copies
    if node.target.rpartition(".")[2] in _BROADCASTS and node.outputs:
        if MIXED in layout and math.prod(node.inputs[-1]) == rows * cols == math.prod(
            node.inputs[0]
        ):
            inputs = 2  # one of them half as wide
        lies = max(broadcast(shape, node.outputs[0]) for shape in (*node.inputs, ()))
        variant = replace(variant, kernel=variant.kernel + lies)
    op = "unknown" if node.op == "unknown" else "elementwise"
    return program(op, variant, rows=rows, cols=cols, inputs=inputs)


def node_variant(node: OperatorNode, layout: str = "") -> Variant:
    """Types and kernel of an operator, with words on how its operands lie."""
    kernel = "torch." + node.target.rpartition(".")[2] + layout
    return Variant(own_dtype(node.dtype), own_dtype(node.dtype), kernel)


def _product(node: OperatorNode, variant: Variant, call: OperatorCall | None) -> Program:
    out = node.outputs[0] or (1,)
    n = out[-1]
    # FLOP = 2 * (elements of the result) * k, whatever the operands' order.
    k = max(1, round(node.flops / 2 / max(1, math.prod(out))))
    if node.dtype in _PARTS:  # a complex product as a real one of [re -im; im re]
        n, k = 2 * n, 2 * k
    if math.prod(out) == 1 and node.dtype not in _PARTS:
        # No kernel for matrices: a sum over both, split as sums are.
        return program("reduction", replace(variant, kernel=DOT), rows=1, cols=2 * k)
    narrow = _NARROW.get(node.target.rpartition(".")[2])
    if narrow is not None:
        variant = replace(variant, storage=narrow, compute=narrow)
    if node.op == "linear" or narrow is not None:
        return program("linear", variant, rows=max(1, math.prod(out) // out[-1]), n=n, k=k)
    if call and node.target.endswith(".einsum") and node.dtype not in _PARTS:
        terms = EinsumTerms.of(json.loads(call.arguments)[0][0])
        if terms is not None:
            shapes = [shape for shape, _, _ in described_tensors(call.arguments)]
            return program("matmul", variant, **terms.sizes(shapes))
    m = out[-2] if len(out) > 1 else 1
    return program("matmul", variant, batch=max(1, math.prod(out[:-2])), m=m, n=n, k=k)


def _convolution(node: OperatorNode, variant: Variant) -> Program:
    source, weight, out = node.inputs[0], node.inputs[1], node.outputs[0]
    groups = max(1, source[1] // weight[1])
    if "transpose" in node.target:
        # What the gradient by the input of the convolution from ``out`` to ``source`` computes.
        groups = max(1, out[1] // weight[1])
        source, out = out, source
        kernel = variant.kernel.replace("conv_transpose", "conv") + INPUT_GRADIENT
        variant = replace(variant, kernel=kernel)
    elif len(node.inputs) > 2:
        variant = replace(variant, kernel=variant.kernel + BIAS)
    return program(
        "conv", variant, batch=source[0], groups=groups, cin=source[1], cout=out[1],
        taps=math.prod(weight[2:]), inputs=math.prod(source[2:]), outputs=math.prod(out[2:]),
    )  # fmt: skip


def _attention(node: OperatorNode, variant: Variant) -> Program:
    query = node.inputs[0]
    *lead, heads, queries, head_dim = query
    # Of one tensor that is all three an input stands once, and a mask may be what comes behind it.
    alike = (len(query), head_dim)
    key = next((shape for shape in node.inputs[1:] if (len(shape), shape[-1]) == alike), query)
    pairs = node.flops / (4.0 * math.prod(lead) * heads * head_dim)
    causal = pairs < queries * key[-2] and queries > 1
    if node.within:
        variant = replace(variant, kernel=variant.kernel + WITHIN)
    return program(
        "attention" if causal or queries == 1 else "full_attention", variant,
        batch=max(1, math.prod(lead)), queries=queries, keys=key[-2], heads=heads,
        kv_heads=key[-3], head_dim=head_dim,
    )  # fmt: skip


def own_dtype(name: str) -> str:
    """Our dtype with the width of torch's, of complex numbers that of a part; masks are bytes."""
    name = _PARTS.get(name, name)
    return name if name in DTYPE_BYTES else "int8"
