"""KnownRates: how long operators take on a processor, by the rates of processors measured whole.

The shipped predictor of processors. Of each known device a law was fitted to hundreds of its
operators (`rate_law`); put on the figures of another device, it says how long they take there if
kernels lose alike. It speaks of operators whose variant was timed on the known device, or that of
their likeness (`profiled_alike`), and where several did, those count whose instruction sets are the
likest; the geometric mean of their seconds is taken.

Its interval is what such predictions were wrong by among the known devices themselves, each
predicted by those of other chips (by other slices of its chip while one chip is known); on a chip
that is among them, what they were wrong by on its own operators, held out a fifth at a time.

``python -m foreplan.cost_models.rates.known_rates -o FOLDER PROFILE [PROFILE ...]`` fits and writes
them.

Shape legend: ``K`` known devices, ``M`` programs asked for, ``T`` terms of `operator_rates`.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
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
from foreplan.cost_models.rates.channel_lanes import few_lanes_s
from foreplan.cost_models.rates.chosen_kernels import chosen_kernel_s
from foreplan.cost_models.rates.filter_gradients import filter_gradient_s
from foreplan.cost_models.rates.narrow_norms import narrow_norm_s
from foreplan.cost_models.rates.narrow_rows import narrow_row_s
from foreplan.cost_models.rates.operator_rates import TERMS, arithmetic_s, family, streamed_s
from foreplan.cost_models.rates.picked_losses import picked_loss_s
from foreplan.cost_models.rates.picked_rows import picked_s
from foreplan.cost_models.rates.pixel_products import narrow_s
from foreplan.cost_models.rates.pool_results import pool_result_s
from foreplan.cost_models.rates.pool_windows import window_s
from foreplan.cost_models.rates.profiled_alike import profiled_alike
from foreplan.cost_models.rates.rate_law import COLD, RateLaw, Waits
from foreplan.cost_models.rates.rate_model import RateForecast, RateModel, Shipped
from foreplan.cost_models.rates.rows_across import across_s
from foreplan.cost_models.rates.slow_functions import function_s
from foreplan.cost_models.rates.table_gradients import table_gradient_s
from foreplan.cost_models.rates.wide_windows import wide_window_s
from foreplan.cost_models.rates.written_out import written_out_s
from foreplan.cost_models.roofline import launch_s
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError, told

Floats = NDArray[np.float64]

SCHEMA = "foreplan.known-rates/2"
#: What libraries of processors branch by before all else.
_WIDEST = "avx512"
#: Parts that a chip's operators are held out in.
_FOLDS = 5
#: What was measured on a device: its programs (N,) and their seconds (N,).
Measured = tuple[Device, Sequence[Program], Floats]
#: Seconds in place of those of a likeness.
_ALONE = (filter_gradient_s, wide_window_s, written_out_s, picked_loss_s, table_gradient_s)
#: Seconds beside those of a likeness.
_BESIDE = (
    window_s, function_s, narrow_s, narrow_norm_s, narrow_row_s, across_s, picked_s, pool_result_s,
    few_lanes_s, chosen_kernel_s,
)  # fmt: skip
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
            others; of a chip that is not among the known.
        own: likewise, of operators of a known chip; ``off`` where empty.
    """

    def __init__(
        self, known: Sequence[Known], off: Mapping[str, float],
        own: Mapping[str, float] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.known, self.off, self.own = tuple(known), dict(off), dict(own)

    @classmethod
    def fit(cls, measured: Sequence[Measured]) -> Self:
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
        return cls(known, _quantiles(errors))

    def calibrated(self, measured: Sequence[Measured]) -> KnownRates:
        """The same, with intervals of their own for the chips that are known.

        A fifth of a chip's operators at a time, of all of its slices, is predicted by laws of the
        others and by the other chips as they are. Medians and expected seconds stay.

        Args:
            measured: what the laws were fitted to.

        Raises:
            SpecError: see `RateModel.fit`.
            MissingDataError: see `RateModel.fit`.
        """
        errors: dict[str, list[float]] = {}
        for chip in dict.fromkeys(device.chip for device, _, _ in measured):
            rows = [each for each in measured if each[0].chip == chip]
            others = [each for each in self.known if each.device.chip != chip]
            for fold in range(_FOLDS):
                laws, held = list(others), []
                for device, programs, seconds in rows:
                    out = np.array(
                        [zlib.crc32(_text(x).encode()) % _FOLDS == fold for x in programs]
                    )
                    model = RateModel(device)
                    model.fit([programs[i] for i in np.flatnonzero(~out).tolist()], seconds[~out])
                    laws.append(Known(device, model.law_))
                    held.append(
                        (device, [programs[i] for i in np.flatnonzero(out).tolist()], seconds[out])
                    )
                for device, asked, seconds in held:
                    found = KnownRates(laws, {}).seconds(asked, device)
                    for item, off in zip(asked, np.abs(np.log(found / seconds)), strict=True):
                        if np.isfinite(off):
                            errors.setdefault(family(item), []).append(float(off))
        return KnownRates(self.known, self.off, _quantiles(errors))

    def without(self, chips: Collection[str]) -> KnownRates:
        """Those of other chips."""
        return KnownRates(
            [each for each in self.known if each.device.chip not in chips], self.off, self.own
        )

    def seconds(
        self, programs: Sequence[Program], device: Device, *, waits: Waits = COLD
    ) -> Floats:
        """Median seconds (M,) on a processor with these figures, NaN where none is known.

        Args:
            programs: what is asked for (M,).
            device: its figures.
            waits: what the caches hold of the pass, see `reuse.pass_waits`.

        Raises:
            MissingDataError: a figure of the device is missing; see `rate_terms`.
        """
        launch = launch_s(device)
        beside = np.array([
            sum(of(item, device, launch) for of in _BESIDE)
            for item in programs
        ])  # fmt: skip
        alone = [
            next((s for of in _ALONE if (s := of(item, device, launch)) is not None), None)
            for item in programs
        ]
        asked_for = programs
        programs, shares = self._worded(programs, device)
        near = waits.looped
        waits = waits._replace(looped={
            known: near[item] for item, known in zip(asked_for, programs, strict=True)
            if item in near
        })  # fmt: skip
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
                asked = [programs[int(i)] for i in mine]
                total[mine] += np.log(each.law.seconds(asked, device, waits=waits))
                count[mine] += 1
        mean = np.exp(total / np.where(count > 0, count, np.nan))
        # A chip may compute the likeness's data type in a unit that has none of the program's own:
        # bf16, that of fp16, in AMX.
        other = [
            a.variant.compute != b.variant.compute for a, b in zip(asked_for, programs, strict=True)
        ]
        least = np.where(other, arithmetic_s(asked_for, device), 0.0)
        # Kernels were timed on operands that caches held, which those of large ones do not.
        least = np.maximum(least, streamed_s(asked_for, device))
        found = np.maximum(shares * mean + beside, least)
        return np.where([own is None for own in alone], found, np.array(alone, dtype=np.float64))

    def _worded(self, programs: Sequence[Program], device: Device) -> tuple[list[Program], Floats]:
        """Programs, those that nobody timed by their likeness, and how much of each (M,)."""
        timed = np.zeros(len(programs), dtype=bool)
        for each in self.known:
            timed |= each.law.knows(programs)
        found = [
            (item, 1.0) if its else profiled_alike(item, device) or (item, 1.0)
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

    def forecast(
        self, programs: Sequence[Program], device: Device, *, waits: Waits = COLD
    ) -> RateForecast:
        """Expected seconds and their nominal 90 % interval, NaN where none is known.

        Args: see `seconds`.
        """
        median = self.seconds(programs, device, waits=waits)
        kinds = [family(item) for item in programs]
        off = np.array([self.off.get(kind, self.off[""]) for kind in kinds])
        # Of a known chip as well: what is too dear makes up there for what no operator says.
        mean = median * np.exp((off / _INTERVAL) ** 2 / 2)
        if self.own and any(each.device.chip == device.chip for each in self.known):
            off = np.array([self.own.get(kind, self.own[""]) for kind in kinds])
        return RateForecast(mean, median * np.exp(-off), np.maximum(median * np.exp(off), mean))

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
            off, own = (
                {str(kind): float(value) for kind, value in dict(card[word]).items()}  # type: ignore[call-overload]
                for word in ("off", "own")
            )
        except MISFITS as error:
            raise SpecError(str(folder), got=str(error), expected="known rates") from error
        return cls(known, off, own)

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
            "own": self.own,
        }
        write_model(folder, tensors, card)


def _quantiles(errors: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The 90 % quantile of each family's errors, and of all."""
    everything = [off for offs in errors.values() for off in offs]
    # One device alone says nothing of others: as far as a factor of e.
    return {"": float(np.quantile(everything or [1.0], 0.9))} | {
        kind: float(np.quantile(offs, 0.9)) for kind, offs in errors.items()
    }


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
    """Share of two processors' instruction sets that both have; of one chip, 1 more.

    So have those that both have vectors of 512 bits: libraries branch there first, and one without
    the later extensions runs none of the kernels of AVX2.
    """
    mine, theirs = set(one.isa), set(other.isa)
    shared = mine & theirs
    alike = len(shared) / max(1, len(mine | theirs))
    return alike + (_WIDEST in shared) + (one.chip == other.chip)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit to profiles and write."""
    from foreplan.cost_models.rates.onboarding_curve import read_rows

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profiles", nargs="+", type=Path)
    parser.add_argument("-o", "--output", required=True, type=Path)
    asked = parser.parse_args(arguments)
    measured = [read_rows(path) for path in asked.profiles]
    found = KnownRates.fit(measured).calibrated(measured)
    found.save(asked.output)
    for whose, widths in (("other chips'", found.off), ("a chip's own", found.own)):
        off = ", ".join(f"{kind or 'all'} x{np.exp(off):.2f}" for kind, off in widths.items())
        print(f"{len(found.known)} devices, 90 % of errors of {whose} rows by family: {off}")


if __name__ == "__main__":
    with told():
        main()
