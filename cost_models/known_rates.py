"""KnownRates: how long operators take on a processor, by the rates of processors measured whole.

The shipped predictor of processors. Of each known device a law was fitted to hundreds of its
operators (`rate_law`); put on the figures of another device, it says how long they take there if
kernels lose alike. It speaks of operators whose variant was timed on the known device, or that of
their likeness (`profiled_alike`), and where several did, those count whose instruction sets are the
likest; the geometric mean of their seconds is taken.

Its interval is what such predictions were wrong by among the known devices themselves, each
predicted by those of other chips (by other slices of its chip while one chip is known).

``python -m foreplan.cost_models.known_rates -o FOLDER PROFILE [PROFILE ...]`` fits and writes them.

Shape legend: ``K`` known devices, ``M`` programs asked for, ``T`` terms of `operator_rates`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.model_store import (
    MISFITS,
    model_folder,
    read_card,
    read_weights,
    write_model,
)
from foreplan.cost_models.operator_rates import TERMS, family
from foreplan.cost_models.pool_windows import window_s
from foreplan.cost_models.profiled_alike import profiled_alike
from foreplan.cost_models.rate_law import RateLaw
from foreplan.cost_models.rate_model import RateForecast, RateModel, Shipped
from foreplan.cost_models.roofline import ASSUMED_LAUNCH_S
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError, told

Floats = NDArray[np.float64]

SCHEMA = "foreplan.known-rates/1"
#: Of a normal distribution, half of its 90 % interval in standard deviations.
_INTERVAL = 1.645


class Known(NamedTuple):
    """A device that was measured, and the law fitted to it."""

    device: Device
    law: RateLaw


class KnownRates:
    """See the module.

    Args:
        known: the devices.
        off: 90 % quantile of abs(ln(predicted / measured)) by family of operators, ``""`` for
            others.
    """

    def __init__(self, known: Sequence[Known], off: Mapping[str, float]) -> None:
        self.known, self.off = tuple(known), dict(off)

    @classmethod
    def fit(cls, measured: Sequence[tuple[Device, Sequence[Program], Floats]]) -> Self:
        """Fit a law to each device.

        Args:
            measured: devices, programs (N,) and their seconds (N,).

        Raises:
            SpecError: no device, or see `RateModel.fit`.
            MissingDataError: see `RateModel.fit`.
        """
        if not measured:
            raise SpecError("known devices", got=0, expected="at least one")
        known = [
            Known(device, RateModel(device).fit(programs, seconds).law_)
            for device, programs, seconds in measured
        ]
        several = len({device.chip for device, _, _ in measured}) > 1
        errors: dict[str, list[float]] = {}
        for device, programs, seconds in measured:
            others = [
                other for other in known
                if (other.device.chip != device.chip if several else other.device != device)
            ]  # fmt: skip
            found = cls(others, {}).seconds(programs, device)
            for item, off in zip(programs, np.abs(np.log(found / seconds)), strict=True):
                if np.isfinite(off):
                    errors.setdefault(family(item), []).append(float(off))
        everything = [off for offs in errors.values() for off in offs]
        quantiles = {kind: float(np.quantile(offs, 0.9)) for kind, offs in errors.items()}
        # One device alone says nothing of others: as far as a factor of e.
        return cls(known, {"": float(np.quantile(everything or [1.0], 0.9))} | quantiles)

    def without(self, chips: Collection[str]) -> KnownRates:
        """Those of other chips."""
        return KnownRates([each for each in self.known if each.device.chip not in chips], self.off)

    def seconds(self, programs: Sequence[Program], device: Device) -> Floats:
        """Median seconds (M,) on a processor with these figures, NaN where none is known.

        Raises:
            MissingDataError: a figure of the device is missing; see `rate_terms`.
        """
        launch = device.launch_overhead_s or ASSUMED_LAUNCH_S
        windows = np.array([window_s(item, device, launch) for item in programs])
        programs, shares = self._worded(programs)
        # How like each known device is (K, M), -1 where it was not timed with such a kernel.
        like = np.array([
            np.where(each.law.knows(programs), _likeness(each.device, device), -1.0)
            for each in self.known
        ]).reshape(len(self.known), len(programs))  # fmt: skip
        best = like.max(axis=0, initial=0.0)
        total, count = np.zeros(len(programs)), np.zeros(len(programs))
        for each, its in zip(self.known, like, strict=True):
            mine = np.flatnonzero(its == best)
            if len(mine):
                total[mine] += np.log(each.law.seconds([programs[int(i)] for i in mine], device))
                count[mine] += 1
        mean = np.exp(total / np.where(count > 0, count, np.nan))
        return np.asarray(shares * mean + windows)

    def _worded(self, programs: Sequence[Program]) -> tuple[list[Program], Floats]:
        """Programs, those that nobody timed by their likeness, and how much of each (M,)."""
        timed = np.zeros(len(programs), dtype=bool)
        for each in self.known:
            timed |= each.law.knows(programs)
        found = [
            (item, 1.0) if its else profiled_alike(item) or (item, 1.0)
            for item, its in zip(programs, timed, strict=True)
        ]
        return [item for item, _ in found], np.array([share for _, share in found])

    def on(self, device: Device) -> Shipped:
        """`seconds` on one device, each program asked once; what `RateModel` takes."""
        found: dict[Program, float] = {}

        def seconds(programs: Sequence[Program]) -> Floats:
            new = [item for item in dict.fromkeys(programs) if item not in found]
            if new:
                found.update(zip(new, self.seconds(new, device).tolist(), strict=True))
            return np.array([found[item] for item in programs])

        return seconds

    def forecast(self, programs: Sequence[Program], device: Device) -> RateForecast:
        """Expected seconds and their nominal 90 % interval, NaN where none is known."""
        median = self.seconds(programs, device)
        off = np.array([self.off.get(family(item), self.off[""]) for item in programs])
        mean = median * np.exp((off / _INTERVAL) ** 2 / 2)
        return RateForecast(mean, median * np.exp(-off), median * np.exp(off))

    # -------------------------------------------------------------------------------- on disk

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str] = "pretrained:processors") -> Self:
        """Read what `save` wrote.

        Raises:
            MissingDataError: no such shipped model.
            SpecError: no such folder, another schema, or broken files.
        """
        folder = model_folder(name_or_path)
        card = read_card(folder)
        if card.get("schema") != SCHEMA:
            raise SpecError(f"{folder}: schema", got=card.get("schema"), expected=SCHEMA)
        tensors = read_weights(folder, card)
        try:
            known = [
                _restored(each, tensors[f"{index}.effects"], tensors[f"{index}.shape"])
                for index, each in enumerate(_list(card["devices"]))
            ]
            off = {str(kind): float(value) for kind, value in dict(card["off"]).items()}  # type: ignore[call-overload]
        except MISFITS as error:
            raise SpecError(str(folder), got=str(error), expected="known rates") from error
        return cls(known, off)

    def save(self, folder: Path) -> None:
        """Write ``weights.safetensors`` and ``card.json``.

        Raises:
            SpecError: the folder cannot be written.
        """
        tensors: dict[str, NDArray[Any]] = {}
        devices = []
        for index, (device, law) in enumerate(self.known):
            tensors[f"{index}.effects"], tensors[f"{index}.shape"] = law.effects, law.shape
            devices.append({
                "device": device.model_dump(mode="json", exclude_none=True),
                "factors": law.factors,
                "programs": [_text(item) for item in law.programs],
            })  # fmt: skip
        card = {
            "schema": SCHEMA,
            "name": "library operators of processors",
            "method": "terms of the roofline times rates by group of operators, one law a device",
            "licence": "measured by this project, Apache-2.0",
            "terms": list(TERMS),
            "devices": devices,
            "off": self.off,
        }
        write_model(folder, tensors, card)


def _text(item: Program) -> str:
    dims = ",".join(f"{name}={size}" for name, size in item.dims.items())
    return f"{item.op} {dims} {item.variant}"


def _parsed(text: str) -> Program:
    op, dims, variant = text.split(" ")
    sizes = dict(part.split("=") for part in dims.split(","))
    return program(op, Variant.parse(variant), **{name: int(size) for name, size in sizes.items()})


def _restored(each: Mapping[str, Any], effects: Floats, shape: Floats) -> Known:
    programs = [_parsed(text) for text in each["programs"]]
    if effects.shape != (len(programs), len(TERMS)) or shape.shape != (len(programs),):
        raise ValueError(f"weights of another shape than {len(programs)} programs")
    factors = {str(kind): float(value) for kind, value in each["factors"].items()}
    device = validate(Device, each["device"], "device")
    return Known(device, RateLaw(programs, factors, effects, shape))


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("devices: not a list")
    return value


def _likeness(one: Device, other: Device) -> float:
    """Share of two processors' instruction sets that both have."""
    mine, theirs = set(one.isa), set(other.isa)
    return len(mine & theirs) / max(1, len(mine | theirs))


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit to profiles and write."""
    from foreplan.cost_models.onboarding_curve import read_rows

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profiles", nargs="+", type=Path)
    parser.add_argument("-o", "--output", required=True, type=Path)
    asked = parser.parse_args(arguments)
    found = KnownRates.fit([read_rows(path) for path in asked.profiles])
    found.save(asked.output)
    off = ", ".join(f"{kind or 'all'} x{np.exp(off):.2f}" for kind, off in found.off.items())
    print(f"{len(found.known)} devices, 90 % of errors among them by family: {off}")


if __name__ == "__main__":
    with told():
        main()
