"""scan: JSON text of a saved TIR module to rows of integers, compiled.

Reads what ``tvm.ir.save_json`` writes, ``{"root_index": r, "nodes": [{"type": t, "data": d}]}``, in
any order of keys and with any white space. No TVM is needed.
"""

from __future__ import annotations

from typing import Any

from foreplan.cost_models.programs.encoder import _tir_words as w
from foreplan.cost_models.programs.encoder._tir_compiled import part

_TABLE, _SLOT_OF, _KIND_OF = w.TABLE, w.SLOT_OF, w.KIND_OF
_LOW_BITS = (1 << w.TABLE_BITS) - 1
_SEED, _PRIME, _UNKNOWN = w.HASH_SEED, w.HASH_PRIME, len(w.WORDS)
_KIND, _VALUE = w.KIND, w.VALUE
_ARRAY, _MAP, _STRING, _OP, _INT, _BOOL = w.ARRAY, w.MAP, w.STRING, w.OP, w.INT, w.BOOL
_PRIMITIVE = w.PRIMITIVE
_ROOT_INDEX, _NODES, _TYPE, _DATA = w.ROOT_INDEX, w.NODES, w.TYPE, w.DATA
_QUOTE, _BACKSLASH, _OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = 34, 92, 123, 125, 91, 93
_COMMA, _MINUS, _TRUE = 44, 45, 116
_LARGEST = 2**31 - 1


@part
def _blank(data: Any, at: int) -> Any:
    while at < data.size and data[at] <= 32:
        at += 1
    return at


@part
def _word(data: Any, at: int) -> Any:
    """Code of the string at ``at`` (on its opening quote) and the place after it."""
    value = _SEED
    at += 1
    while at < data.size and data[at] != _QUOTE:
        if data[at] == _BACKSLASH:
            at += 1
        value = ((value ^ data[at]) * _PRIME) & 0xFFFFFFFF
        at += 1
    row = value & _LOW_BITS
    code = _TABLE[row, 1] if _TABLE[row, 0] == value else _UNKNOWN
    return code, at + 1


@part
def _number(data: Any, at: int) -> Any:
    """Whole number at ``at`` and the place after it; a fraction or exponent is passed over."""
    sign, value = 1, 0
    if data[at] == _MINUS:
        sign = -1
        at += 1
    while at < data.size and 48 <= data[at] <= 57:
        value = min(value * 10 + data[at] - 48, _LARGEST)
        at += 1
    while at < data.size and data[at] not in (_COMMA, _CLOSE, _CLOSE_LIST) and data[at] > 32:
        at += 1
    return sign * value, at


@part
def _skip(data: Any, at: int) -> Any:
    """Place after the value at ``at``."""
    depth = 0
    while at < data.size:
        byte = data[at]
        if byte == _QUOTE:
            at = _word(data, at)[1]
        else:
            if byte in (_OPEN, _OPEN_LIST):
                depth += 1
            elif byte in (_CLOSE, _CLOSE_LIST):
                if depth == 0:
                    return at  # of a bare word or number before it
                depth -= 1
            elif byte == _COMMA and depth == 0:
                return at
            at += 1
        if depth == 0 and (byte in (_QUOTE, _CLOSE, _CLOSE_LIST)):
            return at
    return at


@part
def _fields(data: Any, at: int, row: Any) -> Any:
    """Fields of a node (``at`` on its brace) into slots; the place after it."""
    at = _blank(data, at + 1)
    while at < data.size and data[at] != _CLOSE:
        if data[at] == _COMMA:
            at = _blank(data, at + 1)
        code, at = _word(data, at)
        at = _blank(data, at)
        at = _blank(data, at + 1)  # the colon
        slot = _SLOT_OF[code]
        first = data[at]
        if first == _QUOTE:  # a data type
            value, at = _word(data, at)
        elif 48 <= first <= 57 or first == _MINUS:
            value, at = _number(data, at)
        else:
            value = 1 if first == _TRUE else 0
            at = _skip(data, at)
        if slot >= 0:
            row[slot] = value
        at = _blank(data, at)
    return at + 1


