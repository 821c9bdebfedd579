"""`kernel_notes`: kernels that a plan prices on devices that cannot run them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreplan.datasets import device_zoo
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.kernels.registry import runs_on
from foreplan.datasets.program import Variant
from foreplan.planner.serving.spec import StageDecision


def kernel_notes(stages: Iterable[StageDecision], ranks: Sequence[Rank]) -> tuple[str, ...]:
    """What a plan says whose weights are stored for a kernel that its GPUs do not have.

    Devices with a profile are left out: there a kernel that does not run has no price.

    Args:
        stages: of the decision.
        ranks: of the cluster.
    """
    bits, names = set[str](), dict[str, None]()
    for stage in stages:
        for rank in (ranks[number] for number in stage.ranks):
            if rank.profile is not None or rank.name.zoo is None:
                continue
            device = device_zoo.device(rank.name.zoo)
            for key, text in stage.kernels.items():
                _, kind, *number = key.split("/")
                used = kind != "linear" or int(number[0]) in stage.bits
                if used and not runs_on(Variant.parse(text), device):
                    bits.update(number)
                    names[device.name] = None
    if not names:
        return ()
    return (
        f"weights of {' and '.join(sorted(bits, key=int))} bits on {', '.join(names)} are priced "
        "with our fused kernel, which NVIDIA GPUs from compute capability 8.0 on can run: a run "
        "there needs a launcher with another as fast",
    )
