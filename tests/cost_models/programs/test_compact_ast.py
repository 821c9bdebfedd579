"""Computation vectors against values computed by hand from the programs in make_tir_examples.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from foreplan.cost_models.programs.compact_ast import FEATURE_NAMES, CompactAst, CompactAstEncoder
from foreplan.cost_models.programs.encoder._tir_compiled import part
from foreplan.datasets.tir.task import decode_module
from foreplan.errors import SpecError

_LINES = (Path(__file__).parents[1] / "data" / "tir_examples.jsonl").read_text().splitlines()
TEXTS = {line["name"]: decode_module(line["mod"]) for line in map(json.loads, _LINES)}


@pytest.fixture(scope="module")
def encoder() -> CompactAstEncoder:
    return CompactAstEncoder()


def check(ast: CompactAst, leaf: int, **expected: float) -> None:
    """Entries of a leaf; magnitudes are given plain and stored as log2(1 + x)."""
    plain = (
        "loops.loops", "bindings.kernel", "dtype.floating", "dtype.bfloat16", "block.mode",
        "block.crooked",
    )  # fmt: skip
    flags = ("shared", "local", "indirect", "present")
    counted = ("code.inner", "code.lane", "code.guards", "code.peeled", "code.outer", "code.sums")
    for name, value in expected.items():
        name = name.replace("__", ".")
        found = float(ast.leaves[leaf, FEATURE_NAMES.index(name)])
        raw = name in plain or name.split(".")[1] in flags
        raw = raw or (name.startswith(counted) and name != "code.inner_starts")
        raw = raw or (name.startswith("structure.") and name != "structure.overhang")
        wanted = value if raw else math.log2(1 + value)
        assert found == pytest.approx(wanted, rel=1e-5), f"{name} of leaf {leaf}"


def test_gemm(encoder: CompactAstEncoder) -> None:
    ast = encoder.encode(TEXTS["gemm"])  # 64 x 32 x 128, fp32
    assert ast.position.tolist() == [4, 5]  # three loops, init, update
    assert ast.depth.tolist() == [4, 4]
    check(ast, 0, loops__iterations=64 * 32, structure__is_init=1, arithmetic__adds=0)
    n = 64 * 32 * 128
    check(
        ast, 1, arithmetic__adds=n, arithmetic__products=n, arithmetic__flops_per_iteration=2,
        dtype__floating=1, dtype__bytes=4, loops__iterations=n, loops__loops=3, loops__serial=n,
        loops__parallel=1, loops__vectorized=1, loops__innermost=128, loops__second_innermost=32,
        loops__reduction=128, loops__spatial=2048, structure__reduces=1,
        structure__reads_own_result=1, structure__is_init=0,
    )  # fmt: skip
    # A (64 x 128) comes first of the loads: it has more distinct bytes than B (128 x 32).
    check(
        ast, 1, store__unique_bytes=64 * 32 * 4, load0__unique_bytes=64 * 128 * 4,
        load1__unique_bytes=128 * 32 * 4, store__bytes=2 * n * 4, load0__bytes=n * 4,
        store__stride_inner=0, load0__stride_inner=1, load1__stride_inner=32,
        load0__unique_lines=64 * 128 * 4 / 64, load2__present=0,
    )  # fmt: skip
    # Reuse: C over k (three elements between), A over j (a row, a column, one), B over i.
    # Bytes are whole lines of 64: a column of B touches 128 of them.
    row = 4 * 128 + 64 * 128 + 64
    plane = 4 * (128 + 128 * 32 + 32)
    check(
        ast, 1, store__reuse=128, store__reuse_distance_bytes=192, load0__reuse=32,
        load0__reuse_distance_bytes=row, load1__reuse=64, load1__reuse_distance_bytes=plane,
    )  # fmt: skip
    # 57,344 bytes in all; an i-plane has 17,024, an (i, j) pair 8,768.
    check(
        ast, 1, memory__unique_bytes=57344, memory__traffic_16384=row * 64 * 32,
        memory__traffic_32768=plane * 64, memory__traffic_262144=57344,
        memory__intensity_unique=2 * n / 57344, memory__crowded_l1=plane * 64,
        memory__crowded_l2=57344,
    )  # fmt: skip
    assert ast.total("flops") == 2 * n
    assert ast.total("argument_bytes") == 57344
    assert (ast.total("scratch_bytes"), ast.total("kernels")) == (0, 1)


def test_gemm_tiled_parallel_vectorized(encoder: CompactAstEncoder) -> None:
    ast = encoder.encode(TEXTS["gemm_tiled"])
    assert ast.position.tolist() == [5, 9]
    assert ast.depth.tolist() == [5, 6]
    n = 64 * 32 * 128
    check(ast, 0, loops__iterations=64 * 32, loops__vectorized=16, loops__parallel=8)
    check(
        ast, 1, loops__iterations=n, loops__parallel=8, loops__vectorized=16,
        loops__serial=2 * 128 * 8, loops__per_job=n / 8, loops__innermost=16,
        loops__second_innermost=8, store__stride_lane=1, load0__stride_lane=0,
        load1__stride_lane=1, store__job_bytes=8 * 32 * 4, load0__job_bytes=8 * 128 * 4,
        load1__job_bytes=128 * 32 * 4, load0__reuse=16, store__reuse=128,
        store__reuse_distance_bytes=64 * (8 + 8 + 1), store__unique_bytes=64 * 32 * 4,
        arithmetic__adds=n,
    )  # fmt: skip
    # v_i = i_0 * 8 + i_1 and v_j = j_0 * 16 + j_1 in the store, the loads and the own result.
    per_iteration = ast.leaves[1, FEATURE_NAMES.index("arithmetic.address_operations")]
    assert 2**per_iteration - 1 == pytest.approx(n * 2 * 6, rel=1e-5)
    assert ast.total("parallel") == 8


def test_reduction(encoder: CompactAstEncoder) -> None:
    ast = encoder.encode(TEXTS["reduction"])  # max over 256 of 16 rows, fp16
    assert ast.position.tolist() == [3, 4]
    check(ast, 0, loops__iterations=16, structure__is_init=1)
    check(
        ast, 1, arithmetic__choices=4096, loops__unrolled=16, loops__reduction=256,
        dtype__bytes=2, store__unique_bytes=32, load0__unique_bytes=8192,
        load0__unique_lines=128, load0__element_bytes=2, store__reuse=256,
    )  # fmt: skip
    assert ast.total("main_dtype_bytes") == 2


def test_elementwise_chain(encoder: CompactAstEncoder) -> None:
    ast = encoder.encode(TEXTS["chain"])  # exp(a) + 2 a, then a select in 16 x 64 >= 1000 steps
    assert ast.position.tolist() == [2, 5]
    assert ast.depth.tolist() == [2, 3]
    check(
        ast, 0, arithmetic__cheap_functions=1000, arithmetic__adds=1000, arithmetic__products=1000,
        structure__predicates=0, load0__accesses=2, load0__bytes=8000, load0__unique_bytes=4000,
        allocation__stored_bytes=4000,
    )  # fmt: skip
    check(
        ast, 1, loops__iterations=1024, arithmetic__choices=2048, structure__predicates=1,
        structure__overhang=0.024, loops__unrolled=64, load0__unique_bytes=4000,
        allocation__stored_bytes=0,
    )  # fmt: skip
    assert ast.total("argument_bytes") == 8000
    assert ast.total("scratch_bytes") == 4000
    assert ast.total("function_calls") == 1000


def test_what_a_compiler_makes_of_products(encoder: CompactAstEncoder) -> None:
    n = 64 * 32 * 128
    check(
        encoder.encode(TEXTS["gemm"]), 1, code__sums_innermost=1, code__independent_sums=1,
        code__chained=n, code__inner_starts=n / 128, code__inner_staying=1, code__inner_next=1,
        code__inner_jumping=1, code__inner_store=0, code__flops=2 * n, code__repeated=0,
    )  # fmt: skip
    # 8 x 16 sums are updated for each k; along the vector loop only A stays.
    check(
        encoder.encode(TEXTS["gemm_tiled"]), 1, code__sums_innermost=0, code__independent_sums=128,
        code__chained=n / 128, code__lane_store=1, code__lane_staying=1, code__lane_next=2,
    )  # fmt: skip


def test_the_block_of_a_product_that_nobody_tiled_is_one_sum(encoder: CompactAstEncoder) -> None:
    # 128 turns of seven instructions are too many to unroll; the sum stays in its register.
    n = 64 * 32 * 128
    check(
        encoder.encode(TEXTS["gemm"]), 1, block__mode=3, block__lanes=1, block__crooked=0,
        block__bodies=n, block__operations=n, block__beside=2 * n, block__results=2 * 64 * 32,
        block__carried=127, block__registers=1, block__chained=n, block__gathered=0,
    )  # fmt: skip


def test_the_block_of_a_tiled_product_is_rows_of_vectors(encoder: CompactAstEncoder) -> None:
    # For each k and tile eight rows of 16 sums, two registers each, that k keeps where they are.
    n, bodies = 64 * 32 * 128, 8 * 2 * 128
    check(
        encoder.encode(TEXTS["gemm_tiled"]), 1, block__mode=0, block__lanes=16, block__crooked=0,
        block__bodies=bodies, block__iterations=128, block__operations=n / 8,
        block__registers=16, block__carried=127, block__broadcast=8 * bodies,
        block__beside=2 * bodies, block__gathered=0, block__apart=0, block__chained=bodies,
        block__results=2 * 16 * 8 * 2, block__spilled=2 * bodies,
    )  # fmt: skip


def test_indices_that_tvm_does_not_join_are_scattered(encoder: CompactAstEncoder) -> None:
    # 16 divides 7840 and not 49 or 7: x // 7840 is simplified, the rest is not. 64 divides none.
    check(encoder.encode(TEXTS["copy_scattered"]), 0, code__lane_store=3, code__lane_scattered=1)
    check(encoder.encode(TEXTS["copy_joined"]), 0, code__lane_store=1, code__lane_next=1)
    # Channels x // 81 of two images of 960: x // 77760 is what 64 divides and 128 does not.
    check(encoder.encode(TEXTS["merge_scattered"]), 0, code__lane_store=1, code__lane_scattered=1)
    check(encoder.encode(TEXTS["merge_joined"]), 0, code__lane_store=1, code__lane_next=1)


def test_a_condition_with_two_ends_guards_its_loop(encoder: CompactAstEncoder) -> None:
    ast = encoder.encode(TEXTS["pad"])
    check(
        ast, 0, code__guards=1, code__peeled=0, code__outer_conditions=1,
        code__functions=8 * 58 * 58, code__inner_starts=8 * 58,
    )  # fmt: skip


def test_behind_a_guard_nothing_that_is_loaded_is_moved_out_of_the_loop(
    encoder: CompactAstEncoder,
) -> None:
    n = 8 * 58 * 58  # the root of V[c] is the same along i and j, and is taken for each of them
    check(
        encoder.encode(TEXTS["pad_of_root"]), 0, code__guards=1, code__functions=n,
        code__quotients=n, arithmetic__cheap_functions=n,
    )  # fmt: skip


def test_a_function_of_what_all_lanes_share_is_computed_once(encoder: CompactAstEncoder) -> None:
    # x % 1024 // 128 is the same in 64 lanes, and takes two values in 256: 64 or 4096 powers.
    once, by_lane = encoder.encode(TEXTS["power_once"]), encoder.encode(TEXTS["power_by_lane"])
    for ast, powers in ((once, 64), (by_lane, 4096)):
        check(
            ast, 0, code__functions=powers, arithmetic__called_functions=powers,
            code__flops=4096, arithmetic__products=4096,
        )  # fmt: skip


def test_cuda_bindings(encoder: CompactAstEncoder) -> None:
    ast = encoder.encode(TEXTS["cuda"])
    assert ast.position.tolist() == [6, 8, 9, 10]  # fill, init, update, write back
    assert ast.depth.tolist() == [6, 5, 5, 3]
    n = 64 * 32 * 128
    # The copy runs on the block's own 128 threads, not on 128 times as many.
    check(
        ast, 0, loops__iterations=16 * 4 * 4 * 128, bindings__blocks=16, bindings__threads_x=128,
        bindings__per_thread=16, store__shared=1, load0__shared=0, allocation__stored_bytes=2048,
        store__stride_lane=1, load0__stride_lane=1, bindings__kernel=1,
    )  # fmt: skip
    check(ast, 1, loops__iterations=64 * 32, structure__is_init=1)
    check(
        ast, 2, arithmetic__adds=n, bindings__blocks=16, bindings__threads_x=128,
        bindings__per_thread=128, store__local=1, allocation__local_bytes=4,
        allocation__shared_bytes=2048, loops__reduction=128, loops__innermost=32,
    )  # fmt: skip
    # B (16,384 distinct bytes, global) and the tile of A (32,768 over the run, shared).
    check(
        ast, 2, load0__shared=1, load0__stride_inner=1, load0__stride_lane=0,
        load0__thread_bytes=512, load1__shared=0, load1__stride_inner=32, load1__stride_lane=1,
        load1__job_bytes=128 * 8 * 4,
    )  # fmt: skip
    check(ast, 3, loops__iterations=64 * 32, store__shared=0, load0__local=1)
    totals = {"flops": 2 * n, "argument_bytes": 57344, "kernels": 1, "blocks": 16, "threads": 128}
    totals |= {"shared_bytes": 2048, "local_bytes": 4, "scratch_bytes": 0, "leaves": 4}
    for name, value in totals.items():
        assert ast.total(name) == value, name


def test_virtual_threads_are_the_innermost_loop(encoder: CompactAstEncoder) -> None:
    """Two rows and so many columns, as far apart as there are lanes, are a thread's own."""
    for name, columns in (("few_virtual_threads", 4), ("many_virtual_threads", 16)):
        ast = encoder.encode(TEXTS[name])
        update = 1  # after the init, before the result is written
        # A sum that is stored where it is loaded lies there once, however its columns are strewn.
        # Of 128 terms of two rows, two rows are straight code for each term: 2 x columns.
        check(
            ast, update, bindings__virtual_threads=columns, allocation__local_bytes=8 * columns,
            gpu__straight=2 * columns, gpu__unrolled=2 * columns, gpu__indexed=0,
            gpu__turns=128 * 2,
        )  # fmt: skip


