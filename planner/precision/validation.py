"""Does an indicator order operators as real gradients do? Measured one operator at a time.

For every module and variant the module alone is computed by that variant, with the kernels of the
execution, and the gradients of all parameters are compared with those of fp32 on the same batches.
An indicator is as good as its ranks: Spearman's correlation with the measured perturbation, within
each precision, because precisions lie orders of magnitude apart and would order themselves.

``python -m foreplan.planner.precision.validation`` prints the table of ``docs/results``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from foreplan.cost_models.gradient_variance import Batch
from foreplan.datasets.training_variant import training_variant
from foreplan.errors import SpecError
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.indicator import module_variants, omega_table
from foreplan.planner.precision.spec import Indicator, PrecisionWorkload
from foreplan.planner.precision.task import TrainingTask, training_task

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
    """Spearman's correlation of an indicator with measured perturbations, by precision.

    Args:
        omega: by module and variant.
        measured: from `measure_perturbations`.

    Returns:
        By precision, 8 bits with the dtype of the backward pass (``int8+bf16``), whatever the kind
        of operator; those of fewer than `LEAST` modules are left out, and so are indicators that
        rank all alike.
    """
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    by_precision: dict[str, list[Perturbed]] = {}
    for row in measured:
        found = training_variant(row.variant)
        eight = found.precision == "int8"
        key = f"{found.precision}+{found.backward}" if eight else found.precision
        by_precision.setdefault(key, []).append(row)
    result: dict[str, float] = {}
    for key, rows in by_precision.items():
        ours = [omega[row.module][row.variant] for row in rows]
        if len(rows) >= LEAST and len(set(ours)) > 1:
            result[key] = float(spearmanr(ours, [row.squared for row in rows]).statistic)
    return result


#: Networks of the printed table: name, options, batch.
_NETWORKS: tuple[tuple[str, dict[str, int], int], ...] = (
    ("byte_lm", {"context": 64, "width": 128, "layers": 3, "heads": 4}, 8),
    ("digits_mlp", {"width": 128, "layers": 6}, 64),
    ("digits_cnn", {"width": 16}, 64),
)
_INDICATORS: tuple[Indicator, ...] = (
    "gradient_variance", "depth_weighted", "hessian", "weight_change", "random"
)  # fmt: skip


def _print_table(seeds: int, batches: int) -> None:
    """Mean and range of the correlation over seeds of weights and samples, as Markdown."""
    print(f"| network, precision (modules) | {' | '.join(_INDICATORS)} |")
    print("|---|" + "---|" * len(_INDICATORS))
    for name, options, batch in _NETWORKS:
        found: dict[str, dict[str, list[float]]] = {}
        counts: dict[str, int] = {}
        work = PrecisionWorkload(
            batch=batch, network=name, network_options=options, calibration_batches=batches
        )
        for seed in range(seeds):
            task = training_task(None, work, seed)
            graph = TrainingGraph.of(task)
            # Batches that the indicator has not seen.
            held_out = [task.batch(-1000 - i, 0) for i in range(batches)]
            rows = measure_perturbations(task, module_variants(graph), held_out)
            for word in _INDICATORS:
                omega = omega_table(task, graph, work, seed, indicator=word)
                for key, value in rank_correlation(omega, rows).items():
                    found.setdefault(key, {}).setdefault(word, []).append(value)
            counts = {key: _count(rows, key) for key in found}
        for key, by_word in found.items():
            cells = [_cell(by_word.get(word, [])) for word in _INDICATORS]
            print(f"| {name}, {key} ({counts[key]}) | {' | '.join(cells)} |", flush=True)


def _count(rows: Iterable[Perturbed], key: str) -> int:
    word, _, backward = key.partition("+")
    variants = [training_variant(row.variant) for row in rows]
    return sum(v.precision == word and backward in ("", v.backward) for v in variants)


def _cell(values: list[float]) -> str:
    if not values:
        return "ranks all alike"
    return f"{np.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(description="Spearman correlation of indicators")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4)
    given = parser.parse_args()
    _print_table(given.seeds, given.batches)


if __name__ == "__main__":
    main()
