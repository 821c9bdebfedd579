"""What a decoder stage refuses, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.weights import RandomWeights
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

BF16 = PhaseKernels(*[Variant.parse("bf16/bf16/torch.linear")] * 2)
SDPA = PhaseKernels(*[Variant.parse("bf16/bf16/torch.sdpa")] * 2)
INT8 = Variant.parse("int8/bf16/torch.dequant_linear")


def same(kernels: PhaseKernels, layers: int) -> StageKernels:
    return StageKernels((kernels,) * layers, SDPA, kernels)


def test_what_does_not_fit_is_one_line() -> None:
    model = load_model("tiny-llama-random")
    sizes: dict[str, Any] = {"prefill_batches": [2], "decode_batches": [2], "prompt": 8}
    with pytest.raises(SpecError, match="layers within"):
        DecoderStage(model, 4, 9, positions=16, **sizes)
    with pytest.raises(SpecError, match="at most 2048"):
        DecoderStage(model, 0, 8, positions=4096, **sizes)
    with pytest.raises(SpecError, match="1 to 4 positions"):
        DecoderStage(model, 0, 8, positions=4, **sizes)
    with pytest.raises(SpecError, match="the 2 of prefill"):
        DecoderStage(model, 0, 8, positions=16, **(sizes | {"decode_batches": [1]}))
    with pytest.raises(SpecError, match="sizes of at least 1"):
        DecoderStage(model, 0, 8, positions=16, **(sizes | {"decode_batches": [2, 0]}))
    stage = DecoderStage(model, 7, 8, positions=16, **sizes)
    weights = RandomWeights(model)
    with pytest.raises(SpecError, match="1 layers"):
        stage.load(weights, same(BF16, 2))
    mixed = PhaseKernels(INT8, BF16.decode)
    with pytest.raises(SpecError, match=r"layer 7: .* got .layouts int8\.rows and bf16"):
        stage.load(weights, same(mixed, 1))
    with pytest.raises(SpecError, match="kernels of the head"):
        stage.load(weights, StageKernels((BF16,), SDPA))
    stage.load(weights, same(BF16, 1))
    with pytest.raises(SpecError, match="a position in the cache"):
        stage.decode(0, 9, torch.zeros(2, 256, dtype=torch.bfloat16))
