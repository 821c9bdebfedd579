"""Time torch's library operators over random shapes on one CUDA device.

Run as ``PYTHONPATH=src python -m foreplan.datasets.sweeps.operator_sweep -o FILE``; needs torch,
numpy and pyarrow alone, so that it runs on a machine without the rest. Writes the columns of
`operator_table.write_operators`. FP32 runs with TF32 off. Two conventions, never mixed:

``--timing eager`` is NeuSight's, so that rows of both can be trained on together: each call is
timed by a pair of CUDA events on an idle device, launch included; the label is the mean of the 5
fastest of 25 (of 10 where one call takes over 5 ms). Library ``torch-2.11-cuda``.

``--timing graph`` takes the launch out: calls are recorded as a CUDA graph and replayed
(`graph_timer`), of more operators and data types (`operator_cases`), or with ``--kinds`` of those
alone that it names. Library ``torch_graph-2.11-cuda``. With ``--again TABLE`` the products of such
a table are timed once more, those first that come nearest to the peak, and written in their places.

Every time is on the disk before the next call runs (``FILE.journal``), so that an illegal access
loses one operator: ``--resume`` goes on behind it, and ``--resume --seconds 0`` only writes the
table, on any machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from foreplan.datasets.sweeps.operator_case import Case, Operands, product_shape, wide_shape
from foreplan.datasets.sweeps.operator_cases import NAMES, RECORDED, graph_cases
from foreplan.datasets.sweeps.sweep_again import SweptProducts
from foreplan.errors import MissingDataError, SpecError, told

#: Seconds of replays of one operator.
_REPLAYS_S = 0.05


def eager_cases(counts: dict[str, int], seed: int) -> list[Case]:
    """Sample operators that NeuSight's tables have, in random order.

    Args:
        counts: how many of each: ``bmm``, ``linear``, ``wide`` (each elementwise operator, softmax
            and layer norm).
        seed: of the shapes and their order.
    """
    rng = np.random.default_rng(seed)
    found: list[Case] = []
    for dtype, width, share in (("fp32", 4, 1.0), ("bfloat16", 2, 0.5)):
        for op, batched in (("bmm", True), ("linear", False)):
            for _ in range(int(counts[op] * share)):
                b, m, n, k = product_shape(rng, batched=batched, width=width)
                dims = {"b": b, "m": m, "n": n, "k": k}
                found.append(
                    Case(op, op, dtype, dims, partial(_product, dtype, batched, b, m, n, k))
                )
    binary, unary = ("add", "mul", "div", "pow"), ("relu", "gelu", "tanh")
    cost = {"add": 1, "mul": 1, "div": 2, "pow": 8, "relu": 1, "gelu": 8, "tanh": 6}
    for _ in range(counts["wide"]):
        for op in (*binary, *(f"{name}u" for name in binary), *unary, "softmax", "ln"):
            rows, cols = wide_shape(rng)
            base = op[:-1] if op.endswith("u") and op[:-1] in binary else op
            kind = {"softmax": "softmax", "ln": "layernorm"}.get(op, "elementwise")
            inputs = 0 if kind != "elementwise" else 2 if op in binary else 1
            dims = {"rows": rows, "cols": cols, "inputs": inputs, "cost": cost.get(base, 0)}
            found.append(Case(op, kind, "fp32", dims, partial(_wide, op, base, rows, cols)))
    return [found[at] for at in np.random.default_rng(seed).permutation(len(found))]


def _product(
    dtype: str, batched: bool, b: int, m: int, n: int, k: int, view: Operands
) -> list[Callable[[], Any]]:
    import torch
    import torch.nn.functional as F

    if batched:
        return [partial(torch.bmm, view(dtype, 0, b, m, k), view(dtype, b * m * k, b, k, n))]
    x, weight, bias = view(dtype, 0, m, k), view(dtype, m * k, n, k), view(dtype, 0, n)
    return [partial(F.linear, x, weight, bias)]


def _wide(op: str, base: str, rows: int, cols: int, view: Operands) -> list[Callable[[], Any]]:
    import torch
    import torch.nn.functional as F

    x = view("fp32", 0, rows, cols)
    if op == "softmax":
        return [partial(torch.softmax, x, -1)]
    if op == "ln":
        factor = view("fp32", 0, cols)
        return [partial(F.layer_norm, x, factor.shape, factor, factor)]
    if op in ("relu", "tanh"):
        return [partial(getattr(torch, op), x)]
    if op == "gelu":
        return [partial(F.gelu, x)]
    other = 2.0 if op != base else view("fp32", rows * cols, rows, cols)
    return [partial(getattr(torch, base), x, other)]


def time_call(call: Callable[[], Any]) -> float:
    """Seconds of one call: mean of the 5 fastest, launch included, device idle before each."""
    import torch

    event: Any = torch.cuda.Event  # untyped
    start, stop = event(enable_timing=True), event(enable_timing=True)
    times: list[float] = []
    repeat = 25
    for _ in range(3):
        call()
    while len(times) < repeat:
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
        if times[0] > 5e-3:
            repeat = 10
    return float(np.mean(sorted(times)[:5]))


class SweepJournal:
    """Times of a sweep so far, one JSON line each: its number, then seconds or why there are none.

    A line that only says the number is of an operator that ended its process.

    Args:
        path: the file.
        head: what the times belong to; another head is refused.
        resume: go on with what is there; else begin anew.

    Raises:
        SpecError: the file is of another sweep.
    """

    def __init__(self, path: Path, head: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.times: dict[int, float] = {}
        self.failed: dict[int, str] = {}
        lines = path.read_text().splitlines() if resume and path.exists() else []
        rows: list[Any] = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # torn by a kill
                rows.append(json.loads(line))
        self.head = rows[0] if rows else head
        asked = {name: value for name, value in head.items() if value is not None}
        if {name: self.head.get(name) for name in asked} != asked:
            raise SpecError(
                str(path), got=f"a journal of {self.head}", expected=f"one of {asked}",
                fix="name another output, or leave --resume out to begin anew",
            )  # fmt: skip
        for index, *found in rows[1:]:
            self.failed.setdefault(index, "the process ended")
            if found:
                self.add(index, *found)
        path.write_text("".join(json.dumps(row) + "\n" for row in (rows or [head])))

    @property
    def next(self) -> int:
        """The number of the first operator that has not been tried."""
        return max([-1, *self.times, *self.failed]) + 1

    def write(self, *row: Any) -> None:
        """Put a line on the disk."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def add(self, index: int, seconds: float | None, why: str = "") -> None:
        """Take a time, or why there is none."""
        self.failed.pop(index, None)
        if seconds is None:
            self.failed[index] = why
        else:
            self.times[index] = seconds