def test_an_l1_cache_gives_one_sector_of_each_place_in_a_line_at_a_time(
    encoder: CompactAstEncoder,
) -> None:
    """A warp reads 32 rows: at whole lines apart all lie at one place, at 49 words at each."""
    for name, width, passes in (("rows_of_whole_lines", 128, 32), ("rows_of_odd_length", 49, 8)):
        # Two warps: 32 sectors a term, and a line of results (four sectors, one pass).
        check(
            encoder.encode(TEXTS[name]), 1, gpu__warps=2, gpu__requests=2 * (width + 1),
            gpu__sectors=2 * (32 * width + 4), gpu__passes=2 * (passes * width + 1),
        )  # fmt: skip


def test_a_sum_stays_in_a_register_while_a_loop_of_its_terms_runs(
    encoder: CompactAstEncoder,
) -> None:
    """Of 1,024 terms, too many for straight code, each is loaded and a result is stored once."""
    # Two warps: 32 sectors a term, at one place of their lines, and a line of results.
    check(
        encoder.encode(TEXTS["rows_that_stay_loops"]), 1, gpu__warps=2,
        gpu__requests=2 * (1024 + 1), gpu__sectors=2 * (32 * 1024 + 4),
        gpu__passes=2 * (32 * 1024 + 1),
    )  # fmt: skip
    blocks, terms = 64, 1024  # a warp in each block
    for name, columns, turns in (("few_columns", 4, 1), ("many_columns", 64, terms)):
        # A term of A is one load for all columns; so many as 64 sums are no longer kept.
        check(
            encoder.encode(TEXTS[f"{name}_of_its_own"]), 1, gpu__unrolled=columns,
            gpu__requests=blocks * terms * (1 + columns),
            gpu__own_requests=blocks * columns * turns,
        )  # fmt: skip


