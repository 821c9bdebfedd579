"""Fuzz every reader with many cases: ``python -m tests.robustness.fuzz --cases 2000 --seed 1``.

Prints, for each reader, how many mutants were read and how many refused in one line, and every
distinct failure with the seed that ``Reader.mutant`` makes its input from. Run from the checkout's
root. A crash of the interpreter ends a reader's process alone and is counted as a failure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from tests.robustness.guard import outcome
from tests.robustness.readers import readers


def run(name: str, first: int, cases: int, tell: Connection) -> None:
    """Try seeds ``first ...`` of one reader; tells ``(seed, outcome)`` one by one."""
    warnings.simplefilter("error")
    reader = readers()[name]
    # What is imported and compiled the first time is not the input's doing.
    with tempfile.TemporaryDirectory() as folder:
        reader.attempt(Path(folder) / "x", reader.valid_bytes())
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + cases):
            tell.send((seed, None))
            try:
                refused = outcome(partial(reader.attempt, Path(folder) / "x", reader.mutant(seed)))
                tell.send((seed, "read" if refused is None else "refused"))
            except BaseException as error:
                frames = traceback.extract_tb(error.__traceback__)
                ours = [f for f in frames if "/tests/" not in f.filename] or frames
                at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
                own = [f for f in frames if "/foreplan/" in f.filename] or frames
                by = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
                tell.send((seed, f"{type(error).__name__} at {at} by {by}: {str(error)[:120]}"))


def fuzz(name: str, first: int, cases: int) -> dict[str, object]:
    """Counts of one reader's outcomes, and its failures with a seed of each."""
    counts = {"read": 0, "refused": 0, "failed": 0}
    failures: dict[str, tuple[str, int]] = {}
    start, begun = time.monotonic(), -1
    seed, last = first, first + cases
    while seed < last:
        hear, tell = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=run, args=(name, seed, last - seed, tell)
        )
        process.start()
        tell.close()
        try:
            while True:
                seed, found = hear.recv()
                if found is None:
                    begun = seed
                elif found in counts:
                    counts[found] += 1
                else:
                    counts["failed"] += 1
                    failures.setdefault(found.partition(": ")[0], (found, seed))
                if found is not None:
                    begun = -1
        except EOFError:
            process.join()
        if begun < 0 and process.exitcode != 0:
            raise RuntimeError(f"{name}: its valid input is not read")
        if begun >= 0:
            counts["failed"] += 1
            failures.setdefault("died", (f"died with {process.exitcode}", begun))
            begun = -1
        seed += 1
    return {
        "reader": name, "first": first, "cases": cases, **counts,
        "seconds": round(time.monotonic() - start, 1),
        "failures": [{"seed": seed, "what": what} for what, seed in failures.values()],
    }  # fmt: skip


def main() -> int:
    """Run the command; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="mutants of each reader")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first mutant")
    parser.add_argument("--reader", action="append", help="only this reader; may be repeated")
    chosen = parser.parse_args()
    failed, known = False, readers()
    for name in chosen.reader or known:
        known[name].valid_bytes()  # plans are made once, and what makes them imported
    for name in chosen.reader or known:
        result = fuzz(name, chosen.seed, chosen.cases)
        failed |= bool(result["failed"])
        print(json.dumps(result), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
