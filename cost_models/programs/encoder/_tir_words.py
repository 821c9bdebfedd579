"""Words of a saved TIR module and their codes, found by hash while its JSON text is scanned.

A node of the text becomes a row of ten integers: eight slots for the fields that matter, its kind
and, for a number, its value. Which field goes to which slot is listed here, and nowhere else.
"""

from __future__ import annotations

import numpy as np

#: Columns of a row beside the slots 0 to 7.
KIND, VALUE = 8, 9
COLUMNS = 10

#: Field to slot. Fields of one kind of node never share a slot. Node types that have fields not
#: listed lose them; what a leaf vector is made of is all here.
SLOT_A, SLOT_B, SLOT_C, SLOT_D, SLOT_E, SLOT_F, SLOT_G, SLOT_H = range(8)
_FIELDS = {
    "a": SLOT_A, "b": SLOT_B, "value": SLOT_A, "ty": SLOT_G, "name": SLOT_E,
    "condition": SLOT_C, "true_value": SLOT_A, "false_value": SLOT_B,
    "then_case": SLOT_A, "else_case": SLOT_B,
    "min": SLOT_A, "extent": SLOT_B, "body": SLOT_C, "kind": SLOT_D, "thread_binding": SLOT_E,
    "annotations": SLOT_F, "loop_var": SLOT_H,
    "iter_values": SLOT_A, "block": SLOT_B, "predicate": SLOT_D,
    "iter_vars": SLOT_A, "init": SLOT_E,
    "dom": SLOT_B, "var": SLOT_H, "iter_type": SLOT_D, "thread_tag": SLOT_E,
    "buffer": SLOT_E, "source": SLOT_E, "indices": SLOT_B,
    "dtype": SLOT_A, "shape": SLOT_B, "storage_scope": SLOT_D,
    "params": SLOT_D, "op": SLOT_A, "args": SLOT_B, "seq": SLOT_A, "functions": SLOT_A,
}  # fmt: skip

_TYPES = (
    "ffi.Array", "ffi.Map", "ffi.String", "ir.Op", "int", "bool",
    "ir.IRModule", "tirx.PrimFunc", "tirx.For", "tirx.SeqStmt", "tirx.IfThenElse",
    "tirx.BufferStore", "s_tir.SBlock", "s_tir.SBlockRealize", "tirx.IterVar", "ir.Range",
    "ir.PrimType", "tirx.BufferType", "ir.Var", "ir.IntImm", "ir.FloatImm", "ir.TensorLoad",
    "ir.Call", "prim.Cast", "prim.Select", "prim.Add", "prim.Sub", "prim.Mul", "prim.Div",
    "prim.Mod", "prim.FloorDiv", "prim.FloorMod", "prim.Min", "prim.Max", "prim.EQ", "prim.NE",
    "prim.LT", "prim.LE", "prim.GT", "prim.GE", "prim.And", "prim.Or", "prim.Not", "tirx.Bind",
)  # fmt: skip
(
    ARRAY, MAP, STRING, OP, INT, BOOL,
    MODULE, FUNCTION, FOR, SEQUENCE, BRANCH,
    STORE, BLOCK, REALIZE, ITERATOR, RANGE,
    PRIMITIVE, BUFFER_TYPE, VARIABLE, INTEGER, FLOATING, LOAD,
    CALL, CAST, SELECT, ADD, SUB, MUL, DIV,
    MOD, FLOOR_DIV, FLOOR_MOD, MIN, MAX, EQ, NE,
    LT, LE, GT, GE, AND, OR, NOT, BIND,
) = range(1, len(_TYPES) + 1)  # fmt: skip

#: Data types: bytes of an element, and whether it is floating (2 = bfloat16).
_DTYPES = {
    "float64": (8, 1), "float32": (4, 1), "float16": (2, 1), "bfloat16": (2, 2),
    "float8_e4m3fn": (1, 1), "float8_e5m2": (1, 1),
    "int64": (8, 0), "uint64": (8, 0), "int32": (4, 0), "uint32": (4, 0), "int16": (2, 0),
    "uint16": (2, 0), "int8": (1, 0), "uint8": (1, 0), "bool": (1, 0),
}  # fmt: skip

