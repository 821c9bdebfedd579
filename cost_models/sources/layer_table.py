"""`LayerTableSource`: prices from a table of whole decoder layers, such as Helix's.

Planners price a layer program by program, a table knows the layer alone. The layer's attention is
the one program that says which pass it belongs to (requests, queries, cached positions), so it
carries the layer's whole time and the other programs of the layer cost nothing; what does not
belong to a layer (embedding, head) is left to the next source. Sums over layers, which is all that
a plan's times consist of, are the table's; the share of single operators is not told.

A table holds one precision. Linears of the layer in another one have no price at all, from no
source, so that a plan cannot mix a table's layers with predicted ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.costs import Estimate, Work
from foreplan.datasets import device_zoo
from foreplan.datasets.experts import EXPERT_OPERATORS
from foreplan.datasets.operators import ATTENTIONS
from foreplan.datasets.program import Program
from foreplan.datasets.sweeps.operator_table import OperatorTable
from foreplan.errors import MissingDataError, SpecError

Floats = NDArray[np.float64]

#: Storage dtypes that a table of fp16 layers prices: bf16 moves and computes as much.
_HALF = ("bf16", "fp16")
#: Beyond this factor of the measured range there is no price.
FAR = 4.0


@dataclass(frozen=True, slots=True)
class _Curve:
    """Layer time over tokens of one device and phase, tokens ascending; seconds."""

    tokens: Floats
    layer_s: Floats

    def at(self, tokens: float) -> tuple[float, bool] | None:
        """Seconds and whether inside the range; ``None`` further than `FAR` beyond it.

        Between rows and beyond the last one linear; below the first one the first row's time, as
        a pass over fewer tokens reads the same weights.
        """
        x, y = self.tokens, self.layer_s
        if tokens > FAR * x[-1]:
            return None
        if tokens > x[-1]:
            slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else y[-1] / x[-1]
            return float(y[-1] + slope * (tokens - x[-1])), False
        return float(np.interp(tokens, x, y)), bool(tokens >= x[0])


class LayerTableSource:
    """A `CostSource` over a table of whole layers; sources are ``measured`` and ``extrapolated``.

    Args:
        table: rows of kind ``decoder_layer`` of one model with a gated MLP and a key/value head a
            query head; rows of several shards are left out.

    Raises:
        SpecError: no such row, or layers of several models.
    """

    def __init__(self, table: OperatorTable) -> None:
        rows = table.take((table.kind == "decoder_layer") & (table.dims["shards"] == 1))
        shapes = {
            tuple(int(rows.dims[name][i]) for name in ("hidden", "intermediate", "heads"))
            for i in range(len(rows))
        }
        if len(shapes) != 1:
            raise SpecError(
                "table of layers", got=f"layers of {len(shapes)} models",
                expected="layers of one model on single devices",
            )  # fmt: skip
        self.hidden, self.ffn, self.heads = next(iter(shapes))
        self._curves: dict[tuple[str, str], _Curve] = {}
        for name in dict.fromkeys(rows.device):
            device = rows.device_of(name)
            for phase in ("decode", "prompt"):
                mine = (rows.device == name) & (rows.op == phase)
                if device is not None and mine.any():
                    tokens, index = np.unique(rows.dims["tokens"][mine], return_index=True)
                    self._curves[device.name, phase] = _Curve(tokens, rows.latency_s[mine][index])
        h, f = self.hidden, self.ffn
        self._linears = {(3 * h, h), (h, h), (2 * f, h), (h, f)}

    @property
    def devices(self) -> tuple[str, ...]:
        """Zoo names of the devices that the table has."""
        return tuple(dict.fromkeys(name for name, _ in self._curves))

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on the zoo device called ``device``; ``None`` where it has no part in it.

        Raises:
            MissingDataError: a layer of another model, a linear of the layer in a precision that
                the table does not hold, or a pass far beyond its rows.
        """
        if not isinstance(work, Program) or not device_zoo.is_known(device):
            return None
        name = device_zoo.canonical(device)
        if name not in self.devices:
            return None
        d = work.dims
        if work.op == "linear" and (d["n"], d["k"]) in self._linears:
            if work.variant.storage not in _HALF:
                raise MissingDataError(
                    f"a table of whole layers prices 16 bits alone, none of {work.variant.storage}",
                    fix="plan with bits=16, or with '--costs predicted'",
                )
            return Estimate.exact(0.0, "measured")
        if work.op in EXPERT_OPERATORS or work.op in ATTENTIONS - {"attention"}:
            raise MissingDataError(
                "the table's layers have plain attention and a plain MLP, the model's sinks, "
                "capped scores or experts",
                fix="plan the table's model, or with '--costs predicted'",
            )
        if work.op == "attention":
            if work.variant.storage not in _HALF:
                raise MissingDataError(
                    f"the table of layers has no cache of {work.variant.storage}",
                    fix="plan with kv_bits=16, or with '--costs predicted'",
                )
            return self._layer(work, name)
        # Norms and additions of the embedding and the head are the same programs as a layer's.
        part = work.op in ("norm", "rope", "cache_write", "add", "activation")
        return Estimate.exact(0.0, "measured") if part else None

    def _layer(self, work: Program, name: str) -> Estimate:
        d = work.dims
        if (d["heads"], d["heads"] * d["head_dim"], d["kv_heads"]) != (
            self.heads, self.hidden, self.heads,
        ):  # fmt: skip
            raise MissingDataError(
                f"the table's layers have {self.hidden} features in {self.heads} heads, the "
                f"model's {d['heads'] * d['head_dim']} in {d['heads']}",
                fix="plan the table's model, or with '--costs predicted'",
            )
        phase = "decode" if d["queries"] == 1 else "prompt"
        tokens = d["batch"] * d["queries"]
        curve = self._curves.get((name, phase))
        found = None if curve is None else curve.at(tokens)
        if found is None:
            raise MissingDataError(
                f"the table has no {phase} time of a layer for {tokens} tokens on {name}",
                fix="smaller micro-batches, or '--costs predicted'",
            )
        return Estimate.exact(found[0], "measured" if found[1] else "extrapolated")
