"""Which dtype an operator that no plan chooses for works in: rules as data, for each backend.

Measured with torch 2.13 in eager mode without autocast. On CPU, norms, softmax and activations hand
on what they are fed; bf16 with fp32 gives fp32. Matrix products and attention refuse unlike
operands, so that the execution casts them to the widest. On CUDA, a layer norm with fp32 weights
refuses a bf16 input, so that norms are pinned there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from foreplan.datasets.graphs.operator_graph import OperatorNode

Role = Literal["adjustable", "dependent", "pinned", "constant"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What an operator makes of its inputs' dtypes.

    Attributes:
        role: ``dependent`` works in the widest dtype of its inputs, ``pinned`` in fp32.
        casts: inputs of another dtype are cast first; otherwise the kernel promotes them itself.
    """

    role: Role
    casts: bool = False


_CPU = {
    "elementwise": Rule("dependent"),
    "activation": Rule("dependent"),
    "softmax": Rule("dependent"),
    "norm": Rule("dependent"),
    "reduction": Rule("dependent"),
    "pool": Rule("dependent"),
    "copy": Rule("dependent"),
    "attention": Rule("dependent", casts=True),
    "matmul": Rule("dependent", casts=True),
    # Products with an fp32 weight that no module of ours wraps.
    "linear": Rule("pinned", casts=True),
    "convolution": Rule("pinned", casts=True),
    # A bag refuses weights of its samples in another dtype than the table's.
    "embedding": Rule("pinned", casts=True),
    "create": Rule("pinned"),
    "input": Rule("pinned"),
    "loss": Rule("pinned", casts=True),
}
RULES: Mapping[str, Mapping[str, Rule]] = MappingProxyType(
    {"cpu": _CPU, "cuda": {**_CPU, "norm": Rule("pinned", casts=True)}}
)


def rule_for(node: OperatorNode, device_kind: str) -> Rule:
    """Rule of an operator that no plan chooses for.

    Args:
        node: the operator.
        device_kind: ``cpu`` or ``cuda``.
    """
    written_out = node.op == "norm" and not node.target.startswith("aten.")
    if (node.op in ("elementwise", "copy", "activation") and node.parameters) or written_out:
        # An fp32 parameter takes part (a position table, a PReLU's slope, the scale of a norm
        # written out in Python), so that the result is fp32.
        return Rule("pinned")
    return RULES[device_kind].get(node.op, Rule("dependent"))
