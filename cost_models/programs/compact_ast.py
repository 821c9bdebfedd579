"""CompactAst: a scheduled tensor program as its leaves, for a learned cost model.

Leaves are the stores of the lowered loop nest, in pre-order. Each carries a computation vector:
arithmetic by kind, loops by how they run, thread bindings, allocation, and for the stored buffer
and the four largest loads their scope, bytes, distinct bytes, strides and reuse; magnitudes as
log2(1 + x). Position and depth of a leaf in the tree of loops, branches and stores feed the
positional encoding. The idea is CDMPP's; there the vector has 164 entries of which 78 never vary.

The encoder reads the text that ``tvm.ir.save_json`` writes and needs no TVM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreplan._compiled import told
from foreplan.cost_models.programs.encoder import _tir_encoding, _tir_walk, _tir_words
from foreplan.cost_models.programs.encoder._leaf_names import (
    FEATURE_NAMES,
    FEATURE_VERSION,
    TOTAL_NAMES,
)
from foreplan.cost_models.programs.encoder._tir_compiled import STAMP
from foreplan.errors import SpecError

__all__ = ["FEATURE_NAMES", "FEATURE_VERSION", "TOTAL_NAMES", "CompactAst", "CompactAstEncoder"]

_REASONS = {
    -10: "JSON text that tvm.ir.save_json wrote",
    _tir_walk.NO_FUNCTION: "a module with a TIR function",
    _tir_walk.TOO_LARGE: (
        f"at most {_tir_walk.MAX_LEAVES} stores in at most {_tir_walk.MAX_LOOPS} nested loops"
    ),
    _tir_walk.UNKNOWN_EXTENT: "loops of constant extent",
    _tir_walk.UNKNOWN_DTYPE: "data types among " + ", ".join(_tir_words._DTYPES),
    _tir_walk.NO_LEAVES: "a function that stores something",
}


@dataclass(frozen=True, slots=True)
class CompactAst:
    """One program.

    Attributes:
        leaves: float32 (leaves, ``len(FEATURE_NAMES)``).
        position: int32 (leaves): number of the leaf among the tree's nodes, in pre-order.
        depth: int32 (leaves): loops and branches around it, plus one.
        totals: float64 (``len(TOTAL_NAMES)``): sums over the program in plain units.
    """

    leaves: NDArray[np.float32]
    position: NDArray[np.int32]
    depth: NDArray[np.int32]
    totals: NDArray[np.float64]

    def total(self, name: str) -> float:
        """One of the totals by name."""
        return float(self.totals[TOTAL_NAMES.index(name)])


#: Of a module's text; the arrays that it is read into take twenty times as much.
MAX_BYTES = 16 << 20


class CompactAstEncoder:
    """Encodes programs one after another in arrays that it keeps; one for each thread.

    Reading is compiled: the first program of a process waits for that (seconds, once a machine).
    """

    def __init__(self) -> None:
        most, loops = _tir_walk.MAX_LEAVES, _tir_walk.MAX_LOOPS
        self._leaves = np.zeros((most, _tir_walk.LEAF_COLUMNS), dtype=np.int32)
        self._loops = np.zeros((most, loops), dtype=np.int32)
        self._work = np.zeros(4096 + 4 * loops + 2048, dtype=np.int32)
        self._operations = np.zeros((most, _tir_walk.OPERATION_COLUMNS))
        self._accesses = np.zeros((most, _tir_walk.MAX_ACCESSES, 2), dtype=np.int32)
        self._touches = np.zeros((most, 256), dtype=np.int8)
        self._out = np.zeros((most, len(FEATURE_NAMES)))
        self._totals = np.zeros(len(TOTAL_NAMES) + 2)  # and two cells of the encoder's own
        self._compiled = False
        self._grow(1 << 16)

    def _grow(self, size: int) -> None:
        rows = size // 12 + 1
        self._size = size
        self._nodes = np.zeros((rows, _tir_words.COLUMNS), dtype=np.int32)
        self._pool = np.zeros(size + 1, dtype=np.int32)
        self._rows = np.zeros((5, rows), dtype=np.int32)
        self._state = np.zeros((2, rows, 3), dtype=np.int64)

    def encode(self, text: bytes | str, where: str = "program") -> CompactAst:
        """Encode one program.

        Args:
            text: JSON text of ``tvm.ir.save_json`` of the scheduled module.
            where: file and line it comes from, for the error.

        Raises:
            SpecError: no such text, or a program beyond what is read (see the message).
        """
        raw = text.encode() if isinstance(text, str) else text
        if len(raw) > MAX_BYTES:
            raise SpecError(where, got=_shown(raw), expected=f"at most {MAX_BYTES} bytes")
        if len(raw) > self._size:
            self._grow(2 * len(raw))
        data = np.frombuffer(raw + bytes(8), dtype=np.uint8)  # zeros: no check at every byte
        count = self._run(data) if self._compiled else self._run_first(data)
        if count < 0:
            raise SpecError(where, got=_shown(raw), expected=_REASONS[count])
        return CompactAst(
            leaves=self._out[:count].astype(np.float32),
            position=self._leaves[:count, _tir_walk.POSITION].copy(),
            depth=self._leaves[:count, _tir_walk.DEPTH].copy(),
            totals=self._totals[: len(TOTAL_NAMES)].copy(),
        )

    def _run_first(self, data: NDArray[np.uint8]) -> int:
        """As `_run`, where that has to be compiled first, perhaps again."""
        with told("how programs are read"):
            count = self._run(data)
            if count > 0 and self._totals[-1] != STAMP:  # machine code of other sources
                _tir_encoding.encode.recompile()
                count = self._run(data)
        self._compiled = count > 0
        return count

    def _run(self, data: NDArray[np.uint8]) -> int:
        return int(
            _tir_encoding.encode(
                data, self._nodes, self._pool, self._leaves, self._loops, self._rows, self._state,
                self._work, self._operations, self._accesses, self._touches, self._out,
                self._totals,
            )
        )  # fmt: skip


def _shown(raw: bytes) -> Any:
    return raw[:60].decode("utf-8", errors="replace") + ("..." if len(raw) > 60 else "")
