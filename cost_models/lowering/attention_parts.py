"""`attention_parts`: what attention with dropout, or in a fused layer, is made of on a processor.

No fused kernel of a processor drops scores, so that torch writes attention out
(``_scaled_dot_product_attention_math``, ``attention.cpp``): queries and keys are scaled and laid
out, two products, a mask that is added, a softmax that looks for rows without a key, and dropout
of all pairs, all of it in fp32. Autograd goes back through each. GPUs have fused kernels that drop.
Fused layers (`fused_layers`) write attention out on a processor, too (``attention.cpp``): heads are
laid out, two products, a softmax, and heads are put together.

Held against what torch runs in ``tests/cost_models/lowering/test_attention_parts.py``.

Shape legend: ``B`` batch, ``H`` heads, ``Q`` queries, ``K`` keys, ``D`` values of a head.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from foreplan.cost_models.lowering.attention_mask import AttentionMask
from foreplan.cost_models.lowering.backward_steps import BY_BLOCK
from foreplan.datasets.program import Program, Variant, program

#: What the name of a kernel says: scores are dropped.
_DROPOUT: Final = "_dropout"
_GRADIENT: Final = "_gradient"
#: The same: it is part of a fused layer.
WITHIN: Final = "_within"
#: Place of the probability among the arguments of ``scaled_dot_product_attention``.
_PLACE = 4


def dropout_word(arguments: str) -> str:
    """What the name of an attention's kernel says of dropout.

    Args:
        arguments: of the call, as `OperatorCall` has them.
    """
    positional, named = json.loads(arguments)
    found = positional[_PLACE] if len(positional) > _PLACE else named.get("dropout_p", 0.0)
    return _DROPOUT if found > 0 else ""


def drops_scores(item: Program) -> bool:
    """Whether a program is an attention with dropout, or its gradient."""
    return "attention" in item.op and _DROPOUT in item.variant.kernel


def attention_parts(item: Program) -> list[tuple[Program, int]]:
    """The parts of an attention that `drops_scores`, and how often each runs."""
    of = _Attention(item)
    return of.backward() if item.op.endswith(_GRADIENT) else of.forward()


def within_layer(item: Program) -> bool:
    """Whether a program is the attention of a fused layer."""
    return "attention" in item.op and item.variant.kernel.endswith(WITHIN)


def within_parts(item: Program, *, apart: bool) -> list[tuple[Program, int]]:
    """The parts of an attention that is `within_layer`, and how often each runs.

    Args:
        item: the attention.
        apart: whether it is written out.
    """
    kernel = item.variant.kernel.removesuffix(WITHIN)
    if not apart:
        return [(replace(item, variant=replace(item.variant, kernel=kernel)), 1)]
    d, compute = item.dims, item.variant.compute
    heads, rows, width = d["heads"], d["batch"] * d["queries"], d["heads"] * d["head_dim"]

    def variant(name: str) -> Variant:
        return Variant(compute, compute, f"torch.{name}")

    def product(n: int, k: int) -> Program:
        return program("matmul", variant("bmm"), batch=d["batch"] * heads, m=d["queries"], n=n, k=k)

    def copied(tensors: int) -> Program:
        return program(
            "elementwise", variant("contiguous"), rows=rows, cols=tensors * width, inputs=1
        )

    return [
        (copied(3), 1), (product(d["keys"], d["head_dim"]), 1),
        (program("softmax", variant("softmax"), rows=rows * heads, cols=d["keys"]), 1),
        (product(d["head_dim"], d["keys"]), 1), (copied(1), 1),
    ]  # fmt: skip


class _Attention:
    def __init__(self, item: Program) -> None:
        d = item.dims
        self.B, self.H, self.Q, self.K = d["batch"], d["heads"], d["queries"], d["keys"]
        self.D, self.kv_heads = d["head_dim"], d["kv_heads"]
        self.shared = self.kv_heads < self.H
        self.full = item.op.startswith("full") or self.Q == 1
        self.mask = AttentionMask.of_kernel(item.variant.kernel)
        self.compute = item.variant.compute
        self.pairs, self.queries = (self.B * self.H * self.Q, self.K), (self.B * self.H * self.Q)
        self.keys = self.B * self.H * self.K

    def forward(self) -> list[tuple[Program, int]]:
        D, keys, queries = self.D, self.keys, self.queries
        found = [
            (self.wide("mul", queries, D), 1), (self.wide("mul", keys, D), 1),
            (self.product(self.Q, self.K, D), 1), (self.product(self.Q, D, self.K), 1),
            *self.masked(),
            # The softmax, pairs that are masked, whether all of a row are, and the choice.
            (program("softmax", _fp32("softmax"), rows=self.pairs[0], cols=self.K), 1),
            (self.wide("eq", *self.pairs), 1),
            (program("reduction", _int8("all"), rows=self.pairs[0], cols=self.K), 1),
            (self.wide("where", *self.pairs), 1),
            *dropout_parts(*self.pairs),
        ]  # fmt: skip
        if self.B > 1:  # heads lie inside of positions: products want them apart
            found.append((self.wide("clone", queries, D), 1))
        if self.B > 1 or self.shared:  # or keys and values are repeated
            found.append((self.wide("clone", keys, D), 2))
        if self.compute != "fp32":
            found += [*self.all_converted(), (self.converted(*self.pairs), 1)]
        return found

    def masked(self) -> list[tuple[Program, int]]:
        """The mask made, and added."""
        found = []
        if self.mask is not None:
            whole = self.mask.batch and self.mask.heads and not self.mask.broadcast
            if self.mask.boolean:
                own = (self.B if self.mask.batch else 1) * (self.H if self.mask.heads else 1)
                rows = own * (1 if self.mask.broadcast else self.Q)
                found.append((self.wide("where", rows, self.K), 1))
        elif self.full:
            return []
        else:
            whole = False
            ones = program("fill", _int8("ones"), rows=self.Q, cols=self.K)
            kept = program("elementwise", _int8("tril"), rows=self.Q, cols=self.K, inputs=1)
            found += [(ones, 1), (kept, 1), (self.wide("where", self.Q, self.K), 1)]
        lies = "" if whole else BY_BLOCK
        return [*found, (self.wide(f"add{lies}", *self.pairs, 2 if whole else 1), 1)]

    def backward(self) -> list[tuple[Program, int]]:
        D, keys, queries = self.D, self.keys, self.queries
        found = [
            (self.product(self.K, D, self.Q), 1), (self.product(self.Q, self.K, D), 1),
            (self.product(D, self.K, self.Q), 1), (self.product(self.Q, D, self.K), 1),
            (self.wide("mul", *self.pairs, 2), 1), (self.wide("backward", *self.pairs, 2), 1),
            (self.wide("mul", queries, D), 1), (self.wide("mul", keys, D), 1),
        ]  # fmt: skip
        if self.shared:  # what heads share is summed up
            found.append((self.wide("sum", keys, D), 2))
        if self.compute != "fp32":
            found += self.all_converted()
        return found

    def product(self, m: int, n: int, k: int) -> Program:
        return program("matmul", _fp32("bmm"), batch=self.B * self.H, m=m, n=n, k=k)

    def wide(self, name: str, rows: int, cols: int, inputs: int = 1) -> Program:
        return program("elementwise", _fp32(name), rows=rows, cols=cols, inputs=inputs)

    def all_converted(self) -> list[tuple[Program, int]]:
        """Queries and results, keys and values, as they are handed over."""
        kept = self.B * self.kv_heads * self.K
        return [(self.converted(self.queries, self.D), 2), (self.converted(kept, self.D), 2)]

    def converted(self, rows: int, cols: int) -> Program:
        kernel = Variant(self.compute, self.compute, "torch._to_copy")
        return program("elementwise", kernel, rows=rows, cols=cols, inputs=1)


def dropout_parts(rows: int, cols: int, compute: str = "fp32") -> list[tuple[Program, int]]:
    """Dropout on a processor, where it is no kernel of its own (``Dropout.cpp``).

    Args:
        rows: of what is dropped.
        cols: likewise.
        compute: dtype.
    """
    variants = (Variant(compute, compute, f"torch.{name}") for name in ("bernoulli", "div", "mul"))
    return [
        (program("elementwise", variant, rows=rows, cols=cols, inputs=inputs), 1)
        for variant, inputs in zip(variants, (1, 1, 2), strict=True)
    ]


def _fp32(name: str) -> Variant:
    return Variant("fp32", "fp32", f"torch.{name}")


def _int8(name: str) -> Variant:
    return Variant("int8", "int8", f"torch.{name}")
