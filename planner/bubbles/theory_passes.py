"""`TheoryPasses`: a tower's passes in terms of forward programs, for devices nobody measured here.

The gradient of a product for its input and for its weights are products of the same FLOP;
attention's backward pass is two forward passes, three where its inside is computed again (fused
kernels always do); what moves memory alone costs twice in the backward pass (``theory``). Norms,
residuals and transfers work on ``1 / tp`` of the tokens (sequence parallelism, Korthikanti et al.
2022).
"""

from __future__ import annotations

from foreplan.cost_models.costs import Work
from foreplan.datasets.program import Variant, program
from foreplan.planner.bubbles.pass_shape import PassShape
from foreplan.planner.bubbles.work_parts import Parts, joined

_BF16 = Variant("bf16", "bf16", "torch.linear")
_ATTENTION = Variant("bf16", "bf16", "torch.sdpa")


class TheoryPasses:
    """See the module.

    Args:
        shape: of the tower's micro-batches.
    """

    def __init__(self, shape: PassShape) -> None:
        self.shape = shape

    def half(self, half: int, direction: str) -> Parts:
        """Computation of an attention block (even) or an MLP block (odd).

        Args:
            half: its number.
            direction: ``F``, ``I`` (backward for the input), ``W`` (for the weights) or ``B`` (both
                and what is computed again).
        """
        if direction == "B":
            return joined(self.half(half, "I"), self.half(half, "W"))
        forward = self._attention() if half % 2 == 0 else self._mlp()
        if direction == "F":
            return forward
        products = self._transposed(half, weights=direction == "W")
        if direction == "W":
            return products
        again = forward if self.shape.recompute == "full" else ()
        scores = 2 if self.shape.recompute == "none" else 3
        rest = tuple(
            (work, count * (scores if _is(work, "attention") else 2))
            for work, count in forward
            if not _is(work, "linear")
        )
        return joined(again, products, rest)

    def ends(self, direction: str, *, first: bool, last: bool) -> Parts:
        """What a pass computes in front of the first layer and behind the last one."""
        tower, shape = self.shape.tower, self.shape
        parts: list[tuple[Work, int]] = []
        backward = direction != "F"
        if first and tower.vocab and direction != "I":
            rows = max(1, shape.rows // shape.tp)
            parts.append((program("embedding", _named("torch.embedding"), rows=rows,
                                  cols=tower.hidden), 1))  # fmt: skip
        matrices = [tower.entry] if first and tower.entry else []
        matrices += list(tower.exits) if last else []
        for n, k in matrices:
            if backward and direction != "W" and (n, k) != tower.entry:
                parts.append((_linear(shape.rows, k, max(1, n // shape.tp)), 1))
            if direction != "I":
                parts.append((_linear(shape.rows, max(1, n // shape.tp), k), 1))
        if last and tower.vocab and direction != "W":  # the loss
            cols = max(1, tower.vocab // shape.tp)
            work = program("argmax", _named("torch.argmax"), rows=shape.rows, cols=cols)
            parts.append((work, 2 if backward else 1))
        return joined(tuple(parts))

    def _attention(self) -> Parts:
        t, shape = self.shape.tower, self.shape
        (_, qkv, hidden), (_, out, inner) = t.attention_linears
        rows, tp = shape.rows, shape.tp
        attention = program(
            "attention", _ATTENTION, batch=shape.sequences, queries=shape.tokens,
            keys=shape.tokens, heads=max(1, t.heads // tp), kv_heads=max(1, t.kv_heads // tp),
            head_dim=t.head_dim,
        )  # fmt: skip
        return joined(
            self._pointwise("norm", "torch.rms_norm"),
            ((_linear(rows, max(1, qkv // tp), hidden), 1),),
            # A causal mask leaves half of the pairs: full attention is two causal ones.
            ((attention, 1 if t.causal else 2),),
            ((_linear(rows, out, max(1, inner // tp)), 1),),
            self._pointwise("add", "torch.add"),
        )

    def _mlp(self) -> Parts:
        t, shape = self.shape.tower, self.shape
        (_, up, hidden), (_, down, ffn) = t.mlp_linears
        rows, tp = shape.rows, shape.tp
        kernel = "torch.silu_mul" if t.gated else "torch.gelu_tanh"
        activation = program("activation", _named(kernel), rows=rows, cols=max(1, ffn // tp))
        return joined(
            self._pointwise("norm", "torch.rms_norm"),
            ((_linear(rows, max(1, up // tp), hidden), 1),),
            ((activation, 1),),
            ((_linear(rows, down, max(1, ffn // tp)), 1),),
            self._pointwise("add", "torch.add"),
        )

    def _pointwise(self, op: str, kernel: str) -> Parts:
        rows = max(1, self.shape.rows // self.shape.tp)
        return ((program(op, _named(kernel), rows=rows, cols=self.shape.tower.hidden), 1),)

    def _transposed(self, half: int, *, weights: bool) -> Parts:
        """Products of the backward pass, as linears of the same FLOP."""
        t, rows, tp = self.shape.tower, self.shape.rows, self.shape.tp
        (_, n1, k1), (_, n2, k2) = t.attention_linears if half % 2 == 0 else t.mlp_linears
        found = []
        for n, k in ((max(1, n1 // tp), k1), (n2, max(1, k2 // tp))):
            found.append((_linear(n, k, rows) if weights else _linear(rows, k, n), 1))
        return joined(tuple(found))


def _named(kernel: str) -> Variant:
    return Variant("bf16", "bf16", kernel)


def _linear(rows: int, n: int, k: int) -> Work:
    return program("linear", _BF16, rows=max(1, rows), n=n, k=k)


def _is(work: Work, op: str) -> bool:
    return getattr(work, "op", None) == op
