"""`Replay`: a pass on one device, operator by operator, as the simulator timed it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from foreplan.cost_models.costs import Estimate, HostLaunch
from foreplan.cost_models.execution import Execution
from foreplan.cost_models.lowering.graph_step import Step
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.quantity import format_seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Replay:
    """A simulated pass.

    Attributes:
        device: its name.
        latency_s: end of the last operator, from the start of the first launch.
        low_s, high_s: latency with every price at its low and at its high end: errors are taken as
            fully correlated, so the interval is wider than nominal.
        execution: ``eager``, ``graph`` or ``compiled``.
        host_s: time the host needs to issue the operators, or to launch their graph; 0 where it
            does not count.
        device_s: time the device runs operators.
        gap_s: time between the operators of a graph.
        steps: what ran.
        prices: of each step.
        timeline: every action.
    """

    device: str
    latency_s: float
    low_s: float
    high_s: float
    execution: Execution
    host_s: float
    device_s: float
    gap_s: float
    # Hundreds of lines each, which no notebook should show behind the latency.
    steps: Sequence[Step] = field(repr=False)
    prices: Sequence[Estimate] = field(repr=False)
    timeline: Timeline = field(repr=False)

    @property
    def limit(self) -> Literal["host", "device"]:
        """What decides the latency: issuing the operators or running them."""
        return "host" if self.host_s > self.device_s else "device"

    def by(self, name: Literal["kind", "part", "source"]) -> dict[str, float]:
        """Device seconds by a step's kind or part, or by the price's source, largest first."""
        found: dict[str, float] = {}
        for step, price in zip(self.steps, self.prices, strict=True):
            key = price.source if name == "source" else str(getattr(step, name))
            found[key] = found.get(key, 0.0) + price.mean_s
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def unsupported(self) -> list[dict[str, Any]]:
        """Operators without a price of their own: count and seconds, largest first.

        Only the roofline could price them, or nothing is known of their work but the tensors
        that they read and write (``unknown``: decompositions of matrices, for instance), so that
        they take longer than they are said to.
        """
        found: dict[str, list[float]] = {}
        for step, price in zip(self.steps, self.prices, strict=True):
            if price.source == "roofline" or step.kind == "unknown":
                found.setdefault(f"{step.kind}: {step.target}", []).append(price.mean_s)
        rows = [
            {"operator": name, "count": len(times), "seconds": sum(times)}
            for name, times in found.items()
        ]
        return sorted(rows, key=lambda row: -float(str(row["seconds"])))

    def evaluated(self) -> list[str]:
        """Paths of parts of a training step that were captured in evaluation mode all the same.

        They cannot be traced in training mode; the empty path is the model itself. What that mode
        adds to them (dropout) has no price, and what they would skip at random is always run.
        """
        found = (step.evaluated for step in self.steps)
        return list(dict.fromkeys(path for path in found if path is not None))

    def to_frame(self) -> pd.DataFrame:
        """A row for each operator, as they run.

        Columns: ``operator``, ``kind`` and ``part`` as `Step`; ``program``, what was priced;
        ``calls`` of ATen; ``start_s`` in the timeline; ``latency_s`` with ``low_s`` and ``high_s``,
        the 90 % interval of its price; ``source`` of the price.
        """
        import pandas as pd

        # Whatever stands between operators has a work of another kind, or comes first: the input.
        ran = [not isinstance(action.work, HostLaunch) for action in self.timeline.schedule]
        starts = self.timeline.start_s[ran][-len(self.steps) :] if self.steps else ()
        rows = [
            (step.target, step.kind, step.part, str(step.work), step.calls, float(start),
             price.mean_s, price.low_s, price.high_s, price.source)
            for step, price, start in zip(self.steps, self.prices, starts, strict=True)
        ]  # fmt: skip
        return pd.DataFrame(
            rows,
            columns=["operator", "kind", "part", "program", "calls", "start_s", "latency_s",
                     "low_s", "high_s", "source"],
        )  # fmt: skip

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw device time by kind of operator as bars, longest first, in milliseconds."""
        import matplotlib.pyplot as plt

        found = self.by("kind")
        if axes is None:
            _, axes = plt.subplots(figsize=(8, 0.35 * len(found) + 1.2))
        axes.barh(list(found), [seconds * 1e3 for seconds in found.values()])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        took = format_seconds(self.latency_s)
        axes.set_title(f"{self.device}: {took}, decided by the {self.limit}", loc="left")
        return axes

    def _repr_html_(self) -> str:
        frame = self.to_frame().groupby(["kind", "source"], sort=False)["latency_s"]
        rows = frame.agg(["count", "sum"]).sort_values("sum", ascending=False).reset_index()
        rows = rows.rename(columns={"count": "operators", "sum": "device_s"})
        ends = f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}"
        return (
            f"<p>{html.escape(self.device)}: {format_seconds(self.latency_s)} ({ends}), decided by "
            f"the {self.limit}</p>{rows.to_html(index=False)}"
        )

    def document(self) -> dict[str, Any]:
        """The result as ``foreplan predict --json`` prints it."""
        return {
            "device": self.device,
            "latency_s": self.latency_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "execution": self.execution,
            "host_s": self.host_s,
            "device_s": self.device_s,
            "gap_s": self.gap_s,
            "limit": self.limit,
            "operators": len(self.steps),
            "by_kind_s": self.by("kind"),
            "by_part_s": self.by("part"),
            "by_source_s": self.by("source"),
            "unsupported": self.unsupported(),
            "evaluated": self.evaluated(),
        }
