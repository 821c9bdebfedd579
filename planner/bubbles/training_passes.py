"""`TrainingPasses`: a tower's passes as the training programs that a profile measures.

What a real run computes (``execution/layers.py``), operator by operator: products and attention
forwards and backwards as autograd runs them, norms, activations, residuals, rotations, the loss.
Backward programs add the gradients of weights to those of earlier micro-batches, so that no work of
its own stands for it. Small things are left out: slices, averages over positions, the host's time
between operators. Lanes of a tensor parallel group cut products and attention; norms, residuals,
head and loss are computed by all.
"""

from __future__ import annotations

from foreplan.cost_models.costs import Work
from foreplan.datasets.kernels.training_programs import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    cast_program,
    embedding_program,
    linear_program,
    loss_program,
)
from foreplan.datasets.program import Variant, program
from foreplan.planner.bubbles.pass_shape import PassShape
from foreplan.planner.bubbles.work_parts import Parts, joined, times


class TrainingPasses:
    """See the module.

    Args:
        shape: of the tower's micro-batches.
        dtype: of weights and activations, ``fp32`` or ``bf16``.
    """

    def __init__(self, shape: PassShape, dtype: str) -> None:
        self.shape, self._dtype = shape, dtype
        self._weights = f"fp32/{dtype}/torch."

    def half(self, half: int, direction: str) -> Parts:
        """Computation of an attention block (even) or an MLP block (odd).

        Args:
            half: its number.
            direction: ``F``, ``I`` (backward for the input), ``W`` (for the weights) or ``B`` (both
                and what is computed again).
        """
        t, tp = self.shape.tower, self.shape.tp
        first, second = t.attention_linears if half % 2 == 0 else t.mlp_linears
        (_, n1, k1), (_, n2, k2) = first, second
        rows = self.shape.rows
        linears = joined(
            self._linear(direction, rows, max(1, n1 // tp), k1),
            self._linear(direction, rows, n2, max(1, k2 // tp)),
        )
        if direction == "W":
            return linears
        again: Parts = ()
        if direction != "F" and self.shape.recompute == "full":
            again = self.half(half, "F")
        step = FORWARD if direction == "F" else BACKWARD
        inside = self._attention(step) if half % 2 == 0 else self._mlp(step)
        # The residual: a sum forwards, the sum of both branches' gradients backwards.
        return joined(again, linears, inside, self._norm(step), self._map("add", rows, t.hidden))

    def ends(self, direction: str, *, first: bool, last: bool) -> Parts:
        """What a pass computes in front of the first layer and behind the last one."""
        parts: list[Parts] = []
        if first:
            parts.append(self._entry(direction))
        if last:
            parts.append(self._exit(direction))
        return joined(*parts)

    # --------------------------------------------------------------------------- towers' ends

    def _entry(self, direction: str) -> Parts:
        """Embedding or patch matrix, whose input needs no gradient, and learned positions."""
        t, rows = self.shape.tower, self.shape.rows
        if direction == "I":
            return ()
        parts: list[Parts] = []
        if t.vocab:
            step = FORWARD if direction == "F" else BACKWARD
            # Every position counts, those of features included, which are copied, not looked up.
            variant = f"{self._weights}embedding"
            look_up = embedding_program(step, rows, t.vocab, t.hidden, variant)
            parts.append(((look_up, 1),))
        if t.entry is not None:
            parts.append(self._linear("F" if direction == "F" else "W", rows, *t.entry))
        if direction == "F" and (t.entry is not None or not t.gated):
            parts.append(self._map("add", rows, t.hidden))
        return joined(*parts)

    def _exit(self, direction: str) -> Parts:
        """Norm and head with the loss, or norm and projector."""
        t, rows = self.shape.tower, self.shape.exit_rows
        parts = [self._linear(direction, rows, n, k) for n, k in t.exits]
        if direction == "W":
            return joined(*parts)
        step = FORWARD if direction == "F" else BACKWARD
        parts.append(self._norm(step))
        if t.vocab:
            parts.append(((loss_program(step, rows, t.vocab), 1),))
            if self._dtype != "fp32":  # logits to the loss, their gradient back
                ways = (self._dtype, "fp32") if step == FORWARD else ("fp32", self._dtype)
                parts.append(((cast_program(rows * t.vocab, t.vocab, *ways), 1),))
        else:
            between = [((self._activation(step, "gelu", rows, n), 1),) for n, _ in t.exits[:-1]]
            parts += between
        return joined(*parts)

    # --------------------------------------------------------------------------- operators

    def _linear(self, direction: str, rows: int, n: int, k: int) -> Parts:
        rows, name = max(1, rows), f"{self._weights}linear"
        if direction == "F":
            return ((linear_program(FORWARD, rows, n, k, name), 1),)
        if direction == "I":
            # No program of its own: a forward product with the weight transposed (theory).
            return ((linear_program(FORWARD, rows, k, n, name), 1),)
        step = BACKWARD if direction == "B" else WEIGHT_GRADIENT
        return ((linear_program(step, rows, n, k, name), 1),)

    def _attention(self, step: str) -> Parts:
        t, shape = self.shape.tower, self.shape
        heads = max(1, t.heads // shape.tp)
        kernel = "torch.sdpa_causal" if t.causal else "torch.sdpa"
        attention = program(
            f"attention_{step}", Variant(self._dtype, self._dtype, kernel), batch=shape.sequences,
            queries=shape.tokens, keys=shape.tokens, heads=heads, head_dim=t.head_dim,
        )  # fmt: skip
        inner = heads * t.head_dim
        parts: list[Parts] = [((attention, 1),)]
        # Heads are brought together by a copy; backwards the three gradients are.
        parts.append(self._map("add", shape.rows, inner * (1 if step == FORWARD else 3)))
        if t.gated:
            # Rotary positions: two products, a sum and a concatenation over queries and keys.
            keys = max(1, t.kv_heads // shape.tp) * t.head_dim
            for width in (inner, keys):
                parts.append(times(self._map("mul", shape.rows, width), 2))
                parts.append(times(self._map("add", shape.rows, width), 2))
        return joined(*parts)

    def _mlp(self, step: str) -> Parts:
        t, rows = self.shape.tower, self.shape.rows
        width = max(1, t.ffn // self.shape.tp)
        if not t.gated:
            return ((self._activation(step, "gelu", rows, width), 1),)
        count = 1 if step == FORWARD else 2
        return joined(
            ((self._activation(step, "silu", rows, width), 1),),
            times(self._map("mul", rows, width), count),
        )

    def _activation(self, step: str, name: str, rows: int, cols: int) -> Work:
        variant = Variant(self._dtype, self._dtype, f"torch.{name}")
        return program(f"activation_{step}", variant, rows=rows, cols=cols)

    def _norm(self, step: str) -> Parts:
        t = self.shape.tower
        kernel = "torch.rms_norm" if t.gated else "torch.layer_norm"
        variant = Variant(self._dtype, self._dtype, kernel)
        return ((program(f"norm_{step}", variant, rows=self.shape.rows, cols=t.hidden), 1),)

    def _map(self, name: str, rows: int, cols: int) -> Parts:
        variant = Variant(self._dtype, self._dtype, f"torch.{name}")
        return ((program("elementwise_forward", variant, rows=rows, cols=cols), 1),)
