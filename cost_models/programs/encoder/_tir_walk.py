"""walk: from rows of a TIR module to its leaves: stores, their loops, operations and accesses.

Compiled. Tree nodes are loops, branches and stores, in pre-order; the root has number 0 and depth
0. Blocks are no nodes: their iterators are replaced by what they are bound to (``alias``).
"""

from __future__ import annotations

from typing import Any

from foreplan.cost_models.programs.encoder import _tir_words as w
from foreplan.cost_models.programs.encoder._tir_compiled import part

#: Columns of a leaf.
(
    STORE, LOOPS, POSITION, DEPTH, INIT, PREDICATES, KERNEL, REALIZE, UNROLL, ACCESSES, PIPELINED,
) = range(11)  # fmt: skip
LEAF_COLUMNS = 11

#: Operations counted of a leaf: of one execution of the store.
(
    ADDS, PRODUCTS, QUOTIENTS, CHOICES, CHEAP, COSTLY, INTEGER_OPS, CASTS, LOGIC, ADDRESS, CALLED,
) = range(11)  # fmt: skip
OPERATION_COLUMNS = 11

#: Columns of an access; the store comes first.
BUFFER, INDICES = 0, 1

#: What stops a walk, as negative numbers of leaves.
NO_FUNCTION, TOO_LARGE, UNKNOWN_EXTENT, UNKNOWN_DTYPE, NO_LEAVES = -1, -2, -3, -4, -5
MAX_LEAVES, MAX_LOOPS, MAX_ACCESSES = 192, 48, 40
_STACK = 4096
_LEAVE_LOOP, _LEAVE_BLOCK, _LEAVE_BRANCH, _ENTER_INIT, _LEAVE_INIT = -1, -2, -3, -4, -5

_A, _B, _C, _D, _E, _F, _G, _H = range(8)
_KIND, _VALUE = w.KIND, w.VALUE
_TAG_OF, _UNROLL_STEP, _PIPELINE = w.TAG_OF, w.UNROLL_STEP, w.PIPELINE
_FLOATING_OF, _BYTES_OF, _PRICE_OF = w.FLOATING_OF, w.BYTES_OF, w.PRICE_OF
_ARRAY, _MAP, _STRING, _INT, _BOOL, _MODULE = w.ARRAY, w.MAP, w.STRING, w.INT, w.BOOL, w.MODULE
_FUNCTION, _FOR, _SEQUENCE, _BRANCH = w.FUNCTION, w.FOR, w.SEQUENCE, w.BRANCH
_STORE, _BLOCK, _REALIZE, _PRIMITIVE = w.STORE, w.BLOCK, w.REALIZE, w.PRIMITIVE
_VARIABLE, _INTEGER, _LOAD, _CALL, _CAST = w.VARIABLE, w.INTEGER, w.LOAD, w.CALL, w.CAST
_SELECT, _ADD, _SUB, _MUL, _DIV, _MOD = w.SELECT, w.ADD, w.SUB, w.MUL, w.DIV, w.MOD
_FLOOR_DIV, _FLOOR_MOD, _MIN, _MAX = w.FLOOR_DIV, w.FLOOR_MOD, w.MIN, w.MAX
_EQ, _GE, _AND, _NOT, _BIND = w.EQ, w.GE, w.AND, w.NOT, w.BIND
_FLOATING = w.FLOATING
_UNKNOWN = len(w.WORDS)


@part
def ref(nodes: Any, row: int, slot: int) -> Any:
    """Row that a slot refers to; 0, the empty node, where a damaged text points nowhere."""
    found = nodes[row, slot]
    return found if 0 <= found < nodes.shape[0] else 0


@part
def member(nodes: Any, pool: Any, row: int, number: int) -> Any:
    """Row of a member of the array ``row``; 0 where there is none."""
    place = nodes[row, _A] + number
    if place < 0 or place >= pool.size:
        return 0
    found = pool[place]
    return found if 0 <= found < nodes.shape[0] else 0


@part
def word(nodes: Any, row: int) -> Any:
    """Code of the word that a row holds, or of an unknown one."""
    code = nodes[row, _A]
    return code if 0 <= code < _UNKNOWN else _UNKNOWN


