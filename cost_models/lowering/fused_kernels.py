"""`fused_kernels`: the kernels that a compiler makes of a graph, by the bytes that they move.

Forward by `FusionWalk`. Backward each has a kernel that reads the gradients of its results, one of
every reader, and its operands where their values matter, and writes its operands' gradients;
gradients of parameters are sums over the same in a kernel beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foreplan.cost_models.lowering.fusion_walk import FusionWalk, Kernel
from foreplan.datasets.graphs.operator_graph import OperatorGraph

#: What puts tensors together, and what lays something around one.
_JOINS, _PADS = frozenset({"cat", "stack"}), frozenset({"pad", "constant_pad_nd"})
#: What draws a number for each element.
_DRAWS = frozenset(
    {"dropout", "native_dropout", "feature_dropout", "alpha_dropout", "bernoulli", "rand_like",
     "randn_like"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """One kernel of a compiler's own.

    Attributes:
        at: place of its last operator among those of the graph.
        elements: that it goes through.
        rows: sums that it takes of them; 0 where it takes none.
        split: the sums are shared out over blocks, and end in kernels of their own.
        joined: it puts tensors together.
        padded: it lays something around one.
        drawn: it draws a number for each element, as dropout does.
        read_bytes: of tensors that others wrote, parameters and inputs.
        written_bytes: of results that others read, or the graph returns.
        gradient_read_bytes: what its backward kernel reads; 0 where there is none.
        gradient_written_bytes: what that writes.
        summed_bytes: what sums for parameters' gradients go over; 0 where there are none.
        dtype: torch's name of the type of its largest result.
    """

    at: int
    elements: int
    rows: int
    split: bool
    joined: bool
    padded: bool
    drawn: bool
    read_bytes: float
    written_bytes: float
    gradient_read_bytes: float
    gradient_written_bytes: float
    summed_bytes: float
    dtype: str


def fused_kernels(graph: OperatorGraph) -> list[FusedKernel]:
    """Kernels that a compiler makes of a graph, in the order of their last operators.

    Args:
        graph: captured with ``eager=True``.
    """
    walk = FusionWalk(graph)
    readers = walk.readers()
    found = (_finished(kernel, walk, readers) for kernel in walk.kernels)
    return sorted((kernel for kernel in found if kernel is not None), key=lambda each: each.at)


def _finished(
    kernel: Kernel, walk: FusionWalk, readers: Mapping[str, int]
) -> FusedKernel | None:  # fmt: skip
    """A kernel's bytes; ``None`` of one of which nothing is read."""
    written = [walk.values[name] for name in kernel.writes if readers[name]]
    written_bytes = sum(value.size for value in written)
    if not written_bytes:
        return None
    outer = [
        (walk.values[leaf], amount) for leaf, amount in kernel.leaves.items()
        if leaf not in kernel.writes
    ]  # fmt: skip
    gradients = sum(value.size * readers[value.name] for value in written if value.gradient)
    wanted = sum(amount for value, amount in outer if value.gradient and not value.parameter)
    saved = 0.0
    if not kernel.linear:
        saved = sum(amount for value, amount in outer if not value.parameter)
    if not gradients or (kernel.linear and len(outer) == 1 and gradients <= wanted):
        gradients = wanted = saved = 0.0  # one that only passes its gradient on has no kernel
    trained = any(value.parameter and value.gradient for value, _ in outer)
    return FusedKernel(
        at=kernel.at, elements=kernel.elements, rows=kernel.rows, split=kernel.channels > 0,
        joined=bool(kernel.operators & _JOINS), padded=bool(kernel.operators & _PADS),
        drawn=bool(kernel.operators & _DRAWS),
        read_bytes=sum(amount for _, amount in outer), written_bytes=written_bytes,
        gradient_read_bytes=gradients + saved, gradient_written_bytes=wanted,
        summed_bytes=gradients + saved if trained else 0.0,
        dtype=max(written, key=lambda value: value.size).dtype,
    )  # fmt: skip
