"""Which programs the operators of a training step are: from an `OperatorNode` to what is priced.

A program is named by the operator, the pass (`FORWARD`, `BACKWARD` or `WEIGHT_GRADIENT`), its
canonical shape and the dtypes it works in. Operators without a program of their own (copies,
reductions, pools of volumes) are priced as an element-wise operator over as many elements: they are
memory bound, and few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.datasets.graphs.operator_graph import OperatorNode, Shape
from foreplan.datasets.kernels.training_variant import EIGHT_BITS, training_variant
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.training_operators import PASSES

FORWARD, BACKWARD, WEIGHT_GRADIENT = PASSES

#: Ends the kernel of a cast whose input is not in any cache.
COLD = "_cold"

_ACTIVATIONS = {
    "gelu": "torch.gelu", "gelu_tanh": "torch.gelu_tanh", "silu": "torch.silu",
    "relu": "torch.relu",
}  # fmt: skip
#: Pools that are timed as such, and by which function.
POOLS = {
    f"{kind}_pool{n}d": f"torch.{kind}_pool{n}d"
    for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2)
}  # fmt: skip
#: Columns that a flat tensor is measured with: any row length of a memory-bound map costs alike.
_COLUMNS = 1024


def linear_program(direction: str, rows: int, n: int, k: int, variant: str) -> Program:
    """One pass of a linear; the variant of a backward program is SAVED/BACKWARD/KERNEL."""
    return program(f"linear_{direction}", _directed(direction, variant), rows=rows, n=n, k=k)


def conv2d_program(direction: str, node: OperatorNode, variant: str) -> Program:
    """One pass of a two-dimensional convolution."""
    source, weight, out = node.inputs[0], node.inputs[1], node.outputs[0]
    stride = max(1, round(source[2] / out[2]))
    return program(
        f"conv2d_{direction}", _directed(direction, variant), batch=source[0], channels=source[1],
        height=source[2], width=source[3], filters=weight[0], kernel_height=weight[2],
        kernel_width=weight[3], out_height=out[2], out_width=out[3], stride=stride,
        groups=source[1] // weight[1],
    )  # fmt: skip


def kept_convolution(direction: str, node: OperatorNode) -> Program:
    """One pass of a convolution that no variant computes, as one of images that multiplies as much.

    Of rows (images of one row), of volumes (a plane of the result is made from as many planes as
    the kernel is deep, each of which stands for channels), dilated (as if it were not), or
    transposed: the gradient by the input of the convolution that goes the other way.
    """
    source, weight, out = node.inputs[0], node.inputs[1], node.outputs[0]
    if "transpose" in node.target:
        source, out = out, source
    spatial = len(weight) - 2
    image, made = ((1, 1, *shape[-spatial:])[-3:] for shape in (source, out))
    depth, kernel_height, kernel_width = (1, 1, *weight[2:])[-3:]
    channels = source[-spatial - 1]
    samples = math.prod(source[: -spatial - 1]) or 1
    return program(
        f"conv2d_{direction}", _directed(direction, "fp32/fp32/torch.conv2d"),
        batch=samples * made[0], channels=channels * depth, height=image[1], width=image[2],
        filters=weight[0], kernel_height=kernel_height, kernel_width=kernel_width,
        out_height=made[1], out_width=made[2], stride=max(1, round(image[2] / made[2])),
        groups=max(1, channels // weight[1]),
    )  # fmt: skip


def embedding_program(direction: str, rows: int, vocab: int, cols: int, variant: str) -> Program:
    """One pass of a look-up; its backward pass fills a dense gradient."""
    found = training_variant(variant)
    plain = Variant("fp32", found.output, "torch.embedding")
    return program(f"embedding_{direction}", plain, rows=rows, vocab=vocab, cols=cols)


def pool_program(direction: str, node: OperatorNode, dtype: str) -> Program | None:
    """One pass of a pool over images or rows; ``None`` of one that is not timed as such."""
    kernel = POOLS.get(node.target.rpartition(".")[2].removesuffix("_with_indices"))
    source, out = node.inputs[0], node.outputs[0]
    spatial = 1 if kernel is not None and kernel.endswith("1d") else 2
    if kernel is None or not spatial < len(source) == len(out) <= spatial + 2:
        return None
    # A sample without a batch, and rows for images of one row.
    (*outer, channels), image = source[:-spatial], source[-spatial:]
    height, width = (1, *image)[-2:]
    out_height, out_width = (1, *out[-spatial:])[-2:]
    return program(
        f"pool_{direction}", Variant(dtype, dtype, kernel), batch=math.prod(outer),
        channels=channels, height=height, width=width, out_height=out_height, out_width=out_width,
        taps=max(1, round(node.flops / max(1, math.prod(out)))),
    )  # fmt: skip


def dependent_program(direction: str, node: OperatorNode, dtype: str) -> Program:
    """One pass of an operator that works in the dtype it is fed."""
    out = node.outputs[0]
    if node.op == "attention":
        q, k = node.inputs[0], node.inputs[1]
        causal = "_causal" if len(node.inputs) < 4 and q[-2] == k[-2] else ""
        return program(
            f"attention_{direction}", Variant(dtype, dtype, f"torch.sdpa{causal}"),
            batch=math.prod(q[:-3]) or 1, queries=q[-2], keys=k[-2], heads=q[-3], head_dim=q[-1],
        )  # fmt: skip
    if node.op in ("matmul", "linear") and len(node.inputs) >= 2 and len(node.inputs[0]) >= 2:
        a = node.inputs[-2]
        return program(
            f"matmul_{direction}", Variant(dtype, dtype, "torch.bmm"),
            batch=math.prod(out[:-2]) or 1, rows=out[-2] if len(out) > 1 else 1, n=out[-1],
            k=a[-1],
        )  # fmt: skip
    if node.op == "embedding":  # a bag, or a look-up that no module of torch's own makes
        (vocab, cols), rows = node.inputs[0], max(1, math.prod(node.inputs[1]))
        if not node.target.endswith("embedding_bag"):
            return embedding_program(direction, rows, vocab, cols, "fp32/fp32/torch.embedding")
        return program(
            f"embedding_bag_{direction}", Variant("fp32", "fp32", "torch.embedding_bag"),
            rows=rows, bags=max(1, math.prod(out[:-1])), vocab=vocab, cols=cols,
        )  # fmt: skip
    if node.op == "convolution":
        return kept_convolution(direction, node)
    pool = pool_program(direction, node, dtype) if node.op == "pool" else None
    if pool is not None:
        return pool
    rows, cols = _flat((*node.inputs[:1], out))
    name = node.target.rpartition(".")[2]
    op, kernel = "elementwise", "torch.mul" if name == "mul" else "torch.add"
    if node.op == "norm":
        op, kernel = "norm", "torch.rms_norm"
        if "layer_norm" in name:
            kernel = "torch.layer_norm"
        elif "batch_norm" in name:
            kernel = "torch.batch_norm"
            cols = out[1]
            rows = max(1, math.prod(out) // cols)
    elif node.op == "softmax":
        op, kernel = "softmax", "torch.softmax"
    elif node.op == "activation":
        op, kernel = "activation", _ACTIVATIONS.get(name, "torch.tanh")
    return program(f"{op}_{direction}", Variant(dtype, dtype, kernel), rows=rows, cols=cols)


def loss_program(direction: str, rows: int, classes: int) -> Program:
    """One pass of cross-entropy, always fp32."""
    plain = Variant("fp32", "fp32", "torch.cross_entropy")
    return program(f"cross_entropy_{direction}", plain, rows=rows, cols=classes)


def cast_program(
    elements: int, row: int, source: str, target: str, *, cold: bool = False, along: str = "row"
) -> Program:
    """A cast of ``elements`` numbers; to 8 bits with a scale for each ``row`` or for all.

    ``cold`` casts read what was long not used (a master weight), others what was just written.
    """
    suffix = COLD if cold else ""
    if target in EIGHT_BITS:
        kernel = "torch.quantise_tensor" if along == "tensor" else "torch.quantise_rows"
        variant = Variant(source, target, f"{kernel}{suffix}")
        return program("cast", variant, rows=max(1, elements // row), cols=row)
    cols = min(elements, _COLUMNS)
    variant = Variant(source, target, f"torch.to{suffix}")
    return program("cast", variant, rows=max(1, -(-elements // cols)), cols=cols)


def optimizer_program(optimizer: str, parameters: int, tensors: int = 1) -> Program:
    """One step of ``sgd`` with momentum or ``adamw`` on fp32, over so many tensors."""
    variant = Variant("fp32", "fp32", f"torch.{optimizer}")
    return program("optimizer_step", variant, parameters=parameters, tensors=tensors)


def is_training(item: Program) -> bool:
    """Whether a program is a pass or a quantisation of a training step."""
    if item.op in ("cast", "optimizer_step"):
        cold = item.variant.kernel.endswith(COLD)
        return item.op != "cast" or item.variant.compute in EIGHT_BITS or cold
    return item.op.endswith(("_forward", "_backward", "_weight_gradient"))


def _directed(direction: str, variant: str) -> Variant:
    found = training_variant(variant)
    if direction == FORWARD and found.forward in EIGHT_BITS:
        return Variant.parse(variant)
    kernel = Variant.parse(variant).kernel.partition("+")[0]
    if direction == FORWARD:
        return Variant(found.forward, found.forward, kernel)
    if found.saved in EIGHT_BITS:
        kernel = "torch.linear@tensor" if found.along == "tensor" else "torch.linear"
    return Variant(found.saved, found.backward, kernel)


def _flat(shapes: Sequence[Shape]) -> tuple[int, int]:
    """(rows, cols) of the largest tensor."""
    shape = max(shapes, key=math.prod)
    cols = shape[-1] if len(shape) > 1 else _COLUMNS
    cols = max(1, min(cols, math.prod(shape)))
    return max(1, math.prod(shape) // cols), cols