@part
def size(nodes: Any, row: int) -> Any:
    """Members of an array, 0 where the row is none."""
    kind = nodes[row, _KIND]
    return nodes[row, _B] if kind in (_ARRAY, _MAP) else 0


@part
def constant(nodes: Any, row: int, otherwise: int) -> Any:
    """Value of a constant integer."""
    kind = nodes[row, _KIND]
    if kind == _INTEGER:
        row = ref(nodes, row, _A)
        kind = nodes[row, _KIND]
    return nodes[row, _VALUE] if kind in (_INT, _BOOL) else otherwise


@part
def dtype_code(nodes: Any, row: int) -> Any:
    """Code of the data type that an expression's ``ty`` names, -1 where it names none."""
    kind = ref(nodes, row, _G)
    return nodes[kind, _A] if nodes[kind, _KIND] == _PRIMITIVE else -1


@part
def tag(nodes: Any, loop: int) -> Any:
    """Thread axis of a bound loop as in ``TAG_OF``, -1 where it is not bound."""
    iterator = ref(nodes, loop, _E)
    name = ref(nodes, iterator, _E)
    return _TAG_OF[nodes[name, _A]] if iterator > 0 and nodes[name, _KIND] == _STRING else -1


@part
def main_function(nodes: Any, pool: Any, root: int) -> Any:
    """Row of the module's first TIR function, 0 where it has none."""
    if nodes[root, _KIND] != _MODULE:
        return 0
    functions = ref(nodes, root, _A)
    for number in range(1, size(nodes, functions), 2):
        row = member(nodes, pool, functions, number)
        if nodes[row, _KIND] == _FUNCTION:
            return row
    return 0


@part
def _unroll_step(nodes: Any, pool: Any, loop: int, otherwise: int) -> Any:
    notes = ref(nodes, loop, _F)
    for number in range(0, size(nodes, notes), 2):
        if nodes[member(nodes, pool, notes, number), _A] == _UNROLL_STEP:
            return constant(nodes, member(nodes, pool, notes, number + 1), otherwise)
    return otherwise


@part
def _pipelined(nodes: Any, pool: Any, loop: int) -> Any:
    notes = ref(nodes, loop, _F)
    for number in range(0, size(nodes, notes), 2):
        if nodes[member(nodes, pool, notes, number), _A] == _PIPELINE:
            return True
    return False


@part
def _bind(nodes: Any, pool: Any, realize: int, alias: Any) -> None:
    """Note what the iterators of a block stand for."""
    values = ref(nodes, realize, _A)
    iterators = ref(nodes, ref(nodes, realize, _B), _A)
    for number in range(min(size(nodes, values), size(nodes, iterators))):
        variable = ref(nodes, member(nodes, pool, iterators, number), _H)
        alias[variable] = member(nodes, pool, values, number)


