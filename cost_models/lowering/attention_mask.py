"""`AttentionMask`: what is added to an attention's scores, as far as its kernel depends on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from foreplan.datasets.graphs.operator_call import OperatorCall, described_tensors

_MASK: Final = "_mask"
#: Place of the tensor among an attention's: behind queries, keys and values.
_PLACE = 3


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """A bias or a mask, the same for all sequences and heads but as said here.

    Torch takes another kernel where something is added (``sdp_utils.cpp``: no flash attention with
    a mask), and that kernel reads it in other ways. Names of kernels carry it as words
    (``torch.scaled_dot_product_attention_mask_heads_learned``).

    Attributes:
        batch: each sequence has its own.
        heads: each head has its own.
        broadcast: all queries share one row.
        strided: keys are no neighbours in memory.
        boolean: truth values, which are converted first.
        learned: it has a gradient.
    """

    batch: bool = False
    heads: bool = False
    broadcast: bool = False
    strided: bool = False
    boolean: bool = False
    learned: bool = False

    @classmethod
    def of_call(cls, call: OperatorCall, *, training: bool) -> AttentionMask | None:
        """What a captured call of an attention adds, or ``None``.

        Args:
            call: of ``scaled_dot_product_attention``.
            training: in a training step, where what is learned has a gradient.
        """
        tensors = described_tensors(call.arguments)
        if len(tensors) <= _PLACE:
            return None
        shape, strides, dtype = tensors[_PLACE]
        # An extent without a stride is an expanded one.
        own = [extent > 1 and stride != 0 for extent, stride in zip(shape, strides, strict=True)]
        return cls(
            batch=any(own[:-3]),
            heads=any(own[-3:-2]),
            broadcast=not any(own[-2:-1]),
            strided=own[-1] and strides[-1] != 1,
            boolean=dtype == "bool",
            learned=training and call.gradients[_PLACE],
        )

    @classmethod
    def of_kernel(cls, kernel: str) -> AttentionMask | None:
        """What the name of a kernel says, or ``None`` where nothing is added."""
        _, found, words = kernel.partition(_MASK)
        if not found:
            return None
        said = words.split("_")
        return cls(**{name: name in said for name in cls.__slots__})

    @property
    def word(self) -> str:
        """What it adds to the name of a kernel."""
        return "_".join([_MASK, *(name for name in self.__slots__ if getattr(self, name))])

    def sizes(self, batch: int, heads: int) -> Mapping[str, int]:
        """Its dimensions in an operator table; see `operator_table.KINDS`.

        Args:
            batch: sequences of the attention.
            heads: of queries.
        """
        own = math.prod([batch if self.batch else 1, heads if self.heads else 1])
        return {
            "masks": own, "strided": int(self.strided), "training": int(self.learned),
            "converts": int(self.boolean), "broadcast": int(self.broadcast),
        }  # fmt: skip
