"""Write data/tir_examples.jsonl: programs small enough to be computed by hand (needs TVM).

Run from this folder: python make_tir_examples.py
"""

from __future__ import annotations

import json
from pathlib import Path

from foreplan.datasets.tir.task import encode_module
from foreplan.datasets.tir.toolchain import load_tvm

tvm = load_tvm()
te = tvm.te


def _gemm(n=64, m=32, k=128):
    a = te.placeholder((n, k), "float32", name="A")
    b = te.placeholder((k, m), "float32", name="B")
    r = te.reduce_axis((0, k), "k")
    c = te.compute((n, m), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="C")
    return tvm.s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, b, c])}))


def gemm():
    return _gemm().mod


def gemm_tiled():
    s = _gemm()
    block = s.get_sblock("C")
    i, j, k = s.get_loops(block)
    i0, i1 = s.split(i, [None, 8])
    j0, j1 = s.split(j, [None, 16])
    s.reorder(i0, j0, k, i1, j1)
    s.parallel(i0)
    s.vectorize(j1)
    s.decompose_reduction(block, k)
    return s.mod


def reduction():
    a = te.placeholder((16, 256), "float16", name="A")
    r = te.reduce_axis((0, 256), "k")
    c = te.compute((16,), lambda i: te.max(a[i, r], axis=r), name="C")
    s = tvm.s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, c])}))
    s.unroll(s.get_loops(s.get_sblock("C"))[0])
    return s.mod


def chain():
    a = te.placeholder((1000,), "float32", name="A")
    b = te.compute((1000,), lambda i: tvm.tirx.exp(a[i]) + a[i] * 2.0, name="B")
    c = te.compute((1000,), lambda i: tvm.tirx.Select(b[i] > 0.5, b[i], 0.0), name="C")
    s = tvm.s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, c])}))
    loop = s.get_loops(s.get_sblock("C"))[0]
    _, inner = s.split(loop, [None, 64])  # 16 x 64 = 1024: a predicate keeps 24 out
    s.unroll(inner)
    return s.mod


def cuda():
    s = _gemm()
    block = s.get_sblock("C")
    shared = s.cache_read(block, 0, "shared")
    local = s.cache_write(block, 0, "local")
    i, j, k = s.get_loops(block)
    i0, i1 = s.split(i, [None, 16])
    j0, j1 = s.split(j, [None, 8])
    k0, k1 = s.split(k, [None, 32])
    s.reorder(i0, j0, i1, j1, k0, k1)
    s.bind(s.fuse(i0, j0), "blockIdx.x")
    thread = s.fuse(i1, j1)
    s.bind(thread, "threadIdx.x")
    s.reverse_compute_at(local, thread)
    s.compute_at(shared, k0)
    fill = s.fuse(*s.get_loops(shared)[3:])
    _, lane = s.split(fill, [None, 128])
    s.bind(lane, "threadIdx.x")
    return s.mod


def _rows(threads):
    """A product whose thread keeps two rows and ``threads`` columns, far from each other."""
    s = _gemm()
    block = s.get_sblock("C")
    local = s.cache_write(block, 0, "local")
    i, j, k = s.get_loops(block)
    i0, i1 = s.split(i, [None, 2])
    virtual, lane = s.split(j, [threads, None])
    s.reorder(i0, virtual, lane, k, i1)
    s.bind(i0, "blockIdx.x")
    s.bind(virtual, "vthread.x")
    s.bind(lane, "threadIdx.x")
    s.reverse_compute_at(local, lane)
    return s.mod


def few_virtual_threads():
    return _rows(4)


def many_virtual_threads():
    return _rows(16)


def _copy(width):
    a = te.placeholder((16, 160, 7, 7), "float32", name="A")
    b = te.compute((16, 160, 7, 7), lambda *i: a(*i), name="B")
    s = tvm.s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, b])}))
    block = s.get_sblock("B")
    outer, inner = s.split(s.fuse(*s.get_loops(block)), [None, width])
    s.parallel(outer)
    s.vectorize(inner)
    return s.mod


def copy_joined():
    return _copy(64)


def copy_scattered():
    return _copy(16)


def _merge(width):
    a = te.placeholder((2, 960, 9, 9), "float32", name="A")

    def merged(c, y, x):
        return a(tvm.tirx.floordiv(c, 960), tvm.tirx.floormod(c, 960), y, x)

    b = te.compute((1920, 9, 9), merged, name="B")
    s = tvm.s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, b])}))
    outer, inner = s.split(s.fuse(*s.get_loops(s.get_sblock("B"))), [None, width])
    s.parallel(outer)
    s.vectorize(inner)
    return s.mod


def merge_joined():
    return _merge(128)


def merge_scattered():
    return _merge(64)


