"""Losses and gradients of a step as JSON, and how two such reports are compared.

A gradient is reported element by element where a parameter is small; of a larger one, evenly spaced
elements stand for the rest. A rank that holds a part of a parameter's gradient reports that part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from foreplan.planner.base import Agreement
from foreplan.planner.bubbles.execution.flat_parameters import Gradient

#: Elements of one parameter's gradient that are reported.
REPORTED = 4096
#: Largest difference that passes, as a share of the parameter's largest gradient, by the dtype of
#: the arithmetic: what another order of additions may do to sums of a few hundred products.
TOLERANCE: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "bfloat16": 0.05})


def loss_report(losses: Mapping[int, Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Loss of each micro-batch, its share of the step's, and the dtype of the arithmetic."""
    found: dict[str, Any] = {f"loss {i}": float(losses[i]) for i in sorted(losses)}
    return found | {"dtype": str(dtype).removeprefix("torch.")}


def gradient_report(gradients: Iterable[Gradient]) -> dict[str, Any]:
    """Elements of each gradient at the multiples of a stride that depends on its size alone."""
    found = {}
    for name, begin, end, size, values in gradients:
        stride = math.ceil(size / REPORTED)
        offset = -begin % stride
        found[f"gradient {name} {begin}:{end}"] = values[offset::stride].tolist()
    return found


def compare_steps(result: Mapping[str, Any], reference: Mapping[str, Any]) -> Agreement:
    """Compare a distributed step with one process's, in which every gradient is whole.

    Args:
        result: what all ranks report, together.
        reference: from `single_process_step`.

    Returns:
        ``exact`` if all losses and reported elements are equal; ``passed`` if every loss is there,
        every gradient is covered, and differences are below `TOLERANCE`. ``details`` holds the
        largest differences relative to the loss and to the parameter's largest gradient.
    """
    losses = sorted(key for key in reference if key.startswith("loss "))
    details: dict[str, float | str] = {"losses": float(len(losses))}
    gaps = [abs(result[k] - reference[k]) / abs(reference[k]) for k in losses if k in result]
    lacking = [key for key in losses if key not in result]
    exact = all(result.get(key) == reference[key] for key in losses)
    covered: dict[str, int] = {}
    worst, where, count = 0.0, "", 0
    sizes: dict[str, tuple[str, int]] = {}
    for key in reference:
        if key.startswith("gradient "):
            _, name, span = key.split(" ")
            sizes[name] = key, int(span.split(":")[1])
    for key, values in result.items():
        if not key.startswith("gradient "):
            continue
        _, name, span = key.split(" ")
        whole, size = sizes[name]
        begin, end = (int(part) for part in span.split(":"))
        covered[name] = covered.get(name, 0) + end - begin
        stride = math.ceil(size / REPORTED)
        first = -(-begin // stride)
        mine = torch.tensor(values, dtype=torch.float64)
        everything = torch.tensor(reference[whole], dtype=torch.float64)
        theirs = everything[first : first + len(mine)]
        if mine.shape != theirs.shape:
            lacking.append(key)
            continue
        count += len(mine)
        exact = exact and bool(torch.equal(mine, theirs))
        if len(mine):
            largest = max(float(everything.abs().max()), torch.finfo(torch.float32).tiny)
            gap = float((mine - theirs).abs().max()) / largest
            if not gap <= worst:  # also of what is no number
                worst, where = gap, name
    lacking += [name for name, (_, size) in sizes.items() if covered.get(name, 0) != size]
    details |= {
        "largest_loss_difference": max(gaps, default=0.0),
        "largest_gradient_difference": worst,
        "gradient_elements": float(count),
    }
    if where:
        details["largest_at"] = where
    if lacking:
        details["lacking"] = ", ".join(lacking[:4])
    limit = TOLERANCE[str(reference["dtype"])]
    passed = not lacking and worst <= limit and all(gap <= limit for gap in gaps)
    return Agreement(passed, exact and not lacking, details)
