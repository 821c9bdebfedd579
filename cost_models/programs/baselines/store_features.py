"""StoreFeatureEncoder: scheduled programs as CDMPP's release describes them to its network.

Each leaf carries the 164 entries of Ansor and TenSet for a store: 16 counts of operations, 33 of
vectorised, unrolled and parallel loops, 8 of GPU threads, 5 buffers of 18, 10 points of the curve
of arithmetic intensity, 4 of allocation, 3 of the outer scope; magnitudes as log2(1 + x). They come
from TVM's own extractor. The tree has a node for each loop (thread bindings included), each
allocation and each store, under a root that is number 0, as the release's has.

As in the release the four entries of allocation are zero: it wrote them to nodes that are no
leaves. What differs: the release had a leaf for every store, TVM 0.27 has one for every buffer that
is written with more than constants (the store that starts a sum is none), so a program that only
fills buffers gets one leaf of zeros; and the release's programs were lowered by TVM 0.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.compact_ast import CompactAst, CompactAstEncoder
from foreplan.datasets.tir.toolchain import load_tvm
from foreplan.errors import SpecError

#: Entries of a store: buffers and points of the curve are the release's (5 and 10).
STORE_FEATURES = 164
_ALLOCATION = slice(157, 161)


class StoreFeatureEncoder:
    """Encodes programs as `CompactAstEncoder` does, with other leaves; totals are the same.

    Raises:
        MissingDataError: no TVM.
        SpecError: TVM of another version.
    """

    def __init__(self) -> None:
        self._tvm = load_tvm()
        self._totals = CompactAstEncoder()
        self._extractor = self._tvm.s_tir.meta_schedule.feature_extractor.PerStoreFeature(
            buffers_per_store=5, arith_intensity_curve_num_samples=10, cache_line_bytes=64
        )
        passes = self._tvm.s_tir.transform
        self._lower = self._tvm.transform.Sequential(
            [
                passes.LowerCrossThreadReduction(), passes.LowerInitBlock(),
                passes.PlanAndUpdateBufferAllocationLocation(), passes.ConvertBlocksToOpaque(),
                passes.UnifyThreadBinding(), passes.CompactBufferAllocation(),
                passes.LowerMatchBuffer(), passes.StmtSimplify(),
            ]
        )  # fmt: skip

    def encode(self, text: bytes | str, where: str = "program") -> CompactAst:
        """Encode one program.

        Args:
            text: JSON text of ``tvm.ir.save_json`` of the scheduled module.
            where: file and line it comes from, for the error.

        Raises:
            SpecError: no such text, or a program that TVM cannot lower.
        """
        totals = self._totals.encode(text, where).totals
        plain = text if isinstance(text, str) else text.decode()
        try:
            module = self._tvm.ir.load_json(plain)
            leaves = self._features(module, on_gpu="blockIdx.x" in plain or "threadIdx.x" in plain)
            places = self._places(module)
        except Exception as error:  # TVM raises types of its own
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise SpecError(where, got=said[-1][:80], expected="a program TVM can lower") from error
        if not len(leaves):
            leaves = np.zeros((1, STORE_FEATURES), dtype=np.float32)
        # In one of 200 shipped programs (sums across threads) the extractor sees a buffer less.
        places = (places or [(1, 1)])[: len(leaves)]
        places += places[-1:] * (len(leaves) - len(places))
        position, depth = np.array(places, dtype=np.int32).T
        return CompactAst(leaves, position.copy(), depth.copy(), totals)

    def _features(self, module: Any, *, on_gpu: bool) -> NDArray[np.float32]:
        schedules = self._tvm.s_tir.meta_schedule
        # Only whether it is a GPU reaches the features.
        target = {"kind": "cuda", "arch": "sm_70"} if on_gpu else {"kind": "llvm", "num-cores": 1}
        context = schedules.TuneContext(mod=module, target=self._tvm.target.Target(target))
        candidate = schedules.MeasureCandidate(self._tvm.s_tir.Schedule(module), [])
        found = self._extractor.extract_from(context, [candidate])[0].numpy().astype(np.float32)
        found[:, _ALLOCATION] = 0.0
        return found  # type: ignore[no-any-return]

    def _places(self, module: Any) -> list[tuple[int, int]]:
        """Number and depth of the first store of each buffer that more than constants go to."""
        body = next(iter(self._lower(module).functions.values())).body
        first: dict[Any, tuple[int, int]] = {}
        for buffer, number, depth in _stores(body):
            first.setdefault(buffer, (number, depth))
        return list(first.values())


def _stores(body: Any) -> Iterator[tuple[Any, int, int]]:
    """Buffer, number and depth of each store whose value is no constant, in pre-order."""
    number = 0
    waiting = [(body, 1)]
    while waiting:
        statement, depth = waiting.pop()
        kind = type(statement).__name__
        if kind == "BufferStore":
            number += 1
            if type(statement.value).__name__ not in ("IntImm", "FloatImm"):
                yield statement.buffer, number, depth
            continue
        if kind == "For":
            number += 1
            depth += 1
        elif kind == "SBlock":  # each buffer it allocates is a node around its body
            number += len(statement.alloc_buffers)
            depth += len(statement.alloc_buffers)
        waiting += [(part, depth) for part in reversed(_parts(statement, kind))]


def _parts(statement: Any, kind: str) -> list[Any]:
    if kind == "SeqStmt":
        return list(statement.seq)
    if kind == "SBlockRealize":
        return [statement.block]
    if kind == "IfThenElse":
        other = statement.else_case
        return [statement.then_case] if other is None else [statement.then_case, other]
    return [statement.body] if hasattr(statement, "body") else []