@part
def walk(
    nodes: Any, pool: Any, function: int, leaves: Any, loops: Any, alias: Any, work: Any
) -> Any:
    """Find the leaves of a function in pre-order.

    Args:
        nodes: rows of `_tir_scan.scan`.
        pool: members of arrays.
        function: row of the function.
        leaves: int32 (MAX_LEAVES, LEAF_COLUMNS), filled.
        loops: int32 (MAX_LEAVES, MAX_LOOPS), rows of each leaf's loops, outermost first; filled.
        alias: int32 (rows), 0; filled with what block iterators and names stand for.
        work: int32 (>= 4096 + 4 * MAX_LOOPS), scratch.

    Returns:
        Number of leaves, or what stopped the walk.
    """
    stack, path = work[:_STACK], work[_STACK : _STACK + MAX_LOOPS]
    steps = work[_STACK + MAX_LOOPS : _STACK + 2 * MAX_LOOPS]
    blocks = work[_STACK + 2 * MAX_LOOPS : _STACK + 3 * MAX_LOOPS]
    bound = work[_STACK + 3 * MAX_LOOPS : _STACK + 4 * MAX_LOOPS]
    found = length = depth = position = predicates = kernel = init = nested = 0
    stack[0] = ref(nodes, function, _C)
    top = 1
    visits = 0
    while top > 0:
        top -= 1
        row = stack[top]
        visits += 1
        if top > _STACK - 512 or visits > 4 * nodes.shape[0] + 64:
            return TOO_LARGE
        if row == _LEAVE_LOOP:
            length -= 1
            depth -= 1
            continue
        if row == _LEAVE_BLOCK:
            nested -= 1
            predicates -= constant(nodes, ref(nodes, blocks[nested], _D), 0) != 1
            continue
        if row == _LEAVE_BRANCH:
            depth -= 1
            predicates -= 1
            continue
        if row in (_ENTER_INIT, _LEAVE_INIT):
            init = 1 if row == _ENTER_INIT else 0
            continue
        kind = nodes[row, _KIND]
        if kind == _SEQUENCE:
            children = ref(nodes, row, _A)
            count = size(nodes, children)
            if count > 256:
                return TOO_LARGE
            for number in range(count):
                stack[top + count - 1 - number] = member(nodes, pool, children, number)
            top += count
        elif kind == _FOR:
            if length == MAX_LOOPS:
                return TOO_LARGE
            if constant(nodes, ref(nodes, row, _B), -1) < 0:
                return UNKNOWN_EXTENT
            outer = steps[length - 1] if length > 0 else 0
            before = bound[length - 1] if length > 0 else 0
            now = 1 if tag(nodes, row) >= 0 else 0
            kernel += now == 1 and before == 0  # the first bound loop starts a kernel
            path[length], steps[length] = row, _unroll_step(nodes, pool, row, outer)
            bound[length] = 1 if now == 1 or before == 1 else 0
            length += 1
            depth += 1
            position += 1
            stack[top], stack[top + 1] = _LEAVE_LOOP, ref(nodes, row, _C)
            top += 2
        elif kind == _REALIZE:
            if nested == MAX_LOOPS:
                return TOO_LARGE
            _bind(nodes, pool, row, alias)
            predicates += constant(nodes, ref(nodes, row, _D), 0) != 1
            blocks[nested] = row
            nested += 1
            stack[top], stack[top + 1] = _LEAVE_BLOCK, ref(nodes, row, _B)
            top += 2
        elif kind == _BLOCK:
            stack[top] = ref(nodes, row, _C)
            top += 1
            first = ref(nodes, row, _E)
            if nodes[first, _KIND] != 0:
                stack[top], stack[top + 1], stack[top + 2] = _LEAVE_INIT, first, _ENTER_INIT
                top += 3
        elif kind == _BRANCH:
            depth += 1
            position += 1
            predicates += 1
            stack[top], stack[top + 1] = _LEAVE_BRANCH, ref(nodes, row, _B)
            stack[top + 2] = ref(nodes, row, _A)
            top += 3
        elif kind == _BIND:  # a value with a name, as sums that are updated together have
            alias[ref(nodes, row, _H)] = ref(nodes, row, _A)
        elif kind == _STORE:
            if found == MAX_LEAVES:
                return TOO_LARGE
            position += 1
            leaf = leaves[found]
            leaf[STORE], leaf[LOOPS], leaf[POSITION] = row, length, position
            leaf[DEPTH], leaf[INIT], leaf[PREDICATES] = depth + 1, init, predicates
            leaf[KERNEL] = kernel
            leaf[REALIZE] = blocks[nested - 1] if nested > 0 else 0
            leaf[PIPELINED] = 0
            for number in range(length):
                leaf[PIPELINED] |= _pipelined(nodes, pool, path[number])
            leaf[UNROLL] = steps[length - 1] if length > 0 else 0
            loops[found, :length] = path[:length]
            found += 1
        elif row > 0 and nodes[row, _C] > 0:  # a statement around another
            stack[top] = ref(nodes, row, _C)
            top += 1
    return found if found > 0 else NO_LEAVES


@part
def called(nodes: Any, pool: Any, row: int) -> Any:
    """Column of the operation that a call is; -1 where nothing is left of it."""
    price = _PRICE_OF[word(nodes, ref(nodes, row, _A))]
    if price == 6:
        exponent = member(nodes, pool, ref(nodes, row, _B), 1)
        known = nodes[exponent, _A] if nodes[exponent, _KIND] == _FLOATING else 0
        if known in (1, 2):  # compilers fold x ** 1 and x ** 2
            return -1 if known == 1 else PRODUCTS
        return CALLED
    if price == 1:
        return CHEAP
    if price == 3:
        return CHOICES
    if price == 4:
        return -1
    return CALLED if price == 5 else COSTLY  # one that is not known is taken as costly


