"""`with_new_pages`: memory that a processor's system hands out page by page, call after call.

glibc always maps allocations of 32 MiB and more, and gives them back when they are freed
(``DEFAULT_MMAP_THRESHOLD_MAX``). So an operator with so large a result takes a page fault for every
4 KiB of it, whenever it runs: on one core of a virtual EPYC (Zen 5) a copy of 40 MB took 19.6 ms,
with memory that the process keeps 2. Ranks of plans keep their memory (`freed_memory`), as profiles
do; a pass that `replay` is asked for runs as users run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from foreplan.cost_models.costs import Estimate
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.roofline import launch_s
from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES
from foreplan.datasets.program import INPUT_GRADIENT, WEIGHT_GRADIENT, Program

#: Of glibc, 64 bits.
ALWAYS_MAPPED = 32 << 20
#: Calls' worth of time of a page, and its bytes: fitted to gradients of filters that are as large
#: (`filter_gradients`); 1.75 us by the copy above, of 1.0 us a call. Without a virtual machine, and
#: with huge pages for everything, pages take less: assumed to be as here.
PAGE, PAGE_BYTES = 1.8, 4096

_Sizes = Mapping[str, int]
_ROWS: Callable[[_Sizes], int] = lambda d: d["rows"] * d["cols"]  # noqa: E731
_HEADS: Callable[[_Sizes], int] = (  # noqa: E731
    lambda d: d["batch"] * d["queries"] * d["heads"] * d["head_dim"]
)
#: Elements of an operator's result.
_RESULTS: Mapping[str, Callable[[_Sizes], int]] = MappingProxyType(
    dict.fromkeys(
        ("elementwise", "softmax", "norm", "batch_norm", "dropout", "embedding", "fill",
         "norm_gradient", "pool_gradient"),
        _ROWS,
    )
    | {
        "linear": lambda d: d["rows"] * d["n"],
        "matmul": lambda d: d["batch"] * d["m"] * d["n"],
        "attention": _HEADS, "full_attention": _HEADS,
        "pool": lambda d: d["rows"], "reduction": lambda d: d["rows"],
        "embedding_backward": lambda d: d["vocab"] * d["cols"],
    }
)  # fmt: skip


def with_new_pages(
    steps: Sequence[Step], prices: Sequence[Estimate], device: Device
) -> list[Estimate]:
    """Prices of steps with what a processor's system takes to map their results.

    That may be half or twice as long (assumed: pages of other hosts, see `PAGE`).

    Args:
        steps: of a pass (N,).
        prices: of each (N,).
        device: what runs them.
    """
    pages = [new_pages_s(step, device) for step in steps]
    return [
        price if not s else Estimate(
            price.mean_s + s, price.low_s + s / 2, price.high_s + 2 * s, price.source
        )
        for price, s in zip(prices, pages, strict=True)
    ]  # fmt: skip


def new_pages_s(step: Step, device: Device) -> float:
    """Seconds that a step's result takes to be mapped; 0 on GPUs and of smaller results.

    Args:
        step: of a pass.
        device: its system maps for one core at a time.
    """
    if device.kind != "cpu" or step.in_place or not isinstance(step.work, Program):
        return 0.0
    found = result_bytes(step.work)
    if found < ALWAYS_MAPPED:
        return 0.0
    return launch_s(device) * PAGE * math.ceil(found / PAGE_BYTES)


def result_bytes(item: Program) -> int:
    """Bytes of a program's result; 0 where several or none are written."""
    d = item.dims
    if item.op == "conv":
        elements = d["batch"] * d["cout"] * d["outputs"]
        if item.variant.kernel.endswith(INPUT_GRADIENT):
            elements = d["batch"] * d["cin"] * d["inputs"]
        elif item.variant.kernel.endswith(WEIGHT_GRADIENT):
            return 0  # `filter_gradients` knows those that are large
    elif item.op in _RESULTS:
        elements = _RESULTS[item.op](d)
    else:
        return 0
    return int(elements * DTYPE_BYTES[item.variant.compute])
