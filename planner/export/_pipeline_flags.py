"""What the exporters of GPU servers share: which GPU runs which stage, and what is left to them."""

from __future__ import annotations

from collections.abc import Mapping

from foreplan.errors import SpecError
from foreplan.planner.export.compressed_tensors import OWN_EXPERTS
from foreplan.planner.export.handover import Handover, Scheme, serving_decision
from foreplan.planner.plan import Plan

_STAGES = "FOREPLAN_STAGES"


def gpu_environment(handover: Handover) -> tuple[dict[str, str], list[str]]:
    """Environment that puts stage i on the plan's i-th GPU, and notes for people.

    ``FOREPLAN_STAGES`` names host and GPU of every stage for whoever places ranks on several hosts;
    no launcher reads it.
    """
    stages = ",".join(f"{host}/{gpu}" for host, gpu in handover.gpus)
    environment = {_STAGES: stages}
    if handover.one_host:
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for _, gpu in handover.gpus)
        return environment, [_placing(handover, "CUDA_VISIBLE_DEVICES")]
    return environment, [
        f"several hosts ({', '.join(handover.hosts)}): start this on each and place rank i on the",
        f"i-th of {_STAGES} (host/GPU)",
    ]


def _placing(handover: Handover, listed: str) -> str:
    if handover.degree == 1:
        return f"stage i runs on the i-th of {listed}"
    return f"stage i runs on the i-th {handover.degree} of {listed}"


def refuse_older_gpus(plan: Plan, least: float, title: str, *, amd: bool) -> None:
    """Refuse GPUs that a server does not run on.

    Args:
        plan: whose stages are looked at; GPUs without published figures pass.
        least: compute capability that the server's documents ask for.
        title: of the server.
        amd: whether it runs on AMD's GPUs.

    Raises:
        SpecError: names the first stage on such a GPU.
    """
    ranks = plan.cluster.ranks()
    for index, stage in enumerate(serving_decision(plan).stages):
        for rank in (ranks[number] for number in stage.ranks):
            known = rank.compute_capability
            nvidia = known is None or not known.startswith("gfx")
            if known is None or (float(known) >= least if nvidia else amd):
                continue
            told = f"compute capability {known}" if nvidia else f"AMD's {known}"
            raise SpecError(
                f"decision.stages[{index}].device", got=f"{rank.label} ({told})",
                expected=f"a GPU that {title} runs on: compute capability {least} or later",
                fix="export to llama.cpp or torchrun",
            )  # fmt: skip


def read_gpus(environment: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """What `gpu_environment` wrote."""
    found = []
    for word in environment[_STAGES].split(","):
        host, _, gpu = word.rpartition("/")
        found.append((host, int(gpu)))
    return tuple(found)


def unexpressed(plan: Plan, handover: Handover) -> tuple[str, ...]:
    """What the plan says that a continuously batching server decides by itself."""
    decision = serving_decision(plan)
    lines = [
        f"micro-batches of {decision.prefill_microbatch} (prefill) and "
        f"{decision.decode_microbatch} (decode) requests: the server batches as requests come",
    ]
    if set(handover.schemes) != {Scheme("bf16")}:
        lines.append(
            "weights: quantise the checkpoint with the tool of the target; its rounding may "
            "differ from the one this plan's quality figures assume"
        )
    if decision.kv_bits != handover.cache_bits:
        lines.append(
            f"a KV cache of {decision.kv_bits}-bit integers (decision.kv_bits): the server has "
            "none (fp8 is another format); its cache of 16 bits takes nearly twice the plan's"
        )
    if plan.model is not None and plan.model.experts is not None:
        lines.append(
            "experts: the server runs a layer's experts in a grouped kernel of its own, all on the "
            "GPU of their layer"
        )
        if plan.model.family in OWN_EXPERTS:
            lines.append(
                "bits of experts: a checkpoint as it was published keeps them in MXFP4, whatever "
                "the plan says; then they take a quarter of the plan's 16 bits"
            )
    if handover.one_host and any("#" in stage.device for stage in decision.stages):
        lines.append(
            "GPU numbers: the plan names devices of the zoo; they are counted in the order of the "
            "cluster"
        )
    return tuple(lines)
