"""What a user asks of a pass, checked: devices by words, the phase, the host's time of a call."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from foreplan.cost_models.lowering.graph_step import PHASES
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.specs import nearest
from foreplan.errors import SpecError


def named_devices(
    given: Iterable[str | Device], known: Mapping[str, Device] | None = None, *, where: str
) -> list[Device]:
    """The devices that words and figures name, each once.

    Args:
        given: as ``devices`` of `rank_devices`.
        known: devices beside the zoo's, by name.
        where: what to call it in an error.

    Raises:
        SpecError: no such device.
    """
    found: list[Device] = []
    for item in given:
        if isinstance(item, Device):
            found.append(item)
            continue
        if not isinstance(item, str):  # from a notebook
            raise SpecError(where, got=item, expected="names of the zoo, or figures of devices")
        names = [n for word in item.split(",") if word for n in _each(word, where)]
        if names == ["all"]:
            names = list(device_zoo.names())
        found += [(known or {}).get(n) or device_zoo.device(n, where) for n in names]
    return list({device.name: device for device in found}.values())


def _each(item: str, where: str) -> list[str]:
    """Names in one item of ``--devices``: an inline cluster, ``4xt4@small``, names its device."""
    if not re.match(r"\s*[0-9]+\s*[xX×*]", item) and "@" not in item:
        return [item]
    found = dict.fromkeys(rank.name.zoo for rank in parse_devices(item, where).ranks())
    return [name for name in found if name is not None]


def check_phase(phase: str, where: str) -> None:
    """Raise `SpecError` unless ``phase`` is one."""
    if phase not in PHASES:
        guess = nearest(phase, PHASES)
        raise SpecError(
            where, got=phase, expected=f"one of {', '.join(PHASES)}",
            fix=f"did you mean {guess}?" if guess else None,
        )  # fmt: skip


def check_launch(launch_s: float | None, execution: str, where: str, *, unit_s: float = 1) -> None:
    """Raise `SpecError` unless ``launch_s`` is ``None``, or a time of eager execution.

    Args:
        launch_s: host time of one ATen call.
        execution: how the pass runs.
        where: what to call the time in an error.
        unit_s: in which it was given.
    """
    if launch_s is None:
        return
    if not 0 <= launch_s < math.inf:
        raise SpecError(
            where, got=float(f"{launch_s / unit_s:.12g}"), expected="a number of at least 0"
        )
    if execution == "graph":
        raise SpecError(
            where, got=launch_s / unit_s,
            expected="eager execution: the host issues no operator of a graph",
        )  # fmt: skip
