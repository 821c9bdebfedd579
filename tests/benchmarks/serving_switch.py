"""What a program loses behind another: ``python tests/benchmarks/serving_switch.py DEVICE``.

Times decode passes of real stages, each pass one graph, and chains of the same programs in a
layer's order: on activations that they share, as in a pass, and each on inputs of its own. Printed
is what these take more than the sum of the programs' own times, measured as a profile does, in us a
program: a JSON line a stage, one with the switch that a profile of the device gets, and a table of
all. Weights are random. A processor records nothing and has no switch: ``cpu --small`` rehearses.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from serving_passes import chooser, kernel_table
from timed_stage import Timed

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.kernels.runnable import Inputs
from foreplan.datasets.models.decoder_programs import Counts, layer_programs
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program
from foreplan.datasets.timing._measuring_worker import _Device, _switch
from foreplan.datasets.timing.worker_environment import worker_environment
from foreplan.errors import SpecError, told
from foreplan.planner.serving.pricing import DECODE
from foreplan.planner.verify.placement import check_present

#: Operators of a decoder layer in the order in which they run (`layer_programs`).
ORDER = (
    "norm", "linear", "rope", "cache_write", "attention", "linear", "add",
    "norm", "linear", "activation", "linear", "add",
)  # fmt: skip
BATCH, KEYS, SMALL_KEYS = 16, 528, 16
SMALL = {"hidden": 512, "ffn": 1024, "vocab": 512, "heads": 8, "kv_heads": 8, "head_dim": 64}
EFFORT = {"min_s": 0.01, "min_samples": 5, "max_s": 0.1, "max_samples": 60}
TIMES = 7
#: What is compared with the programs' own times, as keys of a row and as words of the table.
COMPARED = {
    "pass": "pass",
    "shared": "chain on shared activations",
    "own": "chain, each with its own",
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers of a model, neither the first nor the last; ``bits`` repeat over them."""

    model: str
    layers: int
    bits: tuple[int, ...]

    def sized(self, small: bool) -> tuple[Model, int]:
        """The model with one layer more at either end, and how often its ``bits`` repeat."""
        times = 2 if small else self.layers // len(self.bits)
        changed = {"layers": times * len(self.bits) + 2, **(SMALL if small else {})}
        return load_model(self.model).model_copy(update=changed), times


#: Stages by the table's words; weights of a stage are 0.5-2 GB.
GROUPS = {
    "1b, 4, 8 and 16 bits": [Stage("llama-3.2-1b", 16, (bits,)) for bits in (4, 8, 16)],
    "8b, 8 bits": [Stage("llama-3.1-8b", 8, (8,))],
    "8b, layers of unlike bits": [Stage("llama-3.1-8b", 6, (16, 8, 4))],
}