def run(
    cases: Iterator[Case], journal: SweepJournal, timer: Callable[[Case], float], seconds: float
) -> bool:
    """Time operators that the journal does not have, for so long.

    Returns:
        Whether the device can still be used.
    """
    begun = time.monotonic()
    first = journal.next
    for index, case in enumerate(itertools.islice(cases, first, None), first):
        if time.monotonic() - begun > seconds:
            break
        journal.write(index)
        try:
            found: tuple[Any, ...] = (timer(case),)
        except RuntimeError as error:
            why = f"{case.op} {case.dtype} {case.dims}: {error}".splitlines()[0][:300]
            found = (None, why)
            print(why, file=sys.stderr, flush=True)
        journal.write(index, *found)
        journal.add(index, *found)
        if found[0] is None and not _usable():
            return False
    return True


def _usable() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
        torch.rand(1, device="cuda").add_(1.0)
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def write_table(cases: Iterator[Case], journal: SweepJournal, path: Path) -> int:
    """Write what the journal has as an operator table; returns the rows."""
    import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

    rows: list[dict[str, Any]] = []
    for index, case in enumerate(itertools.islice(cases, journal.next)):
        if index in journal.times:
            rows.append({
                "op": case.op, "kind": case.kind, "dtype": case.dtype,
                "library": journal.head["library"], "device": journal.head["device"],
                **{name: float(size) for name, size in case.dims.items()},
                "latency_s": journal.times[index], "source_row": index,
            })  # fmt: skip
    names = dict.fromkeys(name for row in rows for name in row)
    full = [{name: row.get(name, 0.0) for name in names} for row in rows]
    part = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(full), part, compression="zstd")
    part.replace(path)
    return len(rows)


