"""`Handover`: what a serving plan asks of a launcher, in terms that every launcher knows.

Exporters read this instead of the decision, and give it back from what they wrote, so that a
round trip shows that nothing was altered on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from foreplan.datasets import device_zoo
from foreplan.datasets.dtypes import GROUP_SIZE
from foreplan.datasets.program import Variant
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.plan import Plan, decision_of
from foreplan.planner.serving.replica_spec import (
    ReplicasDecision,
    ReplicasWorkload,
    replica_workload,
)
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload, StageDecision


@dataclass(frozen=True, slots=True, order=True)
class Scheme:
    """How the linears of a layer are stored and computed.

    Attributes:
        weights: storage dtype (``bf16``, ``int8``, ``fp8``, ``int4``, ``int3``).
        activations: dtype that inputs are rounded to, ``None`` where they stay in 16 bits.
    """

    weights: str
    activations: str | None = None

    @property
    def bits(self) -> int:
        """Bits of a weight, without scales."""
        return {"bf16": 16, "fp16": 16, "int8": 8, "fp8": 8, "int4": 4, "int3": 3}[self.weights]

    @property
    def group(self) -> int:
        """Weights that share a scale along the input; 0 = one scale an output row."""
        return GROUP_SIZE.get(self.weights, 0)


@dataclass(frozen=True, slots=True)
class Handover:
    """A pipeline of stages, for a launcher.

    Attributes:
        layers: number of layers of each stage.
        schemes: one for each layer of the model.
        gpus: (host, number of the GPU on that host), stage by stage.
        degree: GPUs of each stage, by tensor parallelism.
        cache_bits: bits of the KV cache.
    """

    layers: tuple[int, ...]
    schemes: tuple[Scheme, ...]
    gpus: tuple[tuple[str, int], ...]
    degree: int = 1
    cache_bits: int = 16

    @classmethod
    def of(cls, plan: Plan) -> Handover:
        """Read a serving plan.

        Raises:
            SpecError: another kind of plan, a stage on a CPU or on a slice of a GPU, stages of
                unlike numbers of GPUs, or phases that round activations differently; names the line
                of the plan.
        """
        decision = serving_decision(plan)
        degree = decision.stages[0].degree
        for index, stage in enumerate(decision.stages):
            if stage.degree != degree:
                raise SpecError(
                    f"decision.stages[{index}].peers", got=f"{stage.degree} devices",
                    expected=f"{degree}, as in the first stage: launchers know one degree of "
                    "tensor parallelism",
                    fix=f"plan again with tensor_parallel={degree}",
                )  # fmt: skip
        gpus = tuple(
            _gpu(plan, index, stage, rank)
            for index, stage in enumerate(decision.stages)
            for rank in stage.ranks
        )
        schemes = tuple(
            _scheme(stage, index, bits)
            for index, stage in enumerate(decision.stages)
            for bits in stage.bits
        )
        layers = tuple(s.end - s.start for s in decision.stages)
        return cls(layers, schemes, gpus, degree, decision.kv_bits)

    def with_plain_cache(self) -> Handover:
        """The same for a target whose caches have no 8-bit integers."""
        return replace(self, cache_bits=16)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts in the order of the stages."""
        return tuple(dict.fromkeys(host for host, _ in self.gpus))

    @property
    def one_host(self) -> bool:
        """Whether every stage runs on the same host."""
        return len(self.hosts) == 1

    def refuse_groups(self, target: str) -> None:
        """Refuse stages of several GPUs, for a target that has none.

        Raises:
            SpecError: names the first stage.
        """
        if self.degree > 1:
            raise SpecError(
                "decision.stages[0].peers", got=f"{self.degree} GPUs",
                expected=f"one GPU a stage: {target} splits layers in another way or not at all",
                fix="plan again with tensor_parallel=1",
            )  # fmt: skip

    def layers_of(self, scheme: Scheme) -> tuple[int, ...]:
        """Layers that are computed in this way."""
        return tuple(i for i, s in enumerate(self.schemes) if s == scheme)

    def refuse(self, weights: tuple[str, ...], target: str) -> None:
        """Refuse storage dtypes that a target cannot load.

        Raises:
            SpecError: names the first layer with another dtype.
        """
        for layer, scheme in enumerate(self.schemes):
            if scheme.weights not in weights:
                raise SpecError(
                    f"decision: bits of layer {layer}", got=f"{scheme.bits} ({scheme.weights})",
                    expected=f"what {target} can load: {', '.join(weights)}",
                    fix="plan again with bits=" + "+".join(
                        str(b) for b in sorted({Scheme(w).bits for w in weights}, reverse=True)
                    ),
                )  # fmt: skip


def serving_decision(plan: Plan) -> ServingDecision:
    """The plan's decision.

    Raises:
        SpecError: another kind of plan.
    """
    decision = decision_of(plan)
    if not isinstance(decision, ServingDecision):
        raise SpecError("plan.kind", got=plan.kind, expected="serving, for this target")
    return decision


def replica_plans(plan: Plan) -> tuple[Plan, ...]:
    """The serving plan of each replica; a serving plan is its own only one.

    Raises:
        SpecError: another kind of plan.
    """
    decision = decision_of(plan)
    if not isinstance(decision, ReplicasDecision):
        return (plan,)
    workload = validate(ReplicasWorkload, plan.workload, "plan: workload")
    parts = []
    for replica in decision.replicas:
        traffic = replica_workload(workload, replica.batch).model_dump(mode="json")
        decided = replica.model_dump(mode="json")
        changes = {
            "kind": "serving",
            "workload": {
                name: traffic[name] for name in ServingWorkload.model_fields if name in traffic
            },
            "decision": {
                name: decided[name] for name in ServingDecision.model_fields if name in decided
            },
            "alternatives": (),
        }
        parts.append(plan.model_copy(update=changes))
    return tuple(parts)


def serving_workload(plan: Plan) -> ServingWorkload:
    """The traffic the plan was made for."""
    return validate(ServingWorkload, plan.workload, "plan: workload")


def _gpu(plan: Plan, index: int, stage: StageDecision, number: int) -> tuple[str, int]:
    """Host and GPU number of a rank: its own number, or its place among its host's devices."""
    ranks = plan.cluster.ranks()
    rank = ranks[number]
    word = f"decision.stages[{index}].device"
    name = rank.name
    kind = device_zoo.device(str(name)).kind if name.kind == "zoo" else name.kind
    if kind == "cpu":
        raise SpecError(
            word, got=rank.label, expected="a GPU: this target has no CPU stages",
            fix="`--to torchrun` runs any plan",
        )  # fmt: skip
    if name.kind == "cuda":
        if "/" in str(name):
            raise SpecError(
                word, got=rank.label, expected="a whole GPU: no launcher knows slices of one"
            )
        return rank.host, int(str(name).split(":")[1])
    here = [r.index for r in ranks if r.host == rank.host]
    return rank.host, here.index(rank.index)


def _scheme(stage: StageDecision, index: int, bits: int) -> Scheme:
    found: dict[str, Scheme] = {}
    for phase in ("prefill", "decode"):
        variant = Variant.parse(stage.kernels[f"{phase}/linear/{bits}"])
        rounded = variant.compute in ("int8", "fp8")
        found[phase] = Scheme(variant.storage, variant.compute if rounded else None)
    if found["prefill"] != found["decode"]:
        raise SpecError(
            f"decision.stages[{index}].kernels", got=f"linear/{bits} of two kinds by phase",
            expected="one way of rounding activations in both phases",
            fix="plan again with quantise_activations=false",
        )  # fmt: skip
    return found["decode"]