@part
def _count(nodes: Any, pool: Any, row: int, operations: Any) -> None:
    """Add one operator of a value to its leaf's counts."""
    kind = nodes[row, _KIND]
    code = dtype_code(nodes, row)
    floating = code >= 0 and _FLOATING_OF[code] > 0
    if kind == _CALL:
        found = called(nodes, pool, row)
        if found >= 0:
            operations[found] += 1
    elif kind == _CAST:
        operations[CASTS] += 1
    elif kind in (_SELECT, _MIN, _MAX) or _EQ <= kind <= _GE:
        operations[CHOICES] += 1
    elif _AND <= kind <= _NOT:
        operations[LOGIC] += 1
    elif _ADD <= kind <= _FLOOR_MOD:
        if not floating:
            operations[INTEGER_OPS] += 1
        elif kind in (_ADD, _SUB):
            operations[ADDS] += 1
        elif kind == _MUL:
            operations[PRODUCTS] += 1
        else:
            operations[QUOTIENTS] += 1


@part
def gather(
    nodes: Any, pool: Any, alias: Any, leaf: Any, operations: Any, accesses: Any, stack: Any
) -> Any:
    """Operations and accesses of one leaf.

    Args:
        nodes: rows.
        pool: members of arrays.
        alias: as `walk` filled it.
        leaf: its row in ``leaves``; the number of accesses is noted in it.
        operations: float64 (OPERATION_COLUMNS), zeros; filled.
        accesses: int32 (MAX_ACCESSES, 2), filled; the store first. Further loads than fit count
            as operations only.
        stack: int32, scratch.

    Returns:
        0, or what stopped it.
    """
    store = leaf[STORE]
    accesses[0, BUFFER], accesses[0, INDICES] = ref(nodes, store, _E), ref(nodes, store, _B)
    count = 1
    stack[0] = ref(nodes, store, _A)
    top = 1
    if size(nodes, ref(nodes, store, _B)) > 64:
        return TOO_LARGE
    for number in range(size(nodes, ref(nodes, store, _B))):
        stack[top] = -member(nodes, pool, ref(nodes, store, _B), number) - 1
        top += 1
    visits = 0
    while top > 0:
        top -= 1
        visits += 1
        if top > stack.size - 64 or visits > 20000:
            return TOO_LARGE
        address = stack[top] < 0  # index expressions are pushed as negative numbers
        row = -stack[top] - 1 if address else stack[top]
        kind = nodes[row, _KIND]
        first = second = third = 0
        if kind == _LOAD:
            indices = ref(nodes, row, _B)
            if count < MAX_ACCESSES:
                accesses[count, BUFFER], accesses[count, INDICES] = ref(nodes, row, _E), indices
                count += 1
            for number in range(min(size(nodes, indices), 16)):
                stack[top] = -member(nodes, pool, indices, number) - 1
                top += 1
            continue
        if kind == _VARIABLE:
            if alias[row] > 0:
                first = alias[row]
        elif kind == _CALL:
            arguments = ref(nodes, row, _B)
            for number in range(min(size(nodes, arguments), 16)):
                child = member(nodes, pool, arguments, number)
                stack[top] = -child - 1 if address else child
                top += 1
        elif kind in (_CAST, _NOT):
            first = ref(nodes, row, _A)
        elif kind == _SELECT:
            first, second, third = ref(nodes, row, _A), ref(nodes, row, _B), ref(nodes, row, _C)
        elif _ADD <= kind <= _NOT:
            first, second = ref(nodes, row, _A), ref(nodes, row, _B)
        if address:
            operations[ADDRESS] += _ADD <= kind <= _NOT or kind == _CALL
        elif kind > 0:
            _count(nodes, pool, row, operations)
        for child in (first, second, third):
            if child > 0:
                stack[top] = -child - 1 if address else child
                top += 1
    leaf[ACCESSES] = count
    return 0