def _timer(timing: str) -> Callable[[Case], float]:
    """Seconds of an operator on this machine's first GPU."""
    import torch

    from foreplan.datasets.timing.graph_timer import call_seconds

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    view = Operands("cuda")
    if timing == "eager":
        return lambda case: time_call(case.calls(view)[0])
    made: Any = torch.cuda.Stream  # untyped
    stream = made()

    def recorded(case: Case) -> float:
        with torch.cuda.stream(stream):
            heats = case.kind in ("linear", "bmm")
            return call_seconds(case.calls(view), stream=stream, most_s=_REPLAYS_S, rested=heats)

    return recorded


def _head(options: argparse.Namespace) -> dict[str, Any]:
    """What a journal is of; what only a GPU tells is ``None`` where none is used."""
    head: dict[str, Any] = {"seed": options.seed, "timing": options.timing, "library": None,
                            "device": None}  # fmt: skip
    if options.timing == "eager":
        head["counts"] = {name: getattr(options, name) for name in ("bmm", "linear", "wide")}
    if options.kinds:
        head["kinds"] = sorted(options.kinds)
    if options.again:
        head["again"] = options.again.name
    if options.seconds > 0:
        import torch

        if not torch.cuda.is_available():
            raise MissingDataError("no CUDA device here to time operators on")
        first = "torch" if options.timing == "eager" else RECORDED
        version = ".".join(torch.__version__.split(".")[:2])
        head |= {"library": f"{first}-{version}-cuda", "device": torch.cuda.get_device_name()}
    return head


def main(arguments: list[str] | None = None) -> int:
    """Sweep, and write the table.

    Returns:
        0, or 3 where an operator left the device unusable: a new process can go on.

    Raises:
        MissingDataError: no CUDA device.
        SpecError: no journal to write a table of, or one of another sweep; kinds of the eager one.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--timing", choices=["eager", "graph"], default="eager")
    parser.add_argument("--bmm", type=int, default=2000, help="operators of the eager sweep")
    parser.add_argument("--linear", type=int, default=2000)
    parser.add_argument("--wide", type=int, default=250)
    parser.add_argument(
        "--kinds", nargs="+", choices=NAMES, metavar="KIND",
        help="draw these alone, of the sweep of graphs: " + ", ".join(NAMES),
    )  # fmt: skip
    parser.add_argument(
        "--again", type=Path, metavar="TABLE", help="time the products of this table once more"
    )
    parser.add_argument(
        "--least", type=float, default=0.0, metavar="FLOPS",
        help="with --again: only those that did as many FLOP/s",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=280.0, help="stop after this long")
    parser.add_argument("--resume", action="store_true", help="go on with what a stopped run left")
    options = parser.parse_args(arguments)
    if options.kinds and options.timing != "graph":
        raise SpecError("--kinds", got=f"--timing {options.timing}", expected="--timing graph")
    if options.again and (options.timing != "graph" or options.kinds):
        raise SpecError(
            "--again", got="--kinds or --timing eager", expected="--timing graph and no --kinds"
        )
    again = SweptProducts.read(options.again, options.least) if options.again else None

    def cases() -> Iterator[Case]:
        if again is not None:
            return again.cases()
        if options.timing == "graph":
            kinds = journal.head.get("kinds")
            return graph_cases(options.seed, **({"names": kinds} if kinds else {}))
        counts = {name: getattr(options, name) for name in ("bmm", "linear", "wide")}
        return iter(eager_cases(counts, options.seed))

    path = options.output.with_name(options.output.name + ".journal")
    resume = options.resume or options.seconds <= 0
    if options.seconds <= 0 and not path.exists():
        raise SpecError(str(path), got="no such file", expected="the journal of a sweep")
    journal = SweepJournal(path, _head(options), resume=resume)
    begun, usable = time.monotonic(), True
    if options.seconds > 0:
        import torch

        gc.collect()
        gc.disable()
        with torch.no_grad():
            usable = run(cases(), journal, _timer(options.timing), options.seconds)
    if again is None:
        count = write_table(cases(), journal, options.output)
    else:
        count = again.write(journal.times, options.output)
    print(
        f"{count} rows, {len(journal.failed)} operators failed, {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    return 0 if usable else 3


if __name__ == "__main__":
    with told():
        raise SystemExit(main())
