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

from foreplan.planner.export.handover import Handover, Scheme

FILE = "quantization_config.json"
#: Storage dtypes that vLLM and SGLang load through compressed-tensors.
WEIGHTS = ("bf16", "int8", "fp8", "int4")
#: Ends of the names of a layer's linears; Mixtral calls those of its experts w1, w2 and w3.
_LINEARS = "proj"
_ENDS: Mapping[str, str] = MappingProxyType({"mixtral": "(proj|w[123])"})
_LAYERS = re.compile(r"re:\.\*layers\\\.\(([0-9|]+)\)\\\.\.\*(?:proj|\(proj\|w\[123\]\))\$")


def write(handover: Handover, family: str) -> dict[str, str]:
    """The file's text by its name; no file where nothing is quantised.

    Routers and gates of shared experts keep their 16 bits: no pattern takes them.

    Args:
        handover: what to write.
        family: of the model.
    """
    linears = _ENDS.get(family, _LINEARS)
    groups: dict[str, Any] = {}
    for scheme in sorted(set(handover.schemes) - {Scheme("bf16")}):
        numbers = "|".join(str(layer) for layer in handover.layers_of(scheme))
        groups[f"group_{len(groups)}"] = {
            "targets": [rf"re:.*layers\.({numbers})\..*{linears}$"],
            "weights": _weights(scheme),
            "input_activations": _activations(scheme),
            "format": _format(scheme),
        }
    if not groups:
        return {}
    document = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(groups) > 1 else groups["group_0"]["format"],
        "config_groups": groups,
        "ignore": ["lm_head"],
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
