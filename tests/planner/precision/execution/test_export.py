from __future__ import annotations

import inspect

import pytest
import torch

from foreplan.errors import SpecError
from foreplan.planner.precision.execution.export import (
    autocast_configuration,
    torchao_configuration,
)

FP32, BF16 = "fp32/fp32/torch.linear", "fp32/bf16/torch.linear"
INT8, INT8_ALL = "fp32/int8/torch.int_mm+bf16", "fp32/int8/torch.int_mm+int8"
FP8 = "fp32/fp8/torch.scaled_mm+fp8"


def test_autocast_takes_one_low_dtype_and_exceptions() -> None:
    plan = {"a": BF16, "b": FP32, "c": "fp32/bf16/torch.conv2d",
            "e": "fp32/fp32/torch.embedding"}  # fmt: skip
    made = autocast_configuration(plan, "cpu")
    assert made == {
        "autocast": {"device_type": "cpu", "dtype": "bfloat16", "enabled": True},
        "fp32_modules": ["b"],
    }
    arguments = dict(made["autocast"])
    assert arguments.keys() < inspect.signature(torch.autocast.__init__).parameters.keys()
    arguments["dtype"] = getattr(torch, arguments["dtype"])
    with torch.autocast(**arguments):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.bfloat16
    assert not autocast_configuration({"a": FP32}, "cpu")["autocast"]["enabled"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"a": BF16, "b": INT8}, "operator b: got '.*int_mm.*nothing like it"),
        ({"a": BF16, "b": "fp32/fp16/torch.linear"}, "operator b: .*one low dtype"),
        ({"e": "fp32/bf16/torch.embedding"}, "operator e: .*an fp32 embedding"),
        ({"a": "fp32/tf32/torch.linear"}, "operator a: .*tf32"),
    ],
)
def test_what_autocast_cannot_express_is_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        autocast_configuration(plan, "cuda")


def test_torchao_takes_one_recipe_and_says_what_is_lost() -> None:
    made = torchao_configuration({"a": FP8, "b": BF16, "c": FP32, "d": FP8})
    assert made["float8"] == {"recipe_name": "rowwise", "modules": ["a", "d"]}
    assert made["int8"] is None
    assert made["fp32_modules"] == ["c"]
    assert any("memory of bf16" in text for text in made["assumptions"])
    made = torchao_configuration({"a": INT8})
    assert made["int8"]["config"] == {
        "output": True, "grad_input": False, "grad_weight": False, "module_swap": True,
    }  # fmt: skip
    assert any("memory of fp32" in text for text in made["assumptions"])
    assert made["autocast"]["enabled"]
    assert torchao_configuration({"a": BF16})["assumptions"] == []


@pytest.mark.parametrize(
    "plan",
    [
        {"a": FP8, "b": "fp32/fp8/torch.scaled_mm+fp8@tensor"},
        {"a": INT8, "b": INT8_ALL},
        {"b": "fp32/fp8/torch.scaled_mm+bf16"},
        {"b": "fp32/int8/torch.int_mm+fp32"},
    ],
)
def test_what_torchao_cannot_express_is_refused(plan: dict[str, str]) -> None:
    with pytest.raises(SpecError, match=r"operator b.*apply_precision carries the plan out"):
        torchao_configuration(plan)


@pytest.mark.parametrize(("text", "products"), [(INT8, 1), (INT8_ALL, 3)])
def test_torchao_computes_in_int8_what_is_planned(text: str, products: int) -> None:
    """With weights in place of modules (its default) torchao 0.18 computes none of it in int8."""
    training = pytest.importorskip(
        "torchao.prototype.quantized_training", reason="torchao is not installed"
    )
    from torchao.quantization import quantize_

    made = torchao_configuration({"0": text, "1": BF16})["int8"]
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    config = training.Int8MixedPrecisionTrainingConfig(**made["config"])
    quantize_(model, config, filter_fn=lambda _, name: name in made["modules"])
    with torch.profiler.profile() as run, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(32, 64, requires_grad=True)).float().sum().backward()
    assert {e.key: e.count for e in run.key_averages()}["aten::_int_mm"] == products
