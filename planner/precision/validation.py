"""Does an indicator order operators as real gradients do? Measured one operator at a time.

For every module and variant the module alone is computed by that variant, with the kernels of the
execution, and the gradients of all parameters are compared with those of fp32 on the same batches.
An indicator is as good as its ranks: Spearman's correlation with the measured perturbation, within
each precision, because precisions lie orders of magnitude apart and would order themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.gradient_variance import Batch
from foreplan.datasets.training_variant import training_variant
from foreplan.errors import SpecError
from foreplan.planner.precision.task import TrainingTask

#: Fewest modules whose ranks say anything.
LEAST = 4


@dataclass(frozen=True, slots=True)
class Perturbed:
    """One module computed by one variant.

    Attributes:
        module: its path.
        variant: text of the variant.
        squared: squared distance of all gradients from fp32's, mean over batches.
        relative: the same over the squared norm of fp32's gradients.
    """

    module: str
    variant: str
    squared: float
    relative: float


def measure_perturbations(
    task: TrainingTask, variants: Mapping[str, Iterable[str]], batches: Iterable[Batch]
) -> list[Perturbed]:
    """Gradient perturbation of each module and variant; imports torch.

    Args:
        task: what is trained.
        variants: texts by module; fp32 ones are left out.
        batches: (inputs, target) each; every variant sees the same.

    Raises:
        SpecError: no batch, or a module that cannot be computed by a variant.
    """
    import torch

    from foreplan.planner.precision.execution.modules import apply_variants, remove_precision

    module = task.module().train()
    kept = list(batches)
    if not kept:
        raise SpecError("batches", got=0, expected="at least one")
    buffers = {name: b.clone() for name, b in module.named_buffers()}

    def gradients(batch: Batch) -> torch.Tensor:
        with torch.no_grad():  # running statistics are not what is measured
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
        module.zero_grad(set_to_none=True)
        torch.autograd.backward(task.loss(module(*batch[0]).float(), batch[1]))
        found = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        return torch.cat(found).double()

    exact = [gradients(batch) for batch in kept]
    whole = float(np.mean([float(g.square().sum()) for g in exact]))
    result = []
    for name, texts in variants.items():
        for text in texts:
            if training_variant(text).output == training_variant(text).forward == "fp32":
                continue
            apply_variants(module, {name: text})
            distances = [
                float((gradients(batch) - g).square().sum())
                for batch, g in zip(kept, exact, strict=True)
            ]
            remove_precision(module)
            squared = float(np.mean(distances))
            result.append(Perturbed(name, text, squared, squared / whole if whole else 0.0))
    return result


def rank_correlation(
    omega: Mapping[str, Mapping[str, float]], measured: Iterable[Perturbed]
) -> dict[str, float]:
    """Spearman's correlation of an indicator with measured perturbations, by variant's precision.

    Args:
        omega: by module and variant.
        measured: from `measure_perturbations`.

    Returns:
        By precision and kernel; variants of fewer than `LEAST` modules are left out, and so are
        indicators that rank all alike.
    """
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    by_variant: dict[str, list[Perturbed]] = {}
    for row in measured:
        by_variant.setdefault(row.variant, []).append(row)
    result: dict[str, float] = {}
    for text, rows in by_variant.items():
        ours = [omega[row.module][text] for row in rows]
        if len(rows) < LEAST or len(set(ours)) < 2:
            continue
        correlation = float(spearmanr(ours, [row.squared for row in rows]).statistic)
        result[f"{training_variant(text).precision} {text.rpartition('/')[2]}"] = correlation
    return result
