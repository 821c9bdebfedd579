"""`together`: links and contention among the devices of a host, measured for ``foreplan profile``.

``links.json`` beside the profiles keeps each figure as soon as it is measured, for the same devices
and software.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from foreplan.cost_models.sources.tables import measured
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.ranks.contention import measure_contention
from foreplan.datasets.ranks.links import measure_links
from foreplan.datasets.ranks.recorded_passes import measure_recorded
from foreplan.datasets.ranks.together import PassTimes, measure_together
from foreplan.datasets.specs import StrictModel, load_document, validate
from foreplan.datasets.storage import write_atomically
from foreplan.datasets.tier import Contention, ProgramInPass, Tier
from foreplan.errors import MissingDataError
from foreplan.planner.steps import told_step
from foreplan.planner.verify.placement import assign_cores

if TYPE_CHECKING:
    from rich.console import Console

#: Numbers of ranks at work together that are measured, beside all of them (each takes seconds);
#: plans read the numbers between from those on either side.
_COUNTS = (2, 4, 8, 16, 32, 64)
#: A pass whose price by the profiles has changed by more is measured again.
_SAME = 1e-6


class PassProgram(StrictModel):
    """A program of a pass, with its calls."""

    op: str
    dims: dict[str, Annotated[int, Field(ge=1)]]
    variant: str
    calls: Annotated[int, Field(ge=1)]


class PassTogether(StrictModel):
    """What ranks at work together took for a pass.

    Attributes:
        programs: of the pass.
        price_s: seconds of it by each device's profile then.
        contention: times over those prices.
    """

    programs: tuple[PassProgram, ...]
    price_s: dict[str, Annotated[float, Field(gt=0)]]
    contention: Contention

    def calls(self) -> dict[Program, int]:
        """The programs, as `together` takes them."""
        return {
            program(one.op, Variant.parse(one.variant), **one.dims): one.calls
            for one in self.programs
        }

    def lacks(self, calls: Mapping[Program, int]) -> bool:
        """Whether a program of a pass is not among those that were timed."""
        return not calls.keys() <= self.calls().keys()

    def priced_by(self, profiles: Mapping[DeviceName, Profile]) -> bool:
        """Whether the profiles are those that the times were put over, program by program."""
        calls = self.calls()
        now = _price_s(profiles, calls)
        return (
            bool(self.contention.programs)
            and now is not None
            and all(
                abs(seconds - self.price_s.get(str(device), 0.0)) < _SAME * seconds
                for device, seconds in _pass_s(now, calls).items()
            )
        )


def together(
    devices: Sequence[DeviceName],
    profiles: Mapping[DeviceName, Profile],
    passes: Sequence[Mapping[Program, int]],
    output: Path,
    host: str,
    console: Console,
) -> tuple[list[Tier], list[Contention]]:
    """Links and contention among the devices.

    Args:
        devices: one a rank.
        profiles: of the devices.
        passes: of a training step, programs with their calls, which ranks at work together are
            timed by; without any, programs that stand for decoding are.
        output: folder of ``links.json``.
        host: its name in the cluster.
        console: shows progress.

    Returns:
        What is known now. Of a single device, and of devices that cannot run together, there are
        no links, and of passes what one rank takes for them.
    """
    kinds, linked = {device.kind for device in devices}, len(devices) > 1
    if len(kinds) > 1:
        return [], []
    if "cuda" in kinds and len({device.index for device in devices}) < len(devices):
        console.print("links not measured: slices of one GPU cannot run at the same time")
        linked = False
    path = output / "links.json"
    way = "measured"
    if "cuda" in kinds:
        way += " as queued before they begin"
    elif "cpu" in kinds:
        way += " between computations and through shared memory, with waits"
    key = {
        "devices": [str(device) for device in devices],
        "host": host,
        "software": dict(profiles[devices[0]].software),
        "links": way,
        "chips": [profiles[device].device.chip for device in devices],
    }
    early = {name: value for name, value in key.items() if name != "chips"}
    known: dict[str, Any] = {"of": key, "tiers": None if linked else []}
    if path.exists():
        document = load_document(path)
        known = document if document.get("of") in (key, early) else known
    if not isinstance(known.get("tiers"), list):
        with told_step(console, "measuring links"):
            tier = measure_links(devices).tier((host,), "host", f"{way}, among ranks of the host")
        known = {"of": key, "tiers": [tier.model_dump(mode="json", exclude_defaults=True)]}
        write_atomically(path, _as_json(known))
    timed = None
    if known.get("passes") is not None:
        timed = validate(PassTogether, known["passes"], "links.json: passes")
    if passes:
        found = _passes(devices, profiles, passes, timed, host, console)
        if found is not None and found is not timed:
            known["passes"] = found.model_dump(mode="json", exclude_defaults=True)
            write_atomically(path, _as_json(known))
        timed = found
    elif linked and not isinstance(known.get("contention"), list):
        known["contention"] = _stand_ins(devices, host, console)
        write_atomically(path, _as_json(known))
    contention = [
        validate(Contention, c, "links.json: contention") for c in known.get("contention") or []
    ]
    return (
        [validate(Tier, tier, "links.json: tiers") for tier in known["tiers"]],
        contention if timed is None else [*contention, timed.contention],
    )


def _stand_ins(devices: Sequence[DeviceName], host: str, console: Console) -> list[dict[str, Any]]:
    """What programs that stand for decoding take from each other."""
    if devices[0].kind != "cpu":
        return []
    with told_step(console, "measuring contention"):
        counts = _counts(min(len(devices), len(os.sched_getaffinity(0))))
        found = measure_contention(devices[-1], ranks=counts, host=host)
    return [c.model_dump(mode="json", exclude_defaults=True) for c in found]


def _passes(
    devices: Sequence[DeviceName],
    profiles: Mapping[DeviceName, Profile],
    asked: Sequence[Mapping[Program, int]],
    known: PassTogether | None,
    host: str,
    console: Console,
) -> PassTogether | None:
    """What ranks at work together take for passes; what is known where none can be measured."""
    asked = [calls for calls in asked if _price_s(profiles, calls) is not None]
    calls = _union(asked)
    if not asked:
        return known
    recorded = devices[0].kind == "cuda"
    stands = known is not None and known.priced_by(profiles)
    if known is not None and stands and not known.lacks(calls):
        return known
    # Workloads that share the folder keep their programs: a GPU times them again.
    keeps = known is not None and (stands or recorded)
    every = _union([known.calls(), calls]) if known is not None and keeps else calls
    price_s = _price_s(profiles, every)
    if price_s is None:
        return known
    if recorded:
        with told_step(console, "measuring recorded passes"):
            took = measure_recorded(devices, every, price_s, cores=assign_cores(devices))
    else:
        several = _in_turn(devices, asked, price_s, console)
        if not several:
            return known
        took = PassTimes.mean(several)
    programs = {
        (str(device), item): factor
        for device, found in took.programs.items() for item, factor in found.items()
    }  # fmt: skip
    if known is not None and keeps and not recorded:
        programs = {(o.device, o.program()): o.factor for o in known.contention.programs} | programs
    source = "as one CUDA graph" if recorded else "behind one another"
    contention = Contention(
        kind="training", factors=took.factors, host=host,
        programs=tuple(
            ProgramInPass(
                device=device, op=item.op, dims=item.dims, variant=str(item.variant), factor=factor
            )
            for (device, item), factor in programs.items()
        ),
        source=f"measured: {sum(calls.values())} programs of a pass, {source}",
    )  # fmt: skip
    return PassTogether(
        programs=tuple(
            PassProgram(op=p.op, dims=p.dims, variant=str(p.variant), calls=count)
            for p, count in every.items()
        ),
        price_s={str(device): seconds for device, seconds in _pass_s(price_s, every).items()},
        contention=contention,
    )


def _in_turn(
    devices: Sequence[DeviceName],
    passes: Sequence[Mapping[Program, int]],
    price_s: Mapping[DeviceName, Mapping[Program, float]],
    console: Console,
) -> list[PassTimes]:
    """Times of the passes of processors that run."""
    cores, counts = assign_cores(devices), (1, *_counts(len(devices)))
    found = []
    for k, calls in enumerate(passes, 1):
        which = "" if len(passes) == 1 else f" ({k} of {len(passes)})"
        with told_step(console, f"measuring passes of ranks at work together{which}"):
            try:
                took = measure_together(devices, calls, price_s, cores=cores, counts=counts)
            except MissingDataError as error:  # prices then stay as they are
                console.print(f"pass not timed{which}: {error}")
            else:
                found.append(took)
    return found


def _union(passes: Sequence[Mapping[Program, int]]) -> dict[Program, int]:
    """The programs of all passes, each with its calls in the last that has it."""
    return {item: count for calls in passes for item, count in calls.items()}


def _price_s(
    profiles: Mapping[DeviceName, Profile], calls: Mapping[Program, int]
) -> dict[DeviceName, dict[Program, float]] | None:
    """Seconds of each program by each device's profile; ``None`` unless all have all of them."""
    found: dict[DeviceName, dict[Program, float]] = {}
    for device, profile in profiles.items():
        rows = {item: profile.by_program.get(item) for item in calls}
        found[device] = {
            item: measured(row).mean_s
            for item, row in rows.items() if row is not None and row.status == "ok"
        }  # fmt: skip
        if len(found[device]) < len(calls):
            return None
    return found


def _pass_s(
    price_s: Mapping[DeviceName, Mapping[Program, float]], calls: Mapping[Program, int]
) -> dict[DeviceName, float]:
    """Seconds of a whole pass by each device's profile."""
    return {
        device: sum(prices[item] * count for item, count in calls.items())
        for device, prices in price_s.items()
    }


def _counts(most: int) -> tuple[int, ...]:
    """Numbers of ranks to measure, at most so many."""
    return tuple(sorted({n for n in (*_COUNTS, most) if 2 <= n <= most}))


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"