class Behind:
    """Compares passes and chains on one device with programs by themselves.

    Args:
        device: the device, which this process has become.
        copies: times as many copies of weights and caches as keep them cold.
        small: rehearse on small layers and a short cache.
    """

    def __init__(self, device: _Device, *, copies: int = 1, small: bool = False) -> None:
        self.device = device
        self.copies = copies
        self.small = small
        self.kernels = kernel_table(device.name.kind)
        self._inputs = self._made_inputs(shared=False)
        self._own_s: dict[Program, float] = {}

    def row(self, stage: Stage) -> dict[str, Any]:
        """Times of a stage in us, and what `COMPARED` takes more, in us a program."""
        model, times = stage.sized(self.small)
        keys = SMALL_KEYS if self.small else KEYS
        items = [
            item
            for bits in stage.bits
            for item in in_order(
                layer_programs(model, BATCH, 1, keys, chooser(self.kernels, DECODE, bits))
            )
        ]
        count, own_s = times * len(items), times * sum(map(self.own_s, items))
        word = torch.device(self.device.word)
        timed = Timed(model, self.kernels, word, stage.bits * times, head=False)
        found = {
            "pass": timed.seconds(BATCH, 1, keys),
            "shared": self.chain_s(items, times, shared=True),
            "own": self.chain_s(items, times, shared=False),
        }
        return {
            "device": str(self.device.name), "model": stage.model, "bits": list(stage.bits),
            "copies": self.copies, "programs": count, "alone_us": round(1e6 * own_s, 1),
            "pass_us": round(1e6 * found["pass"], 1),
            "extra_us": {k: round(1e6 * (s - own_s) / count, 3) for k, s in found.items()},
        }  # fmt: skip

    def own_s(self, item: Program) -> float:
        """Median time of a program by itself, measured once as a profile does."""
        if item not in self._own_s:
            made = self._inputs.runnable(item)
            times = self.device.measure(made.call, EFFORT, made.turns, made.before)["times_s"]
            self._own_s[item] = statistics.median(times)
        return self._own_s[item]

    def chain_s(self, items: Sequence[Program], times: int, *, shared: bool) -> float:
        """Median time of programs in turn, ``times`` over; equal ones take the same inputs."""
        inputs = self._made_inputs(shared=shared)
        made = {item: inputs.runnable(item).call for item in dict.fromkeys(items)}
        calls = [made[item] for item in items]

        def turn() -> None:
            for call in calls:
                call()

        if self.device.word == "cpu":
            return times * self.device.time_calls(turn, times)
        graph = self.device.recorded(turn, times)
        if graph is None:
            raise RuntimeError("a chain of programs could not be recorded")
        return statistics.median(self.device.time_replay(graph, 1) for _ in range(TIMES))

    def _made_inputs(self, *, shared: bool) -> Inputs:
        made = Inputs(self.device.word, behind_one_another=shared)
        made.cache_bytes *= self.copies  # what its copies of a weight have to displace
        return made


def in_order(counts: Counts) -> list[Program]:
    """A layer's programs in the order in which they run, from how often each does.

    The linears of a layer differ in their sizes, so that each is counted once and in its place.
    """
    by_op: dict[str, list[Program]] = collections.defaultdict(list)
    for item, count in counts:
        by_op[item.op] += [item] * count
    return [by_op[op].pop(0) for op in ORDER]


def become(name: DeviceName) -> _Device:
    """Make this process the device.

    Raises:
        ForeplanError: this machine has no such device.
    """
    check_present(name)
    os.environ.update(worker_environment(name))
    try:
        return _Device(name, None)
    except (RuntimeError, ImportError) as error:  # more SMs than there are, or no slices
        raise SpecError("device", got=str(name), expected=f"one torch can use: {error}") from error


def table(
    device: str, rows: Mapping[Stage, Mapping[str, Any]], switch_s: float | None
) -> Iterable[str]:
    """Lines of docs/results/h200_history.md; ``-`` for what there was no time for."""
    yield f"| us a program | {device} |"
    yield "|---|---|"
    for label, stages in GROUPS.items():
        for key, words in COMPARED.items():
            cells = [f"{rows[s]['extra_us'][key]:.2f}" if s in rows else "-" for s in stages]
            yield f"| {f'{label}: ' if key == 'pass' else '- '}{words} | {', '.join(cells)} |"
    cell = "-" if switch_s is None else f"{1e6 * switch_s:.2f}"
    yield f"| the profile's switch | {cell} |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no stage after these")
    parser.add_argument("--copies", type=int, default=1, help="times as many copies of weights")
    parser.add_argument("--small", action="store_true", help="small layers, for a rehearsal")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    device = become(DeviceName.parse(options.device))
    rows: dict[Stage, dict[str, Any]] = {}
    with torch.inference_mode():
        switch_s = None if device.word == "cpu" else _switch(device).get("switch_s")
        said = None if switch_s is None else round(1e6 * switch_s, 3)
        print(json.dumps({"device": str(device.name), "switch_us": said}), flush=True)
        behind = Behind(device, copies=options.copies, small=options.small)
        for stage in (stage for stages in GROUPS.values() for stage in stages):
            if time.monotonic() < ends:
                rows[stage] = behind.row(stage)
                print(json.dumps(rows[stage]), flush=True)
    print("\n".join(table(str(device.name), rows, switch_s)))


if __name__ == "__main__":
    with told():
        main()
