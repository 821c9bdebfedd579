"""`lowered_again`: a document of the end-to-end check with its networks lowered by today's code.

What was timed stays. Networks are built without memory and traced anew; how images of convolutions
lie, and that nothing is copied where attention leaves its result as it is wanted, is what the
document's run observed.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreplan.cost_models.costs import Work
from foreplan.cost_models.lowering.backward_steps import BACKWARD, CHANNEL_SUM
from foreplan.cost_models.lowering.copy_layout import plain_kernel
from foreplan.cost_models.lowering.graph_programs import lower
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.lowering.kernel_words import batch_norm_words
from foreplan.cost_models.passes.end_to_end_networks import KNOWN, SIZES, build, example
from foreplan.datasets.program import CHANNELS_LAST, Program
from foreplan.errors import SpecError


def described(steps: Sequence[Step]) -> list[list[Any]]:
    """Steps as a document of the check holds them."""
    return [[s.kind, s.target, s.part, _words(s.work), s.calls] for s in steps]


#: Copies that a trace without a device holds and a run may not.
_COPIES = frozenset({"aten.contiguous", "aten.clone"})


def lowered_again(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with new steps of each pass.

    Args:
        document: from `end_to_end.measure`.

    Raises:
        SpecError: a field that is missing, a size, data type or network that this version does not
            know, or another network's steps.
    """
    import torch

    from foreplan.cost_models.passes.call_timer import DTYPES
    from foreplan.datasets.graphs.capture import capture

    _check_fields("document", document, ("size", "dtype", "cases"))
    for field, known in (("size", SIZES), ("dtype", DTYPES)):
        if document[field] not in known:
            raise SpecError(
                f"document: {field}", got=document[field], expected=f"one of {list(known)}"
            )
    if not isinstance(document["cases"], list):
        raise SpecError("document: cases", got=document["cases"], expected="a list of passes")
    size, dtype = document["size"], DTYPES[document["dtype"]]
    modules: dict[str, torch.nn.Module] = {}
    cases = []
    for case in document["cases"]:
        _check_fields(
            "document: cases", case, ("network", "shape", "phase", "steps", "calls", "alone")
        )
        name = case["network"]
        if name not in KNOWN:
            raise SpecError("document: network", got=name, expected=f"one of {list(KNOWN)}")
        if name not in modules:
            with torch.device("meta"):
                built = build(name, size)
            # Some modules make a weight with a constructor that knows no context.
            modules = {name: built.to(device="meta", dtype=dtype).eval()}
        shape = (int(case["shape"][0]), int(case["shape"][1]))
        inputs = example(name, size, shape, "meta", dtype)
        trains = case["phase"] == "training" and document.get("training_mode", False)
        graph = capture(modules[name], inputs, name=name, eager=True, training=trains)
        steps = _laid_out(lower(graph, case["phase"]), case["steps"], _batch_norms(case))
        cases.append({**case, "steps": described(steps)})
    return {**document, "cases": cases}


def _check_fields(place: str, found: object, fields: Sequence[str]) -> None:
    """Refuse what `measure` did not write."""
    for field in fields:
        if not isinstance(found, Mapping) or field not in found:
            raise SpecError(place, got=f"no {field}", expected="what `measure` wrote")


def _batch_norms(case: Mapping[str, Any]) -> list[str]:
    """What names of kernels say of the batch norms that a pass called, in their order."""
    called = [case["alone"][place][:2] for place, part, _ in case["calls"] if part == "forward"]
    return [
        batch_norm_words(arguments)
        for target, arguments in called
        if target.startswith("aten.batch_norm.")
    ]


def _as_run(steps: Sequence[Step], before: Sequence[Any]) -> set[int]:
    """Places of the copies among steps that a document's pass made, too.

    A trace may leave other strides than the run: copies of as many elements are alike, those first
    that have the same sizes, and before them whose kernels say the same of how they lie.
    """
    ran = [_copied(target, words) for _, target, part, words, _ in before
           if target in _COPIES and part == "forward"]  # fmt: skip
    asked = {at: _copied(step.target, _words(step.work)) for at, step in enumerate(steps)
             if step.target in _COPIES and step.part == "forward"}  # fmt: skip
    found: set[int] = set()
    for same in (
        lambda copy: copy,
        lambda copy: (copy[0], plain_kernel(copy[1]), copy[2]),
        lambda copy: (copy[0], math.prod(copy[2])),
    ):
        left = Counter(map(same, ran)) - Counter(same(asked[at]) for at in found)
        for at in sorted(asked.keys() - found):
            if left[same(asked[at])]:
                left[same(asked[at])] -= 1
                found.add(at)
    return found


def _copied(target: str, words: Sequence[Any]) -> tuple[str, str, tuple[int, ...]]:
    """A copy by its operator, its kernel and its sizes."""
    _, sizes, kernel = json.loads(words[0])
    return target, kernel, tuple(sizes)


def _laid_out(
    steps: Sequence[Step], before: Sequence[Any], norms: Sequence[str]
) -> list[Step]:  # fmt: skip
    """Steps that copy no more than the document's do, and whose images lie as theirs.

    Args:
        steps: of today's lowering.
        before: of the document.
        norms: words of the batch norms that it timed, in their order.
    """
    copied = _as_run(steps, before)
    of_run = {target for _, target, part, *_ in before if part == "forward"}
    observed = iter(
        [CHANNELS_LAST in json.loads(words[0])[2] for kind, _, part, words, _ in before
         if kind == "convolution" and part == "forward"]
    )  # fmt: skip
    lies: dict[tuple[int, ...], bool] = {}
    seen: bool | None = None
    words, back = iter(norms), iter(reversed(norms))
    found = []
    for at, step in enumerate(steps):
        work = step.work
        if step.target in _COPIES and step.part == "forward":
            if at not in copied:
                continue
        elif step.target in _COPIES and step.target not in of_run:
            continue
        if step.kind == "convolution" and isinstance(work, Program):
            if step.part == "forward":
                seen = next(observed, None)
                if seen is None:
                    raise SpecError(
                        "steps", got="fewer convolutions than the network has",
                        expected="a document of this network",
                    )  # fmt: skip
                lies[work.sizes] = seen  # gradients are of convolutions of their sizes
            plain = work.variant.kernel.replace(CHANNELS_LAST, "")
            seen = lies[work.sizes]
            last = CHANNELS_LAST if seen else ""
            kernel = re.sub("conv[12]d", rf"\g<0>{last}", plain)
            step = replace(step, work=replace(work, variant=replace(work.variant, kernel=kernel)))
        elif step.kind == "reduction" and "conv" in step.target and isinstance(work, Program):
            # By the bias, behind the gradients by images and weight.
            variant = replace(work.variant, kernel=BACKWARD if seen else CHANNEL_SUM)
            step = replace(step, work=replace(work, variant=variant))
        elif isinstance(work, Program) and work.dims.get("channels", 1) > 1:
            own = ("torch.batch_norm", words) if step.part == "forward" else (BACKWARD, back)
            kernel = own[0] + next(own[1], "")
            step = replace(step, work=replace(work, variant=replace(work.variant, kernel=kernel)))
        found.append(step)
    return found


def _words(work: Work) -> list[Any]:
    """A step's work as text, and how often it runs: once (documents of before say 3)."""
    assert isinstance(work, Program)
    return [json.dumps([work.op, list(work.sizes), str(work.variant)]), 1]
