"""What a user asks of a pass, checked: devices by words, the phase, files, the host's time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foreplan.cost_models.book import CostChoice
from foreplan.cost_models.given_seconds import check_eager, checked_seconds
from foreplan.cost_models.lowering.graph_step import PHASES
from foreplan.cost_models.sources.device_fit import DeviceFit, fit_beside
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.profile import Profile
from foreplan.datasets.specs import nearest
from foreplan.datasets.timing.host_device import host_device, is_host_processor
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from foreplan.cost_models.predictor import Predictor

#: Between devices; a processor's options go apart by commas, too.
_COMMA = re.compile(r",(?!\s*(?:threads|isa)\s*=)")


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
        names = [n for word in _COMMA.split(item) if word for n in _each(word, where)]
        names = [n for name in names for n in (device_zoo.names() if name == "all" else [name])]
        for name in dict.fromkeys(names):
            found.append((known or {}).get(name) or named_device(name, where, tuple(known or ())))
    return list({device.name: device for device in found}.values())


def named_device(name: str, where: str, beside: Sequence[str] = ()) -> Device:
    """A device of the zoo, or this host's processor by figures that are read off it.

    Args:
        name: of the zoo, or ``cpu``, ``cpu:threads=1,isa=avx2``.
        where: what to call it in an error.
        beside: names of devices that are known too, for an error.

    Raises:
        SpecError: no such device.
        MissingDataError: see `host_device`.
    """
    if is_host_processor(name):
        return host_device(name, where)
    if re.match(r"(cuda|gpu)\b", name.strip().lower()):
        raise SpecError(
            where, got=name, expected="a device of the zoo, or cpu: this host's processor",
            fix="name the GPU (l4, h200), or measure it: 'foreplan profile cuda:0', then --profile",
        )  # fmt: skip
    return device_zoo.device(device_zoo.canonical(name, where, ("cpu", *beside)))


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
    # To the digits that the command line had; in seconds as it is, which may be no number.
    given = launch_s if unit_s == 1 else float(f"{launch_s / unit_s:.12g}")
    if not isinstance(checked_seconds(given, where), float):
        raise SpecError(where, got=given, expected="one number of at least 0")
    check_eager(given, execution, where)


def loaded_predictor(
    given: Predictor | str | Path | None, costs: CostChoice, where: str
) -> Predictor | None:
    """The predictor that prices ask, of what a user names it by.

    Args:
        given: what `Predictor.load` returned or takes; ``None`` leaves it to the cost book.
        costs: ``roofline`` asks none.
        where: what to call it in an error.

    Raises:
        SpecError: something else, or no such folder.
        MissingDataError: no such shipped model.
    """
    if given is None or costs == "roofline":
        return None
    from foreplan.cost_models.predictor import Predictor as Loaded

    if isinstance(given, (str, Path)):
        return Loaded.load(str(given))
    if isinstance(given, Loaded):
        return given
    raise SpecError(
        where, got=type(given).__name__,
        expected="what Predictor.load returns, or its argument: pretrained:ops or a folder",
    )  # fmt: skip


def loaded_profile(
    given: Profile | str | Path | None, costs: CostChoice, where: str
) -> tuple[Profile | None, DeviceFit | None]:
    """The profile, and of a file the fit beside it, as the command line takes them.

    Args:
        given: a profile, or its file.
        costs: ``roofline`` leaves the fit out.
        where: what to call it in an error.

    Raises:
        SpecError: something else, or a file that is none.
    """
    if given is None or isinstance(given, Profile):
        return given, None
    if not isinstance(given, (str, Path)):
        raise SpecError(
            where, got=type(given).__name__, expected="what Profile.load returns, or its file"
        )
    found = Profile.load(given)
    return found, None if costs == "roofline" else fit_beside(given, found)