def pad_of_root():
    a = te.placeholder((8, 56, 56), "float32", name="A")
    v = te.placeholder((8,), "float32", name="V")

    def padded(c, i, j):
        inside = tvm.tirx.all(i >= 1, i < 57, j >= 1, j < 57)
        value = a[c, i - 1, j - 1] / tvm.tirx.sqrt(v[c])
        return tvm.tirx.if_then_else(inside, value, tvm.tirx.const(0.0, "float32"))

    b = te.compute((8, 58, 58), padded, name="B")
    return tvm.IRModule({"main": te.create_prim_func([a, v, b])})


def pad():
    a = te.placeholder((8, 56, 56), "float32", name="A")

    def padded(c, i, j):
        inside = tvm.tirx.all(i >= 1, i < 57, j >= 1, j < 57)
        value = tvm.tirx.exp(a[c, i - 1, j - 1])
        return tvm.tirx.if_then_else(inside, value, tvm.tirx.const(0.0, "float32"))

    b = te.compute((8, 58, 58), padded, name="B")
    return tvm.IRModule({"main": te.create_prim_func([a, b])})


def _power(width):
    a = te.placeholder((4096,), "float32", name="A")

    def scaled(i):  # the power changes with every 128th element
        exponent = tvm.tirx.floordiv(tvm.tirx.floormod(i, 1024), 128)
        base = tvm.tirx.const(10000.0, "float32")
        return a[i] * tvm.tirx.power(base, exponent.astype("float32"))

    b = te.compute((4096,), scaled, name="B")
    s = tvm.s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, b])}))
    outer, inner = s.split(s.get_loops(s.get_sblock("B"))[0], [None, width])
    s.parallel(outer)
    s.vectorize(inner)
    return s.mod


def power_once():
    return _power(64)


def power_by_lane():
    return _power(256)


def _row_sums(width):
    """Each of 64 threads sums a row."""
    a = te.placeholder((64, width), "float32", name="A")
    r = te.reduce_axis((0, width), "k")
    c = te.compute((64,), lambda i: te.sum(a[i, r], axis=r), name="C")
    s = tvm.s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, c])}))
    block, length = s.split(s.get_loops(s.get_sblock("C"))[0], [1, 64])
    s.bind(block, "blockIdx.x")
    s.bind(length, "threadIdx.x")
    return s.mod


def rows_of_whole_lines():
    return _row_sums(128)


def rows_of_odd_length():
    return _row_sums(49)


def rows_that_stay_loops():
    return _row_sums(1024)


def _columns(together):
    """A product whose thread has four columns, with B in shared memory."""
    s = _gemm()
    block = s.get_sblock("C")
    shared = s.cache_read(block, 1, "shared")
    i, j, k = s.get_loops(block)
    first, second = s.split(j, [8, 4] if together else [4, 8])
    lane, column = (first, second) if together else (second, first)
    s.reorder(i, lane, k, column)
    s.bind(i, "blockIdx.x")
    s.bind(lane, "threadIdx.x")
    s.compute_at(shared, i)
    _, filler = s.split(s.get_loops(shared)[-1], [None, 8])
    s.bind(filler, "threadIdx.x")
    return s.mod


def columns_together():
    return _columns(True)


def columns_apart():
    return _columns(False)


def _columns_of_its_own(columns):
    """A product of 1,024 terms whose thread sums so many columns in its own memory."""
    s = _gemm(m=2 * columns, k=1024)
    block = s.get_sblock("C")
    local = s.cache_write(block, 0, "local")
    i, j, k = s.get_loops(block)
    lane, column = s.split(j, [2, columns])
    s.reorder(i, lane, k, column)
    s.bind(i, "blockIdx.x")
    s.bind(lane, "threadIdx.x")
    s.reverse_compute_at(local, lane)
    return s.mod


def few_columns_of_its_own():
    return _columns_of_its_own(4)


def many_columns_of_its_own():
    return _columns_of_its_own(64)


if __name__ == "__main__":
    lines = []
    for build in (
        gemm, gemm_tiled, reduction, chain, cuda, copy_joined, copy_scattered, pad, merge_joined,
        merge_scattered, power_once, power_by_lane, pad_of_root, few_virtual_threads,
        many_virtual_threads, rows_of_whole_lines, rows_of_odd_length, columns_together,
        columns_apart, rows_that_stay_loops, few_columns_of_its_own, many_columns_of_its_own,
    ):  # fmt: skip
        module = build()
        print(module.script())
        text = tvm.ir.save_json(module)
        lines.append(json.dumps({"name": build.__name__, "mod": encode_module(text)}))
    folder = Path(__file__).parent / "data"
    (folder / "tir_examples.jsonl").write_text("\n".join(lines) + "\n")