def test_neighbours_in_shared_memory_are_loaded_together(encoder: CompactAstEncoder) -> None:
    """Of 128 x 4 unrolled terms four are one load of 16 bytes if the thread's columns lie so."""
    update, blocks, terms = 2, 64, 128  # a warp of 8 lanes in each block
    for name, together in (("columns_together", 4), ("columns_apart", 1)):
        loads = 4 * terms / together  # of B; A is loaded once a term, a result once
        check(
            encoder.encode(TEXTS[name]), update, gpu__unrolled=4 * terms, gpu__warps=blocks,
            gpu__requests=blocks * (loads + terms + 4), gpu__wavefronts=blocks * loads,
        )  # fmt: skip


def test_same_result_from_any_layout_of_the_text(encoder: CompactAstEncoder) -> None:
    pretty = json.dumps(json.loads(TEXTS["cuda"]), indent=2, sort_keys=True)
    first, second = encoder.encode(TEXTS["cuda"]), encoder.encode(pretty)
    np.testing.assert_array_equal(first.leaves, second.leaves)
    np.testing.assert_array_equal(first.totals, second.totals)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[1, 2", b"not json", b'{"root_index": 99, "nodes": []}', TEXTS["gemm"][:-40]],
)
def test_damaged_text_is_refused(encoder: CompactAstEncoder, text: bytes) -> None:
    with pytest.raises(SpecError, match="file:3"):
        encoder.encode(text, "file:3")


