"""`kernel_notes`: kernels that a plan prices, and its devices cannot run, or not as priced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foreplan.datasets import device_zoo
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.kernels.expert_kernels import runs_grouped
from foreplan.datasets.kernels.registry import runs_on
from foreplan.datasets.models.model import Model
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


def expert_notes(
    model: Model, stages: Iterable[StageDecision], ranks: Sequence[Rank]
) -> tuple[str, ...]:
    """What a plan says whose experts are called one by one on a GPU, which its prices do not know.

    A GPU of the user's own host is taken to run them at once, if their kernel does.

    Args:
        model: the model.
        stages: of the decision.
        ranks: of the cluster.
    """
    names = dict[str, None]()
    for stage in stages:
        classes = model.layer_classes[stage.start : stage.end]
        bits = {str(b) for b, of in zip(stage.bits, classes, strict=True) if of == "moe"}
        used = [Variant.parse(text) for key, text in stage.kernels.items()
                if key.count("/") == 2 and key.rpartition("/")[2] in bits]  # fmt: skip
        for rank in (ranks[number] for number in stage.ranks):
            if rank.kernel_kind == "cuda" and not all(
                runs_grouped(v, _capability(rank)) for v in used
            ):
                names[str(rank.name)] = None
    if not names:
        return ()
    return (
        f"experts of {model.name} are called one by one on {', '.join(names)} in this project's "
        "own runs: such a pass is launched operator by operator, and takes longer than its price",
    )


def _capability(rank: Rank) -> float | None:
    """Compute capability; ``None`` of the host's own, 0 where the zoo says none."""
    if rank.name.zoo is None:
        return None
    known = device_zoo.device(rank.name.zoo)
    return float(known.compute_capability or 0) if known.kind == "cuda" else 0.0