@part
def _list(data: Any, at: int, row: Any, pool: Any, used: int) -> Any:
    """Members of an array (``at`` on its bracket) into the pool; places after both."""
    start = used
    at = _blank(data, at + 1)
    while at < data.size and data[at] != _CLOSE_LIST:
        if data[at] == _COMMA:
            at = _blank(data, at + 1)
        before = at
        pool[used], at = _number(data, at)
        used += 1
        at = _blank(data, at if at > before else at + 1)  # a damaged text must end as well
    row[0], row[1] = start, used - start
    return at + 1, used


@part
def _datum(data: Any, at: int, row: Any, pool: Any, used: int) -> Any:
    """Datum of a node whose kind is known; places after it in text and pool."""
    kind, first = row[_KIND], data[at]
    if first == _OPEN:
        return _fields(data, at, row), used
    if first == _OPEN_LIST and (kind in (_ARRAY, _MAP)):
        return _list(data, at, row, pool, used)
    if first == _QUOTE:
        row[0], at = _word(data, at)
        return at, used
    if kind == _INT:
        row[_VALUE], at = _number(data, at)
        return at, used
    if kind == _BOOL:
        row[_VALUE] = 1 if first == _TRUE else 0
    return _skip(data, at), used


@part
def _node(data: Any, at: int, row: Any, pool: Any, used: int) -> Any:
    """One node (``at`` on its brace) into its row; places after it in text and pool."""
    datum = -1
    typed = False
    at = _blank(data, at + 1)
    while at < data.size and data[at] != _CLOSE:
        if data[at] == _COMMA:
            at = _blank(data, at + 1)
        code, at = _word(data, at)
        at = _blank(data, at)
        at = _blank(data, at + 1)
        if code == _TYPE:
            code, at = _word(data, at)
            row[_KIND] = _KIND_OF[code]
            typed = True
            if datum >= 0:
                used = _datum(data, datum, row, pool, used)[1]
        elif code == _DATA and typed:
            at, used = _datum(data, at, row, pool, used)
        elif code == _DATA:
            datum = at
            at = _skip(data, at)
        else:
            at = _skip(data, at)
        at = _blank(data, at)
    return at + 1, used


@part
def _settle(nodes: Any, count: int, used: int) -> None:
    """Make members lie in the pool and words in their tables, whatever a damaged text says."""
    for row in range(count):
        kind = nodes[row, _KIND]
        start, members = nodes[row, 0], nodes[row, 1]
        if kind in (_ARRAY, _MAP):
            if start < 0 or members < 0 or start > used - members:
                nodes[row, 0] = nodes[row, 1] = 0
        elif kind in (_STRING, _OP, _PRIMITIVE) and not 0 <= start <= _UNKNOWN:
            nodes[row, 0] = _UNKNOWN


@part
def scan(data: Any, nodes: Any, pool: Any) -> Any:
    """Fill ``nodes`` and ``pool`` from the text.

    Args:
        data: uint8 (bytes of the text).
        nodes: int32 (rows, COLUMNS), zeros; as many rows as ``data.size // 12`` are enough.
        pool: int32, members of arrays; ``data.size`` is enough.

    Returns:
        Row of the module, -1 where the text is no saved module.
    """
    root, count, used = -1, 0, 0
    at = _blank(data, 0)
    if data.size < 2 or data[at] != _OPEN:
        return -1
    at = _blank(data, at + 1)
    while at < data.size and data[at] != _CLOSE:
        if data[at] == _COMMA:
            at = _blank(data, at + 1)
        if at >= data.size or data[at] != _QUOTE:
            return -1
        code, at = _word(data, at)
        at = _blank(data, at)
        at = _blank(data, at + 1)
        if at >= data.size:
            return -1
        if code == _ROOT_INDEX:
            root, at = _number(data, at)
        elif code == _NODES and data[at] == _OPEN_LIST:
            at = _blank(data, at + 1)
            while at < data.size and data[at] != _CLOSE_LIST:
                if data[at] == _COMMA:
                    at = _blank(data, at + 1)
                if count >= nodes.shape[0] or at >= data.size or data[at] != _OPEN:
                    return -1
                at, used = _node(data, at, nodes[count], pool, used)
                count += 1
                at = _blank(data, at)
            at += 1
        else:
            at = _skip(data, at)
        at = _blank(data, at)
    _settle(nodes, count, used)
    return root if 0 <= root < count and at < data.size else -1