#: Functions by price: 1 a few instructions (roots, exponentials in hardware), 2 a polynomial or
#: more, 3 a choice between values, 4 nothing, 5 a call of the C library,
#: 6 the same, but a product or nothing where the second argument is two or one.
_FUNCTIONS = {
    "exp": 1, "exp2": 1, "log": 1, "log2": 1, "sqrt": 1, "rsqrt": 1, "fabs": 4, "floor": 4,
    "ceil": 4, "round": 4, "nearbyint": 4, "trunc": 4, "fma": 4,
    "erf": 2, "tanh": 2, "sigmoid": 2, "pow": 6, "sin": 5, "cos": 5, "tan": 5, "exp10": 5,
    "log10": 5, "log1p": 5, "atan": 5, "atan2": 5, "sinh": 5, "cosh": 5, "asin": 5, "acos": 5,
    "if_then_else": 3, "likely": 4, "reinterpret": 4, "isnan": 4, "isinf": 4, "isfinite": 4,
}  # fmt: skip

_TAGS = (
    "blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z",
    "vthread", "vthread.x", "vthread.y", "vthread.z",
)  # fmt: skip
_SCOPES = ("global", "shared", "local", "shared.dyn", "warp", "")
_OTHERS = ("root_index", "nodes", "type", "data", "pragma_auto_unroll_max_step",
           "software_pipeline_stage")  # fmt: skip

#: The operator of a call and its price; TVM 0.27 names the choice as it names operators.
_CALLS = {f"tirx.{name}": price for name, price in _FUNCTIONS.items()} | {"prim.if_then_else": 3}
WORDS: tuple[str, ...] = tuple(
    dict.fromkeys((*_FIELDS, *_TYPES, *_DTYPES, *_CALLS, *_TAGS, *_SCOPES, *_OTHERS))
)
_CODE = {word: code for code, word in enumerate(WORDS)}
ROOT_INDEX, NODES, TYPE, DATA, UNROLL_STEP, PIPELINE = (_CODE[word] for word in _OTHERS)


def _by_code(entries: dict[str, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Table from code to number, -1 where the word has none, one more row for unknown words."""
    table = np.full(len(WORDS) + 1, -1, dtype=np.int64)
    for word, number in entries.items():
        table[_CODE[word]] = number
    return table


SLOT_OF = _by_code(_FIELDS)
KIND_OF = _by_code({word: number for number, word in enumerate(_TYPES, 1)})
BYTES_OF = _by_code({word: size for word, (size, _) in _DTYPES.items()})
FLOATING_OF = _by_code({word: floating for word, (_, floating) in _DTYPES.items()})
PRICE_OF = _by_code(_CALLS)
#: 0 to 2 block axes, 3 to 5 thread axes, 6 virtual threads.
TAG_OF = _by_code({word: min(number, 6) for number, word in enumerate(_TAGS)})
#: 0 global, 1 shared by the threads of a block, 2 of one thread.
SCOPE_OF = _by_code({"global": 0, "": 0, "shared": 1, "shared.dyn": 1, "local": 2, "warp": 2})

HASH_SEED, HASH_PRIME = 2166136261, 16777619
TABLE_BITS = 13


def _hash(word: str) -> int:
    value = HASH_SEED
    for byte in word.encode():
        value = ((value ^ byte) * HASH_PRIME) & 0xFFFFFFFF
    return value


def _table() -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Rows (hash, code) at the hash's low bits; words must not meet there."""
    table = np.full((1 << TABLE_BITS, 2), -1, dtype=np.int64)
    for code, word in enumerate(WORDS):
        row = table[_hash(word) & ((1 << TABLE_BITS) - 1)]
        if row[1] >= 0:
            raise AssertionError(f"words meet in the table: {word}, {WORDS[row[1]]}")
        row[:] = _hash(word), code
    return table


TABLE = _table()
