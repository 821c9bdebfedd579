"""A rank's plan in the words of other tools, where they can express it.

- `autocast_configuration`: ``torch.autocast`` around the model with the modules of another
  precision apart. Autocast leaves embeddings in fp32 and keeps to one low dtype.
- `torchao_configuration`: ``torchao.float8.convert_to_float8_training`` (recipes ``rowwise`` and
  ``tensorwise`` of ``Float8LinearConfig.from_recipe_name``) and
  ``torchao.prototype.quantized_training.int8_mixed_precision_training`` (fields of
  ``Int8MixedPrecisionTrainingConfig``), inside of autocast for everything else. Both keep input and
  weight of the planned layers in 16 bits or more for the backward pass, so that a plan's saving of
  activations is lost; the configuration says so. Of int8 modules are swapped: the weights that
  torchao (0.18) puts in their place otherwise never see ``linear`` and compute as before.

What a tool cannot express is refused with the operator's name, never approximated in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreplan.datasets.kernels.training_recipe import Recipe, recipe
from foreplan.errors import SpecError

_LOW = ("bf16", "fp16")
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
_FLOAT8 = {"fp32/fp8/torch.scaled_mm+fp8": "rowwise",
           "fp32/fp8/torch.scaled_mm+fp8@tensor": "tensorwise"}  # fmt: skip
_INT8 = {"fp32/int8/torch.int_mm+bf16": False, "fp32/int8/torch.int_mm+int8": True}


def autocast_configuration(variants: Mapping[str, str], device_type: str) -> dict[str, Any]:
    """Arguments of ``torch.autocast`` and the modules that need a region without it.

    Args:
        variants: of one rank, by module: ``decision.workers[rank].operators``.
        device_type: ``cpu`` or ``cuda``.

    Returns:
        ``{"autocast": {device_type, dtype, enabled}, "fp32_modules": [...]}``; the modules are to
        run under ``torch.autocast(device_type, enabled=False)`` on fp32 inputs.

    Raises:
        SpecError: autocast cannot express a module's variant.
    """
    recipes = {name: recipe(text) for name, text in variants.items()}
    return _autocast(recipes, device_type, "torch.autocast")


def torchao_configuration(variants: Mapping[str, str]) -> dict[str, Any]:
    """What to convert with torchao on a GPU, beside an autocast region.

    Args:
        variants: of one rank, by module.

    Returns:
        ``{"float8": {"recipe_name", "modules"} | None, "int8": {"config", "modules"} | None,
        "autocast", "fp32_modules", "assumptions"}``.

    Raises:
        SpecError: torchao cannot express a module's variant, or not two of them in one model.
    """
    rest: dict[str, Recipe] = {}
    float8: dict[str, str] = {}
    int8: dict[str, str] = {}
    for name, text in variants.items():
        if text in _FLOAT8:
            float8[name] = text
        elif text in _INT8:
            int8[name] = text
        else:
            rest[name] = recipe(text)
    for chosen in (float8, int8):
        first = next(iter(chosen.values()), None)
        for name, text in chosen.items():
            if text != first:
                raise _refused(name, text, f"one recipe for all of a model, here {first}")
    document = _autocast(rest, "cuda", "torchao", dtype="bf16" if float8 or int8 else None)
    document["float8"] = document["int8"] = None
    assumptions = []
    if float8:
        name = _FLOAT8[next(iter(float8.values()))]
        document["float8"] = {"recipe_name": name, "modules": sorted(float8)}
        if name == "rowwise":
            assumptions.append("torchao rounds scales of rows to powers of two")
    if int8:
        whole = _INT8[next(iter(int8.values()))]
        document["int8"] = {
            "config": {
                "output": True, "grad_input": whole, "grad_weight": whole, "module_swap": True,
            },
            "modules": sorted(int8),
        }  # fmt: skip
        assumptions.append(
            "torchao's int8 layers keep their inputs as they come, out of autocast's reach: behind "
            "a norm in fp32, with the memory of fp32"
        )
        if whole:
            assumptions.append("torchao rounds gradients to nearest, not stochastically")
    if float8:
        assumptions.append(
            "torchao keeps inputs and weights of its float8 layers in 16 bits: activations take "
            "the memory of bf16"
        )
    document["assumptions"] = assumptions
    return document


def _autocast(
    recipes: Mapping[str, Recipe], device_type: str, tool: str, dtype: str | None = None
) -> dict[str, Any]:
    fp32 = []
    for name, found in recipes.items():
        if found.operator == "embedding" and found.output != "fp32":
            raise _refused(name, found.text, f"an fp32 embedding, which is what {tool} leaves it")
        if found.forward == found.backward == "fp32":
            if found.operator != "embedding":
                fp32.append(name)
        elif found.forward != found.backward or found.forward not in _LOW:
            raise _refused(name, found.text, f"fp32, bf16 or fp16: {tool} has nothing like it")
        elif dtype not in (None, found.forward):
            raise _refused(name, found.text, f"one low dtype for all of a model, here {dtype}")
        else:
            dtype = found.forward
    arguments = {
        "device_type": device_type,
        "dtype": _TORCH_NAMES[dtype or "bf16"],
        "enabled": dtype is not None,
    }
    return {"autocast": arguments, "fp32_modules": sorted(fp32) if dtype else []}


def _refused(name: str, text: str, expected: str) -> SpecError:
    return SpecError(
        f"export: operator {name}", got=text, expected=expected,
        fix="foreplan.apply_precision carries the plan out as it is",
    )  # fmt: skip
