"""The drift gate: did this change move a prediction or a plan?

``python -m tests.drift.gate`` shows what is not as in ``frozen.json`` and fails if anything is;
``--accept`` (``make accept-drift``) shows the same and freezes it, to be committed with the change
that caused it and can explain it; names of cases (or how they begin) leave the others alone. It
says nothing about accuracy: that is measured elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.drift import cases

from foreplan.planner.compare import Difference, differ

FROZEN = Path(__file__).with_name("frozen.json")
ADVICE = "If this change means it: make accept-drift, and commit tests/drift/frozen.json with it."
#: Relative drift that other processors' rounding may cause; omega is a sum of measured variances.
TOLERANCE = 1e-3
LOOSE = {"omega": 0.02, "probability_best": 0.05}


def current(chosen: Sequence[str] = ()) -> dict[str, Any]:
    """Everything, or the cases whose names begin so, as the code has it now."""
    wanted = [n for n in cases.CASES if not chosen or n.startswith(tuple(chosen))]
    return {"weights": cases.weights(), "values": {n: cases.CASES[n]() for n in wanted}}


def drift(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Values of one case that moved by more than rounding."""
    return [d for d in differ(before, now) if d.change is None or abs(d.change) > _allowed(d.what)]


def _allowed(what: str) -> float:
    return LOOSE.get(what.rsplit(".", 1)[-1], TOLERANCE)


def told(name: str, found: list[Difference], weights: Mapping[str, tuple[str, str]]) -> str:
    """What moved in a case, largest first, for people."""
    ranked = sorted(found, key=lambda d: -abs(d.change) if d.change is not None else -1e9)
    lines = [f"{name}: {len(found)} values moved"]
    for d in ranked[:12]:
        change = "" if d.change is None else f"  ({100 * d.change:+.2f} %)"
        lines.append(f"  {d.what}: {_short(d.a)} -> {_short(d.b)}{change}")
    if len(ranked) > 12:
        lines.append(f"  and {len(ranked) - 12} more")
    if weights:
        lines.append(f"  since then {', '.join(weights)} got other weights")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def retrained(frozen: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Shipped predictors whose weights are not the frozen ones."""
    before, now = frozen.get("weights", {}), cases.weights()
    names = dict.fromkeys([*before, *now])
    return {n: (before.get(n, ""), now.get(n, "")) for n in names if before.get(n) != now.get(n)}


def load() -> dict[str, Any]:
    """The frozen document; empty before the first acceptance."""
    return json.loads(FROZEN.read_text()) if FROZEN.exists() else {"weights": {}, "values": {}}


def changes(frozen: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Cases that moved."""
    for name in dict.fromkeys([*frozen["values"], *now["values"]]):
        found = drift(frozen["values"].get(name, {}), now["values"].get(name, {}))
        if found:
            yield name, found


def main(words: list[str]) -> int:
    """Show what moved; with ``--accept`` freeze it. 1 if something moved and was not accepted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", nargs="*", help="only cases whose names begin so")
    parser.add_argument("--accept", action="store_true", help="freeze what is now")
    asked = parser.parse_args(words)
    frozen, now = load(), current(asked.case)
    new = retrained(frozen)
    if asked.case:
        frozen["values"] = {n: v for n, v in frozen["values"].items() if n in now["values"]}
    moved = list(changes(frozen, now))
    for name, found in moved:
        print(told(name, found, new))
    if asked.accept:
        if asked.case:
            kept = load()
            weights = {n: w for n, w in now["weights"].items() if n in now["values"]}
            now = {
                "weights": {**kept["weights"], **weights},
                "values": {**kept["values"], **now["values"]},
            }
        FROZEN.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
        print(f"{len(moved)} cases moved; frozen in {FROZEN.name}")
        return 0
    print(f"{len(moved)} of {len(now['values'])} cases moved")
    if moved:
        print(ADVICE)
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
