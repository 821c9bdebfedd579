"""`call_steps`: the calls of a captured pass as steps to be replayed from times of single calls.

Where `graph_programs` lowers operators to programs, which forget layout, here a step is a call as
it was traced. A training step has the loss, the gradients of every call behind a parameter in
reverse (of views that leave data out, as slices do, too), a sum wherever a gradient comes from
several readers, and one update.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreplan.cost_models.lowering.graph_step import Part, Phase
from foreplan.cost_models.passes.call_operands import CallKey
from foreplan.datasets.graphs.operator_call import (
    TENSOR,
    OperatorCall,
    described_tensors,
    row_strides,
)

#: Views whose gradient is work: the data that they left out, or gave out twice, is made up for.
_WORKING_VIEWS = frozenset(
    [
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "expand",
        "narrow",
        "unfold",
        "diagonal",
    ]
)
#: Bytes that the gradients of a pass move over those of the pass: each operand and its gradient.
_BACKWARD = 2
#: Ages are told apart by this factor, and those below so many bytes, which a core's own caches
#: hold, not at all. Both assumed: fewer ages are fewer calls to time.
_AGE_STEP = 4
_YOUNG_BYTES = 1 << 17

#: Target of the optimizer's update, which is no ATen call.
UPDATE = "foreplan.adamw"


@dataclass(frozen=True, slots=True)
class CallStep:
    """One call of a pass.

    Attributes:
        key: what is timed.
        mode: of `call_timer.MODES`.
        part: of the pass.
        view: whether only the host works.
    """

    key: CallKey
    mode: str
    part: Part
    view: bool = False


def call_steps(
    calls: Sequence[OperatorCall], phase: Phase, parameters: Sequence[Sequence[int]] = (), *,
    code: bool = False,
) -> list[CallStep]:  # fmt: skip
    """Steps of a pass.

    Args:
        calls: of an `OperatorGraph`.
        phase: ``inference`` or ``training``.
        parameters: shapes that an update goes through; none for no update.
        code: whether calls are told apart by the age of their code, too: on a CPU it waits in the
            same caches as operands.
    """
    training = phase == "training"
    ages, behind = _ages(calls, training)
    code_ages = _code_ages(calls, behind, training) if code else {}
    forward = [
        CallStep(
            CallKey(_not_in_place(call.target), call.arguments, call.gradients if training else
                    (False,) * len(call.gradients), call.parameters, age, 0,
                    code_ages.get((index, "forward"), 0)),
            "forward" if training else "inference", "forward", not call.operator,
        )
        for index, (call, age) in enumerate(zip(calls, ages, strict=True))
    ]  # fmt: skip
    if not training or not calls:
        return forward
    steps, last = list(forward), next(c for c in reversed(calls) if c.trains)
    # No loss is computed but once in a step.
    loss = _loss(last)._replace(code_age=_age(_whole(behind[0], training)) if code else 0)
    steps += [CallStep(loss, "forward", "loss"), CallStep(loss, "backward", "backward")]
    shared: dict[str, int] = {}
    for call in calls:
        for name, wanted, parameter in zip(
            call.reads, call.gradients, call.parameters, strict=True
        ):
            if wanted and parameter:
                shared[name] = shared.get(name, 0) + 1
    for index, call, after in reversed(list(zip(range(len(calls)), calls, behind, strict=True))):
        if not call.trains:
            continue
        steps += [_sum(call.result)] * max(0, call.readers - 1)
        name = call.target.split(".")[1]
        if call.operator or name in _WORKING_VIEWS:
            key = CallKey(
                _not_in_place(call.target), call.arguments, call.gradients, call.parameters, (),
                _age((1 + _BACKWARD) * after), code_ages.get((index, "backward"), 0),
            )  # fmt: skip
            steps.append(CallStep(key, "backward", "backward"))
        for read, described in zip(call.reads, described_tensors(call.arguments), strict=True):
            if shared.get(read, 1) > 1:  # tied weights
                shared[read] -= 1
                steps.append(_sum(json.dumps({TENSOR: described})))
    if not parameters:
        return steps
    dtype = json.loads(last.result)[TENSOR][2]
    update = json.dumps([[list(shape) for shape in parameters], dtype])
    steps.append(
        CallStep(
            CallKey(UPDATE, update, (), (), (), _age(_BACKWARD * behind[0])),
            "inference",
            "optimizer",
        )
    )
    return steps


def _ages(calls: Sequence[OperatorCall], training: bool) -> tuple[list[tuple[int, ...]], list[int]]:
    """Ages of each call's tensors, and bytes that the pass moves behind each call."""
    root: dict[str, str] = {}
    moved, touched, found, before = 0, dict[str, int](), list[list[int]](), list[int]()
    for call in calls:
        names = [root.get(name, name) for name in call.reads]
        found.append([moved - touched[name] if name in touched else -1 for name in names])
        before.append(moved)
        if not call.operator:  # a view: what it shows has the age of what it is a view of
            if names:
                root[call.name] = names[0]
            continue
        sizes = map(_size, described_tensors(call.arguments))
        moved += call.written_bytes + (0 if "embedding" in call.target else sum(sizes))
        touched |= dict.fromkeys((*names, call.name), moved)
    # What was not touched in this pass was in the one before, at about the same place.
    whole = _whole(moved, training)
    ages = [tuple(_age(whole if age < 0 else age) for age in row) for row in found]
    return ages, [moved - at for at in before]