def test_unknown_dtype_and_dynamic_loop_are_refused(encoder: CompactAstEncoder) -> None:
    odd = TEXTS["gemm"].replace(b'"dtype":"float32"', b'"dtype":"posit32"')
    with pytest.raises(SpecError, match="data types among"):
        encoder.encode(odd)


def test_damaged_references_do_not_crash(encoder: CompactAstEncoder) -> None:
    document = json.loads(TEXTS["cuda"])
    generator = np.random.default_rng(0)
    for _ in range(300):
        nodes = json.loads(json.dumps(document["nodes"]))
        for number in generator.integers(0, len(nodes), 5):
            data = nodes[number].get("data")
            if isinstance(data, dict):
                key = list(data)[int(generator.integers(0, len(data)))]
                data[key] = int(generator.integers(-5, 2 * len(nodes)))
            elif isinstance(data, list) and data:
                data[0] = int(generator.integers(-5, 2 * len(nodes)))
        try:
            encoder.encode(json.dumps({**document, "nodes": nodes}))
        except SpecError:
            continue


def test_a_part_is_compiled_once_for_all_constants() -> None:
    @part
    def shifted(values: Any, by: int) -> Any:
        return values[0] + by

    @numba.njit
    def caller(values: Any) -> Any:
        total = 0  # a constant at first: numba's guess before it has seen the loop
        for turn in range(3):
            total = shifted(values, total) + shifted(values, 1) + shifted(values, turn)
        return total + shifted(values, 2)

    assert caller(np.ones(1, dtype=np.int64)) == 18
    assert len(shifted.signatures) == 1
