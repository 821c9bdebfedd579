"""Decoder stages on a CUDA device; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from foreplan.datasets.kernels.registry import kernels_for
from foreplan.datasets.models.decoder_memory import stage_bytes
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.weights import RandomWeights
from foreplan.datasets.program import Variant
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BATCH, PROMPT, POSITIONS = 4, 32, 40
SDPA = PhaseKernels(*[Variant.parse("bf16/bf16/torch.sdpa")] * 2)
MODELS = ("tiny-llama-random", "opt-125m", "qwen3-0.6b")


def stage(name: str, variant: Variant, device: str, *, reference: bool = False) -> DecoderStage:
    model = load_model(name).model_copy(update={"layers": 2, "vocab": 512})
    made = DecoderStage(
        model,
        0,
        2,
        prefill_batches=[BATCH],
        decode_batches=[BATCH],
        prompt=PROMPT,
        positions=POSITIONS,
        device=device,
        reference=reference,
    )
    kernels = PhaseKernels(variant, variant)
    made.load(RandomWeights(model, seed=1), StageKernels((kernels,) * 2, SDPA, kernels))
    made.keep_logits = True
    return made


def run(made: DecoderStage) -> torch.Tensor:
    """Logits of prefill and of two decode steps, ``[3, batch, vocab]``, fp32 on the host."""
    ids = torch.randint(0, 512, (BATCH, PROMPT), generator=torch.Generator().manual_seed(2))
    ids = ids.to(made.device)
    made.prefill(0, ids)
    assert made.logits is not None
    logits = [made.logits.float().cpu()]
    for step in (1, 2):
        made.decode(0, step, ids[:, step])
        logits.append(made.logits.float().cpu())
    return torch.stack(logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("variant", kernels_for("linear", "cuda"), ids=str)
def test_close_to_the_reference(name: str, variant: Variant) -> None:
    exact = run(stage(name, variant, "cuda:0", reference=True))
    planned = run(stage(name, variant, "cuda:0"))
    error = (planned - exact).norm() / exact.norm()
    assert error < (0.1 if variant.compute == "fp8" else 0.04)


@pytest.mark.parametrize("name", MODELS)
def test_reference_equals_that_of_the_cpu(name: str) -> None:
    variant = Variant.parse("int8/bf16/torch.dequant_linear")
    here, there = (run(stage(name, variant, d, reference=True)) for d in ("cpu", "cuda:0"))
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3 * float(here.std()))


@pytest.mark.parametrize("storage", ["bf16", "int8", "int4"])
def test_bytes_held_are_the_bytes_planned(storage: str) -> None:
    variant = next(v for v in kernels_for("linear", "cuda") if v.storage == storage)
    made = stage("tiny-llama-random", variant, "cuda:0")
    planned = stage_bytes(
        made.model,
        0,
        2,
        [storage] * 2,
        batch=BATCH,
        positions=POSITIONS,
        head_storage=storage,
    )
    assert made.memory_bytes() == planned
