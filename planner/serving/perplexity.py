"""`held_out_perplexity`: what a serving decision's own kernels make of text that nothing has seen.

All stages run in this process, prefill by prefill, with the planned kernels of each; logits of
every position count. The text is the part that no quality table was measured on. Imports torch.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch.nn import functional as F

from foreplan.cost_models.quality.quality_table import QualityTable
from foreplan.datasets.models.byte_text import windows
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.weights import open_weights
from foreplan.datasets.program import Variant
from foreplan.datasets.text_tokens import text_tokens
from foreplan.planner.serving.pipeline import stage_kernels
from foreplan.planner.serving.pricing import PREFILL
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload, StageDecision
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

#: Windows of a pass; tokens of each, cut to what the model attends to.
BATCH, LENGTH = 4, 256
#: Work that a measurement may be, and the windows that it is at least and at most.
_MOST_FLOP, _FEWEST, _MOST = 1e13, 8, 128

_BF16 = Variant("bf16", "bf16", "torch.linear")
_SDPA = Variant("bf16", "bf16", "torch.sdpa")


def judging_text(workload: ServingWorkload) -> str | None:
    """Text whose held-out part judges, ``None`` where the workload names none.

    Raises:
        SpecError: the workload's quality table cannot be read.
    """
    if workload.text is not None or workload.quality is None:
        return workload.text
    return QualityTable.load(workload.quality).text if Path(workload.quality).is_file() else None


def held_out_perplexity(
    model: Model, workload: ServingWorkload, decision: ServingDecision, seed: int
) -> dict[str, float]:
    """Perplexity of a decision, and how much that is above every layer and cache at 16 bits.

    Args:
        model: with trained weights.
        workload: names the text.
        decision: whose kernels run.
        seed: of the windows.

    Raises:
        SpecError: no text, or one that is too short.
    """
    text = judging_text(workload)
    if text is None or model.weights != "trained":
        return {}
    length = min(LENGTH, model.max_sequence - 1)
    afford = _MOST_FLOP / (2 * model.parameters * length)
    count = int(min(max(afford, _FEWEST), _MOST)) // BATCH * BATCH
    ids = torch.from_numpy(
        windows(text_tokens(model, text, "held_out"), count, length + 1, (seed, 2))
    )
    device = _device(decision.stages[0])
    nats, exact = (
        _nats(model, decision.stages, ids, device, seed, plain=plain) for plain in (False, True)
    )
    return {
        "perplexity": math.exp(nats),
        "perplexity_increase": math.exp(nats) - math.exp(exact),
        "tokens": float(ids[:, 1:].numel()),
    }


def _nats(
    model: Model, decided: tuple[StageDecision, ...], ids: torch.Tensor, device: torch.device,
    seed: int, *, plain: bool,
) -> float:  # fmt: skip
    """Cross-entropy a token; ``plain`` computes every linear in bf16 and keeps keys in it."""
    length = ids.shape[1] - 1
    stages = []
    for chosen in decided:
        stage = DecoderStage(
            model, chosen.start, chosen.end, prefill_batches=(BATCH,), decode_batches=(BATCH,),
            prompt=length, positions=length, device=str(device),
        )  # fmt: skip
        stage.load(open_weights(model, seed=seed, device=device), _kernels(chosen, plain=plain))
        stage.keep_logits = stage.every_position = True
        stages.append(stage)
    total = 0.0
    for first in range(0, len(ids), BATCH):
        part = ids[first : first + BATCH]
        x = part[:, :-1].to(device)
        for stage in stages:
            x = stage.prefill(0, x)
        logits = stages[-1].logits
        assert logits is not None  # kept by the last stage
        total += float(F.cross_entropy(logits.float(), part[:, 1:].flatten().to(device))) * BATCH
    return total / len(ids)


def _kernels(chosen: StageDecision, *, plain: bool) -> StageKernels:
    table = stage_kernels(chosen)

    def both(op: str, bits: int | None = None) -> PhaseKernels:
        variant = table.variant(PREFILL, op, bits)
        return PhaseKernels(variant, variant)

    plain_linear, attention = PhaseKernels(_BF16, _BF16), both("attention")
    if plain and attention.prefill.storage != _SDPA.storage:
        attention = PhaseKernels(_SDPA, _SDPA)
    return StageKernels(
        layers=tuple(plain_linear if plain else both("linear", b) for b in chosen.bits),
        attention=attention,
        head=both("head") if f"{PREFILL}/head" in table.table else None,
    )


def _device(stage: StageDecision) -> torch.device:
    """The current GPU for a stage on one, else the processor."""
    gpu = "/cuda" in stage.device
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
