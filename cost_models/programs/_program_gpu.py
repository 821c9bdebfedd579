"""gpu_parts: seconds that each kind of work of a program's kernels would take on a GPU, by theory.

For a kernel of B blocks of T threads on U units at clock f, b blocks fit one unit:

    b       = min(threads of a unit / T, shared memory of a unit / shared, registers / (T r), 32)
    limit_x = counts_x * ceil(B / U) / B / (rate_x * f)       throughput of the busiest unit
    chain_x = ceil(B / (U b)) * counts_x of one warp * cycles_x / f      one warp waits for itself

Rates are those of the CUDA programming guide's throughput tables, cycles are round figures of
published microbenchmarks; `program_scale` fits one weight for each kind of work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs._program_counts import Counts

Floats = NDArray[np.float64]

#: Of a unit and cycle: instructions of warps, wavefronts of shared memory, passes and sectors of
#: L1, sectors of L2.
_ISSUE, _WAVEFRONTS, _L1_PASSES, _L1_SECTORS, _L2_SECTORS = 4.0, 1.0, 1.0, 4.0, 2.0
#: Cycles until an answer: device memory, L2, L1, shared memory, arithmetic.
_MEMORY_CYCLES, _L2_CYCLES, _L1_CYCLES = 600.0, 250.0, 35.0
_SHARED_CYCLES, _ARITHMETIC_CYCLES = 30.0, 4.0
#: Blocks on a unit, registers of a thread at most, shared memory that the system takes of a block:
#: compute capabilities 8.0 and 9.0 (CUDA C++ programming guide). Registers beside a program's own
#: (addresses, loops), and L1 that values without a register find room in (V100: 128 KiB of L1 and
#: shared memory together): assumed, round.
_BLOCKS_PER_UNIT, _SPARE_REGISTERS, _MOST_REGISTERS = 32.0, 32.0, 255.0
_RESERVED_SHARED, _NEAR_BYTES = 1024.0, 131072.0
#: Iterations that are unrolled unasked to keep a thread's memory in registers, a guess far above,
#: chosen on what nvcc 13.0 makes of 253 kernels of the development families, and bytes of it up to
#: which it unrolls more: what 255 registers hold. Of 769 such kernels those with straight code
#: beyond the first limit got registers in 56 % of cases from 640 to 1,024 bytes, 3 % above 1,100.
_UNROLLED, _UNROLLED_FAR, _SMALL_BYTES = 320.0, 1024.0, 1024.0
#: Bytes of straight code for each counted instruction (16 each, addresses beside: the same
#: kernels), and what caches of instructions hold: assumed, kernels above 80 KiB were far too slow.
_INSTRUCTION_BYTES, _CODE_BYTES = 24.0, 65536.0
#: From one block to the next, all units together: assumed, its weight is fitted like any part's.
_DISPATCH_S = 1e-9

#: Names of the columns of `GpuParts.parts`.
PARTS = (
    "arithmetic", "requests", "integer", "l1", "shared", "l2", "chain_arithmetic", "chain_shared",
    "chain_l1", "chain_memory", "iterations", "spilled", "spilled_far", "chain_spilled",
    "chain_spilled_far", "indexed", "indexed_far", "chain_indexed", "chain_indexed_far", "stages",
    "stages_pipelined", "fetched", "chain_fetched", "turns", "turns_guarded",
)  # fmt: skip
#: Names of the columns of `GpuParts.terms`: means over kernels by rough time.
TERMS = (
    "blocks_per_unit", "warps_per_unit", "rounds", "filled", "registers", "spilled_share",
    "far_share", "pipelined", "own_bytes", "shared_bytes", "blocks", "threads",
    "sectors_per_request", "passes_per_request", "wavefronts_per_request",
    "flops_per_byte_asked", "straight", "straight_per_step", "code",
)  # fmt: skip


class GpuParts(NamedTuple):
    """Work of N programs with M leaves.

    Attributes:
        parts: seconds by kind of work of each leaf (M, ``len(PARTS)``).
        blocks_s: seconds to dispatch the blocks (N).
        terms: how the kernels lie on the chip (N, ``len(TERMS)``).
        slow: how many times longer the chip takes because blocks do not fill it, at most 4 (N).
    """

    parts: Floats
    blocks_s: Floats
    terms: Floats
    slow: Floats


def gpu_parts(counts: Counts) -> GpuParts:
    """Return the parts of every program; those of a CPU are to be ignored."""
    c, k = counts, counts.kernel
    blocks = np.maximum(1.0, c.most(c.plain("bindings.blocks")))
    across = np.maximum(1.0, c.plain("bindings.threads_x"))
    threads = c.most(across * np.maximum(1.0, c.plain("bindings.threads_yz")))
    shared = c.most(c.plain("allocation.shared_bytes"))
    own = c.most(c.plain("allocation.local_bytes")) / 4
    units, clock = c.figure("units")[c.owner], c.figure("clock_hz")[c.owner]
    file = c.figure("register_bytes_per_unit")[c.owner] / 4
    # The compiler is told the threads of a block, so it never takes more registers than fit.
    allowed = np.minimum(_MOST_REGISTERS, file / threads)
    # Memory of a thread gets registers if every position is a constant, which takes unrolling.
    straight = c.most(c.plain("gpu.straight"))
    asked_unroll = c.most(c.plain("loops.auto_unroll_step"))
    small = 4 * own < _SMALL_BYTES
    held = small | (straight <= np.maximum(asked_unroll, _UNROLLED))
    held_far = small | (straight <= np.maximum(asked_unroll, _UNROLLED_FAR))
    wanted = np.where(held, own, 0.0) + _SPARE_REGISTERS
    registers = np.minimum(allowed, wanted)
    spilled = np.clip(wanted / allowed - 1.0, 0.0, 1.0)
    warps_each = np.ceil(threads / 32)
    room = c.figure("max_threads_per_unit")[c.owner] / (32 * warps_each)
    room = np.minimum(room, file / (registers * threads))
    memory = c.figure("shared_memory_bytes_per_unit")[c.owner]
    room = np.minimum(room, memory / (shared + _RESERVED_SHARED))
    fits = np.clip(np.floor(room), 1.0, _BLOCKS_PER_UNIT)
    rounds = np.ceil(blocks / (units * fits))
    busiest = (np.ceil(blocks / units) / blocks / clock)[k]
    warps = np.maximum(1.0, c.plain("gpu.warps"))
    alone = (rounds / clock)[k] / warps

    asked, sectors = c.plain("gpu.requests"), c.plain("gpu.sectors")
    waves, math = c.plain("gpu.wavefronts"), c.plain("gpu.arithmetic")
    passes = c.plain("gpu.passes")
    missed = np.minimum(sectors, c.plain("memory.traffic_32768") / 32)
    asked_global = np.where(sectors > 0, asked, 0.0)
    width = np.maximum(1.0, sectors / np.maximum(1.0, asked_global))
    # What does not fit registers lies in memory, near while that of all threads fits the L1 cache.
    mine = c.plain("gpu.own_requests")
    resident = own * 4 * threads * np.minimum(fits, np.ceil(blocks / units))
    far = np.clip(resident / _NEAR_BYTES - 1.0, 0.0, 1.0)
    lost, lost_far = mine * spilled[k], mine * (spilled * far)[k]
    loose, looser = mine * ~held[k], mine * ~held_far[k]
    copies = (waves > 0) & (sectors > 0)
    # Straight code that outgrows the cache of instructions comes from L2 again each time.
    run = math + asked + mine
    each = c.plain("gpu.unrolled") / np.maximum(1.0, c.plain("bindings.per_thread"))
    each = np.where(copies, 1.0 / np.maximum(1.0, c.plain("gpu.turns")), each)
    code = c.total(np.minimum(each, 1.0) * run / warps) * _INSTRUCTION_BYTES
    fetched = run * np.clip(code / _CODE_BYTES - 1.0, 0.0, 1.0)[k]
    # A copy to shared memory ends at a barrier, once for each of its stages.
    stored = np.maximum(1.0, c.plain("allocation.stored_bytes"))
    copied = c.plain("loops.iterations") * c.plain("dtype.bytes") / blocks[k] / stored
    copied = np.where(copies, copied, 0.0)
    stage = copied * (rounds / clock)[k] * _MEMORY_CYCLES
    piped = c.raw("gpu.pipelined") > 0
    # Copies of a loop that stays wait for each other, the more so behind a condition.
    turns = np.where(copies, c.plain("gpu.turns"), 0.0) * (rounds / clock)[k] * _L2_CYCLES
    guarded = c.raw("structure.predicates") + c.raw("code.guards") > 0
    by_leaf = [
        math * busiest / _ISSUE, asked * busiest / _ISSUE,
        c.plain("arithmetic.address_operations") / 32 * busiest / _ISSUE,
        passes * busiest / _L1_PASSES, waves * busiest / _WAVEFRONTS,
        missed * busiest / _L2_SECTORS, math * alone * _ARITHMETIC_CYCLES,
        waves * alone * _SHARED_CYCLES, asked_global * alone * _L1_CYCLES,
        missed / width * alone * _MEMORY_CYCLES,
        c.plain("bindings.per_thread") * (rounds / clock)[k],
        lost * busiest * 4 / _L1_SECTORS, lost_far * busiest * 4 / _L2_SECTORS,
        lost * alone * _L1_CYCLES, lost_far * alone * _MEMORY_CYCLES, loose * busiest,
        looser * busiest, loose * alone * _L1_CYCLES, looser * alone * _L1_CYCLES,
        np.where(piped, 0.0, stage), np.where(piped, stage, 0.0),
        fetched * busiest / _ISSUE, fetched * alone * _ARITHMETIC_CYCLES,
        np.where(guarded, 0.0, turns), np.where(guarded, turns, 0.0),
    ]  # fmt: skip
    leaf_s = sum(by_leaf[:6]) + (by_leaf[8] + by_leaf[9]) / 8 + by_leaf[11] + by_leaf[12] + 1e-12
    weight = c.total(np.asarray(leaf_s))

    def mean(values: Floats) -> Floats:
        return c.kernels(values * weight) / c.kernels(weight)

    requests = np.maximum(1.0, c.whole(asked))
    terms = [
        mean(fits), mean(fits * warps_each), np.log(mean(rounds)),
        mean(blocks / (units * np.ceil(blocks / units))), mean(registers), mean(spilled), mean(far),
        mean(c.most(piped.astype(np.float64))), np.log1p(mean(4 * own)), np.log1p(mean(shared)),
        np.log(mean(blocks)), np.log(mean(threads)), c.whole(sectors) / requests,
        c.whole(passes) / requests, c.whole(waves) / requests,
        np.log1p(c.table.total("flops") / (1 + 32 * c.whole(sectors))),
        np.log1p(mean(straight)), np.log(mean((1 + straight) / (1 + asked_unroll))),
        np.log1p(mean(code)),
    ]  # fmt: skip
    slow = np.ones(len(c.table))
    np.maximum.at(slow, c.owner, np.minimum(4.0, units / blocks))
    return GpuParts(
        np.stack(by_leaf, 1), c.kernels(blocks * _DISPATCH_S), np.stack(terms, 1),
        slow,
    )  # fmt: skip