def _whole(moved: int, training: bool) -> int:
    """Bytes from a pass to the next; a training step has gradients and an update, too."""
    return moved * (2 + _BACKWARD if training else 1)


def _code_ages(
    calls: Sequence[OperatorCall], behind: Sequence[int], training: bool
) -> dict[tuple[int, Part], int]:
    """Bytes that the pass moves between each call, or its gradients, and the last of its kind."""
    if not calls:
        return {}
    moved = behind[0]
    whole = _whole(moved, training)
    starts = [moved - left for left in behind] + [moved]
    spans: list[tuple[int, Part, int, int]] = [
        (i, "forward", starts[i], starts[i + 1]) for i in range(len(calls))
    ]
    if training:
        spans += [
            (i, "backward", moved + _BACKWARD * (moved - starts[i + 1]),
             moved + _BACKWARD * (moved - starts[i]))
            for i in reversed(range(len(calls))) if calls[i].trains
        ]  # fmt: skip
    kinds = [(part, calls[i].target) for i, part, *_ in spans]
    # Its kind was last called in the pass before, unless it is called twice.
    ended = {kind: end - whole for kind, (*_, end) in zip(kinds, spans, strict=True)}
    found: dict[tuple[int, Part], int] = {}
    for kind, (i, part, start, end) in zip(kinds, spans, strict=True):
        found[i, part] = _age(start - ended[kind])
        ended[kind] = end
    return found


def _age(bytes_: int) -> int:
    """A power of four, 0 for what has just been used."""
    if bytes_ < _YOUNG_BYTES:
        return 0
    return 1 << (2 * round(math.log(bytes_, _AGE_STEP)))


def _sum(result: str) -> CallStep:
    """A gradient added to one that is there."""
    described = json.loads(result)
    while isinstance(described, list):  # of a tuple: its first
        described = described[0]
    shape, _, dtype = described[TENSOR]
    plain = {TENSOR: [shape, row_strides(shape), dtype]}
    arguments = json.dumps([[plain, plain], {}], separators=(",", ":"))
    return CallStep(
        CallKey("aten.add_.Tensor", arguments, (False, False), (False, False), (0, 0), 0),
        "inference",
        "backward",
    )


def _loss(last: OperatorCall) -> CallKey:
    """Cross-entropy of what the pass gives out."""
    shape, _, dtype = json.loads(last.result)[TENSOR]
    rows, classes = math.prod(shape[:-1]), shape[-1]
    logits, goals = [[rows, classes], [classes, 1], dtype], [[rows], [1], "int64"]
    arguments = json.dumps([[{TENSOR: logits}, {TENSOR: goals}], {}], separators=(",", ":"))
    return CallKey(
        "aten.cross_entropy_loss.default", arguments, (True, False), (False, False), (0, 0), 0
    )


def _size(described: Sequence[object]) -> int:
    shape, strides, dtype = described
    assert isinstance(shape, list)
    assert isinstance(strides, list)
    distinct: int = math.prod(n if stride else 1 for n, stride in zip(shape, strides, strict=True))
    digits = "".join(c for c in str(dtype) if c.isdigit())
    return distinct * max(1, int(digits or 8) // 8)


def _not_in_place(target: str) -> str:
    """The form of an operator that makes a tensor: gradients of leaves need it."""
    space, name, overload = target.split(".")
    return f"{space}.{name.rstrip('_')}.{overload}" if not name.startswith("_") else target
