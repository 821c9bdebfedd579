r"""Per-layer bits as lines of ``llama-quantize --tensor-type-file``: ``blk\.(0|1)\.ffn_.*=q8_0``.

The first line whose expression is found in a tensor's name decides, so exceptions stand in front of
their layer's line. A type that does not divide the row of a tensor is replaced without a stop
(``tensor_type_fallback`` in llama.cpp's ``llama-quant.cpp``: q4_K by q5_0, a fifth larger), so the
exceptions name what such tensors get.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from foreplan.datasets.models.families import LATENTS
from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError
from foreplan.planner.export.handover import Handover, Scheme

FILE = "tensor_types.txt"
#: GGUF types by storage: Q8_0 is 8.5 bits a weight with its scales, Q4_K 4.5 and Q3_K 3.44.
TYPE: Mapping[str, str] = MappingProxyType({"int8": "q8_0", "int4": "q4_K", "int3": "q3_K"})
#: What rows get that blocks of 256 weights do not divide: blocks of 32, 4.5 bits as Q4_K.
_NARROW = "q4_0"
#: Weights of a block, by type: a row is a whole number of blocks.
_LARGE, _SMALL = 256, 32
_LARGE_BLOCKS = ("int4", "int3")
#: Names of a layer's tensors by our linears', and of its routed experts'.
_TENSORS: Mapping[str, str] = MappingProxyType(
    {
        "qkv": r"attn_(q|k|v|qkv)\.",
        "latents": r"attn_(q_a|kv_a_mqa)\.",
        "queries": r"attn_q(_b)?\.",
        "out": r"attn_output\.",
        "up": r"ffn_(gate|up)\.",
        "down": r"ffn_down\.",
        "shared_up": r"ffn_(gate|up)_shexp\.",
        "shared_down": r"ffn_down_shexp\.",
    }
)
_EXPERTS: Mapping[str, str] = MappingProxyType(
    {"up": r"ffn_(gate|up|gate_up)_exps\.", "down": r"ffn_down_exps\."}
)
#: What makes heads of latents keeps its 16 bits, in every layer.
_EXPANDING = r"blk\.[0-9]+\.attn_(k_b|v_b|kv_b)\."
_LINE = re.compile(r"blk\\\.\((?P<layers>[0-9|]+)\)\\\.\(attn\|ffn\)_\.\*=(?P<type>\w+)")


def write(handover: Handover, model: Model | None, plain: str) -> dict[str, str]:
    """The file's text by its name; no file where nothing is quantised.

    Layers of 16 bits are named too: overrides count only beside a quantised type, which these would
    get.

    Args:
        handover: what to write.
        model: the plan's; ``None`` = rows are taken for multiples of 256.
        plain: GGUF's type of 16 bits.

    Raises:
        SpecError: quantised layers with rows that no quantised type divides; names the first.
    """
    quantised = [i for i, scheme in enumerate(handover.schemes) if scheme != Scheme("bf16")]
    if not quantised:
        return {}
    odd = sorted(set(_rows(model, _SMALL).values()))
    if odd:
        scheme = handover.schemes[quantised[0]]
        raise SpecError(
            f"decision: bits of layer {quantised[0]}", got=f"{scheme.bits}, with rows of {odd[0]}",
            expected=f"rows of a multiple of {_SMALL}: llama.cpp leaves others in 16 bits",
            fix="plan again with bits=16",
        )  # fmt: skip
    types = {**TYPE, "bf16": plain}
    narrow = "|".join(_rows(model, _LARGE))
    first = [f"{_EXPANDING}={plain}"] if model is not None and model.family in LATENTS else []
    lines = []
    for scheme in sorted(set(handover.schemes)):
        numbers = "|".join(map(str, handover.layers_of(scheme)))
        if narrow and scheme.weights in _LARGE_BLOCKS:
            first.append(rf"blk\.({numbers})\.({narrow})={_NARROW}")
        lines.append(rf"blk\.({numbers})\.(attn|ffn)_.*={types[scheme.weights]}")
    return {FILE: "".join(f"{line}\n" for line in [*first, *lines])}


def read(text: str, layers: int) -> tuple[Scheme, ...]:
    """The scheme of each layer; of an empty text 16 bits."""
    schemes = [Scheme("bf16")] * layers
    by_type = {name: Scheme(storage) for storage, name in TYPE.items()}
    by_type |= {name: Scheme("bf16") for name in ("bf16", "f16")}
    for found in filter(None, map(_LINE.fullmatch, text.splitlines())):
        for number in found["layers"].split("|"):
            schemes[int(number)] = by_type[found["type"]]
    return tuple(schemes)


def larger(handover: Handover, model: Model | None) -> tuple[str, ...]:
    """A line on tensors that take more bits than the plan's, where there are any."""
    rows = sorted(set(_rows(model, _LARGE).values()))
    if not rows or not any(scheme.weights == "int3" for scheme in handover.schemes):
        return ()
    return (
        f"3 bits of linears with {' or '.join(map(str, rows))} inputs: llama.cpp has none for rows "
        f"that {_LARGE} does not divide; they take {_NARROW}, 4.5 bits a weight",
    )


def _rows(model: Model | None, block: int) -> dict[str, int]:
    """Inputs of the linears that a block does not divide, by the names of their tensors."""
    if model is None:
        return {}
    found = [
        (_TENSORS[linear.name], linear.k)
        for layer_class in sorted(set(model.layer_classes))
        for linear in model.linears_of(layer_class)
    ]
    found += [(_EXPERTS[linear.name], linear.k) for linear in model.expert_linears]
    return {name: k for name, k in found if k % block}
