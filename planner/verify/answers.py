"""What ranks tell the leader of a verification, checked before it is used.

A rank may be of another version, or something else that knows the plan's word; what it says must
not end the leader in a traceback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.verify.runtime import Record
from foreplan.planner.verify.verification import Device
from foreplan.planner.verify.wire import Message, WireGarbled

_MOST = 1 << 62


def whole(message: Mapping[str, Any], key: str) -> int:
    """A whole number of a message, 0 or more.

    Raises:
        WireGarbled: there is none.
    """
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise WireGarbled(f"a message without a number {key!r}")
    return value


def record_of(answer: Message, steps: int) -> Record:
    """When the ``steps`` of a rank's list ran.

    Raises:
        WireGarbled: not as many pairs of nanoseconds.
    """
    times = []
    for key in ("start_ns", "end_ns"):
        value = answer.get(key)
        if not isinstance(value, list) or len(value) != steps:
            raise WireGarbled(f"a report of a run without {steps} times {key!r}")
        try:
            found = np.array(value)
        except (ValueError, OverflowError):
            found = np.array(0.0)
        if found.shape != (steps,) or (steps and found.dtype != np.int64):
            raise WireGarbled(f"a report of a run whose {key!r} are no whole numbers")
        if (np.abs(found) >= _MOST).any():
            raise WireGarbled(f"a report of a run whose {key!r} are out of range")
        times.append(tuple(value))
    return Record(*times)


def memory_of(answer: Message) -> tuple[dict[str, int], int]:
    """Bytes by item, and what the process took in all.

    Raises:
        WireGarbled: not such figures.
    """
    items = answer.get("memory_bytes")
    if not isinstance(items, dict):
        raise WireGarbled("a report of a run without its memory")
    return {str(name): whole(items, name) for name in items}, whole(answer, "held_bytes")


def result_of(answer: Message) -> dict[str, Any] | None:
    """What the run computed, if the rank has a result.

    Raises:
        WireGarbled: something else.
    """
    result = answer.get("result")
    if result is not None and not isinstance(result, dict):
        raise WireGarbled("a report of a run with a result that is none")
    return result


def device_of(answer: Message, label: str) -> Device:
    """What a rank's process said of itself when it was ready.

    Raises:
        WireGarbled: not such facts.
    """
    told = answer.get("ready")
    if not isinstance(told, dict):
        raise WireGarbled("a rank that does not say what it is")
    names = ("torch", "threads", "cores", "cpu_capability", "gpu", "messages")
    try:
        return validate(Device, {"label": label} | {n: told.get(n) for n in names}, "ready")
    except SpecError as error:
        raise WireGarbled(f"a rank that does not say what it is ({error})") from error


def seconds_of(answer: Message, count: int) -> list[float | None]:
    """Seconds that each of ``count`` programs took, ``None`` of those that failed.

    Raises:
        WireGarbled: not as many times.
    """
    value = answer.get("timed")
    if not isinstance(value, list) or len(value) != count:
        raise WireGarbled(f"a report of {count} programs without their times")
    for seconds in value:
        if seconds is not None and not (isinstance(seconds, float) and 0.0 < seconds < math.inf):
            raise WireGarbled("a report of programs whose times are none")
    return value
