"""Per-layer bits as a ``quantization_config`` of compressed-tensors, which vLLM and SGLang load.

Format ``mixed-precision``: one config group a scheme, its layers named by a regular expression
(https://github.com/vllm-project/compressed-tensors, ``QuantizationConfig``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foreplan.datasets.models.families import LATENTS, MIXTURES
from foreplan.errors import SpecError
from foreplan.planner.export.handover import Handover, Scheme

FILE = "quantization_config.json"
#: Storage dtypes that vLLM and SGLang load through compressed-tensors.
WEIGHTS = ("bf16", "int8", "fp8", "int4")
#: Where a layer's number stands in the names of its modules, and how names of its linears end.
#: Mixtral calls those of its experts w1, w2 and w3.
_LINEARS = ("layers", "proj")
_NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "mixtral": ("layers", "(proj|w[123])"),
        "opt": ("layers", "(proj|fc[12])"),
        "starcoder2": ("layers", "(proj|c_fc)"),
        "gpt_neox": ("layers", "(query_key_value|dense|dense_h_to_4h|dense_4h_to_h)"),
        "gpt2": ("h", "c_(attn|proj|fc)"),
        **dict.fromkeys(LATENTS, ("layers", "((?<!kv_b_)proj|kv_a_proj_with_mqa)")),
    }
)
#: Families whose experts servers read in 16 bits or as they were published (MXFP4).
OWN_EXPERTS = ("gpt_oss",)
#: What the head is called, where not ``lm_head``.
_HEADS: Mapping[str, str] = MappingProxyType({"gpt_neox": "embed_out"})
_LAYERS = re.compile(r"re:\.\*(?:layers|h)\\\.\(([0-9|]+)\)\\\.\.\*[^.]+\$")
#: Routers, and gates of shared experts: they keep their 16 bits.
_GATES = r"re:.*gate$"
#: What makes heads of latents does, too.
_EXPANDING = r"re:.*kv_b_proj$"


def write(handover: Handover, family: str) -> dict[str, str]:
    """The file's text by its name; no file where nothing is quantised.

    The servers take a linear that is neither a group's nor ignored for a mistake, so that layers of
    16 bits are named among the ignored, and so are the gates of mixtures.

    Args:
        handover: what to write.
        family: of the model.

    Raises:
        SpecError: quantised layers of a family whose experts the servers load in formats of their
            own.
    """
    stem, linears = _NAMES.get(family, _LINEARS)
    groups: dict[str, Any] = {}
    for scheme in sorted(set(handover.schemes) - {Scheme("bf16")}):
        numbers = "|".join(str(layer) for layer in handover.layers_of(scheme))
        groups[f"group_{len(groups)}"] = {
            "targets": [rf"re:.*{stem}\.({numbers})\..*{linears}$"],
            "weights": _weights(scheme),
            "input_activations": _activations(scheme),
            "format": _format(scheme),
        }
    if not groups:
        return {}
    if family in OWN_EXPERTS:
        layer = next(i for i, scheme in enumerate(handover.schemes) if scheme != Scheme("bf16"))
        raise SpecError(
            f"decision: bits of layer {layer}", got=f"{handover.schemes[layer].weights} weights",
            expected=f"16 bits: nothing documents {family} in compressed-tensors",
            fix="plan again with bits=16, or export to llama.cpp",
        )  # fmt: skip
    plain = "|".join(str(layer) for layer in handover.layers_of(Scheme("bf16")))
    ignored = [_HEADS.get(family, "lm_head"), *([rf"re:.*{stem}\.({plain})\..*"] if plain else [])]
    document = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(groups) > 1 else groups["group_0"]["format"],
        "config_groups": groups,
        "ignore": [
            *ignored,
            *([_GATES] if family in MIXTURES else []),
            *([_EXPANDING] if family in LATENTS else []),
        ],
    }
    return {FILE: json.dumps(document, indent=2) + "\n"}


def read(text: str | None, layers: int) -> tuple[Scheme, ...]:
    """The scheme of each layer."""
    schemes = [Scheme("bf16")] * layers
    groups = json.loads(text)["config_groups"] if text is not None else {}
    for group in groups.values():
        weights, inputs = group["weights"], group["input_activations"]
        kind = "fp" if weights["type"] == "float" else "int"
        scheme = Scheme(
            f"{kind}{weights['num_bits']}",
            None if inputs is None else ("fp8" if inputs["type"] == "float" else "int8"),
        )
        for target in group["targets"]:
            found = _LAYERS.fullmatch(target)
            for number in found[1].split("|") if found else ():
                schemes[int(number)] = scheme
    return tuple(schemes)


def _weights(scheme: Scheme) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.weights.startswith("fp") else "int",
        "symmetric": True,
        "strategy": "group" if scheme.group else "channel",
        "dynamic": False,
    }
    if scheme.group:
        found["group_size"] = scheme.group
    return found


def _activations(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activations is None:
        return None
    kind = "float" if scheme.activations == "fp8" else "int"
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


def _format(scheme: Scheme) -> str:
    if scheme.activations is not None:
        return "float-quantized" if scheme.weights == "fp8" else "int-quantized"
    return "naive-quantized" if scheme.weights == "fp8" else "pack-quantized"
