"""Names of the entries of a computation vector and of a program's totals, in order.

Append only within one `FEATURE_VERSION`: learned models are bound to it. "log2" stands for
log2(1 + x).
"""

from __future__ import annotations

#: Changes whenever an entry changes its meaning or place.
FEATURE_VERSION = 10

#: Loads that have entries of their own, those with the most distinct bytes first.
LOADS = 4

#: Bytes of a line of a CPU's cache: theory, what x86-64 and Arm's Neoverse cores have (Apple's and
#: Fujitsu's have longer ones).
LINE_BYTES = 64.0

#: Sizes of caches (bytes) for which a leaf's traffic is estimated.
CACHE_SIZES = (2048, 16384, 32768, 262144, 1048576, 8388608, 33554432)

_ARITHMETIC = (
    "adds", "products", "quotients", "choices", "cheap_functions", "costly_functions",
    "integer_operations", "casts", "logic", "address_operations", "called_functions",
)  # fmt: skip
_LOOPS = (
    "iterations", "loops", "serial", "parallel", "vectorized", "unrolled", "auto_unrolled",
    "auto_unroll_step", "innermost", "second_innermost", "reduction", "spatial", "per_job",
)  # fmt: skip
_BINDINGS = ("blocks", "threads_x", "threads_yz", "virtual_threads", "per_thread", "kernel")
#: Of all warps of a GPU together; on a CPU zeros but for "requests" and "sectors", which
#: there are runs of neighbours in vector loops. "arithmetic" counts
#: instructions of warps; "own_requests" ask for memory of a single thread; "indexed" counts
#: positions in it that only a running loop knows; "straight" iterations that have to become
#: straight code before none is left, as only that gets registers; "pipelined" is 1 where a loop
#: around overlaps its copies with its arithmetic; "unrolled" counts iterations that become straight
#: code, "turns" those of one thread, what TVM was asked to unroll taken as one; "passes" of the
#: L1 cache, which gives one sector of each place in a line at a time.
_GPU = (
    "warps", "sectors", "wavefronts", "requests", "own_requests", "arithmetic", "indexed",
    "straight", "pipelined", "unrolled", "turns", "passes",
)  # fmt: skip
#: What a compiler can do with the loops (`_leaf_code`): how the store goes along the innermost and
#: the vector loop (0 stays, 1 next, 2 jumps, 3 scattered) and how many loads go each way;
#: conditions; operations as often as they run outside of loops that they do not depend on.
_WAYS = ("store", "staying", "next", "jumping", "scattered")
_CODE = (
    *(f"inner_{name}" for name in _WAYS), *(f"lane_{name}" for name in _WAYS),
    "guards", "peeled", "unrolled", "outer_conditions",
    "flops", "quotients", "functions", "address_operations", "divisions",
    "independent_sums", "chained", "sums_innermost", "repeated", "inner_starts",
)  # fmt: skip
#: Of a CPU's straight code (`_leaf_block`).
_BLOCK = (
    "mode", "lanes", "crooked", "carried", "registers", "bodies", "iterations", "operations",
    "beside", "broadcast", "gathered", "results", "apart", "hoisted_apart", "spilled", "chained",
    "divisions",
)  # fmt: skip
_STRUCTURE = ("is_init", "reduces", "reads_own_result", "predicates", "overhang", "depth")
_BUFFER = (
    "shared", "local", "indirect", "element_bytes", "accesses", "bytes", "unique_bytes",
    "job_bytes", "thread_bytes", "stride_inner", "stride_lane", "reuse", "reuse_distance_bytes",
    "unique_lines", "warp_units", "requests",
)  # fmt: skip

FEATURE_NAMES: tuple[str, ...] = (
    *(f"arithmetic.{name}" for name in _ARITHMETIC),
    "arithmetic.flops_per_iteration",
    "dtype.floating", "dtype.bfloat16", "dtype.bytes",
    *(f"loops.{name}" for name in _LOOPS),
    *(f"bindings.{name}" for name in _BINDINGS),
    *(f"structure.{name}" for name in _STRUCTURE),
    "memory.unique_bytes",
    *(f"memory.traffic_{size}" for size in CACHE_SIZES),
    "memory.intensity_unique", "memory.intensity_32768", "memory.intensity_1048576",
    "memory.crowded_l1", "memory.crowded_l2",
    "allocation.stored_bytes", "allocation.shared_bytes", "allocation.local_bytes",
    *(f"gpu.{name}" for name in _GPU),
    *(f"code.{name}" for name in _CODE),
    *(f"block.{name}" for name in _BLOCK),
    *(f"store.{name}" for name in _BUFFER if name != "accesses"),
    *(
        f"load{number}.{name}"
        for number in range(LOADS)
        for name in ("present", *_BUFFER)
    ),
)  # fmt: skip

#: Totals of a program, plain numbers in SI units, for the physical bound of a prediction.
TOTAL_NAMES: tuple[str, ...] = (
    "flops",  # floating operations, all leaves
    "function_calls",  # cheap and costly functions
    "integer_operations",  # of values and addresses
    "argument_bytes",  # distinct bytes of the function's arguments that are touched
    "scratch_bytes",  # distinct bytes of buffers in device memory that it allocates
    "kernels",  # launches; 1 on a CPU
    "blocks",  # most thread blocks of a kernel
    "threads",  # most threads of a block
    "shared_bytes",  # shared memory of a block, all kernels' greatest
    "local_bytes",  # registers' worth of one thread
    "parallel",  # most iterations of parallel loops
    "leaves",
    "iterations",  # executions of stores, all leaves
    "traffic_32768",  # bytes through a cache of that size
    "traffic_1048576",
    "main_dtype_bytes",  # of the leaf with most arithmetic
    "main_dtype_floating",  # 0 integer, 1 floating, 2 bfloat16
    "arguments",  # of the function, which a call passes
)
