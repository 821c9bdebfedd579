"""What a plan of replicas is made for and what it decides.

The cluster is split into *replicas*: pipelines that each hold the whole model and serve batches of
their own, one batch after the other. What is wanted is a rate (tokens a second), not the latency of
one batch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foreplan.datasets.specs import StrictModel
from foreplan.planner.serving.spec import Count, ServingDecision, ServingWorkload, check_mean_bits

Objective = Literal["throughput", "price", "tokens_per_price", "concurrency"]


class ReplicasWorkload(ServingWorkload):
    """Traffic, quality and what is wanted of a cluster that serves it with replicas.

    Fields of the serving workload hold for each replica: ``batch`` is the most requests that
    a replica serves together; what it does serve together is searched among the batch and its
    halves, as long as these are whole.

    Attributes:
        objective: ``throughput`` (most tokens a second), ``price`` (least price for at least
            ``min_throughput_tokens_per_s``), ``tokens_per_price`` (most tokens for the money) or
            ``concurrency`` (most requests that are held together).
        min_throughput_tokens_per_s: tokens a second of all replicas; needed for ``price``.
        requests: requests of a run of the plan, by which decisions compare; twice the batch for
            every device if left out.
        replica_devices: most devices of a replica.
    """

    objective: Objective = "throughput"
    min_throughput_tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    requests: Count | None = None
    replica_devices: Annotated[int, Field(gt=0, le=64)] = 8

    @model_validator(mode="after")
    def _wanted(self) -> ReplicasWorkload:
        floor = self.min_throughput_tokens_per_s
        if self.kv_bits == "auto":
            raise ValueError("kv_bits of 16 or 8: a plan of replicas does not choose it")
        if self.objective == "price" and floor is None:
            raise ValueError("min_throughput_tokens_per_s for the objective price")
        if self.requests is not None and self.requests % self.batch:
            raise ValueError(f"requests that are a multiple of the batch of {self.batch}")
        if self.objective in ("tokens_per_price", "concurrency") and floor is not None:
            raise ValueError(f"no min_throughput_tokens_per_s for the objective {self.objective}")
        return self

    @property
    def priced(self) -> bool:
        """Whether prices of devices matter."""
        return self.objective in ("price", "tokens_per_price")

    @property
    def keeps_every_replica(self) -> bool:
        """Whether a replica counts that a short run of the plan would do better without."""
        wanted = self.objective in ("price", "concurrency")
        return wanted or self.min_throughput_tokens_per_s is not None


class ReplicaDecision(ServingDecision):
    """One replica: a serving decision, its batch, and how many batches a run of the plan serves.

    Attributes:
        batch: requests that it serves together.
        rounds: batches that it serves one after the other in a run of the plan.
    """

    batch: Count
    rounds: Count = 1

    @model_validator(mode="after")
    def _divided(self) -> ReplicaDecision:
        for size in (self.prefill_microbatch, self.decode_microbatch):
            if self.batch % size:
                raise ValueError(f"micro-batches that divide the batch of {self.batch}")
        return self

    @property
    def shape(self) -> tuple[Any, ...]:
        """What replicas share that do the same on devices of the same names."""
        stages = tuple(
            (s.device.partition("#")[0], s.degree, s.start, s.end, s.bits) for s in self.stages
        )
        return self.batch, self.rounds, self.prefill_microbatch, self.decode_microbatch, stages


class ReplicasDecision(StrictModel):
    """A plan of replicas.

    Attributes:
        replicas: side by side, each on devices of its own; ranks of a run are numbered replica by
            replica, stage by stage, in a stage device by device.
        average_bits: mean over replicas.
        omega: largest summed quality loss of a replica.
        limits_met: whether every replica meets every limit.
    """

    replicas: Annotated[tuple[ReplicaDecision, ...], Field(min_length=1)]
    average_bits: float
    omega: float
    limits_met: bool = True

    @model_validator(mode="after")
    def _apart(self) -> ReplicasDecision:
        ranks = [rank for replica in self.replicas for rank in replica.ranks]
        if len(set(ranks)) < len(ranks):
            raise ValueError("a device of its own for every stage of every replica")
        if len({replica.layers for replica in self.replicas}) > 1:
            raise ValueError("the same number of layers in every replica")
        check_mean_bits(self.average_bits, [r.average_bits for r in self.replicas], "replicas")
        return self

    @classmethod
    def of(cls, replicas: tuple[ReplicaDecision, ...]) -> ReplicasDecision:
        """Replicas with the figures that follow from them."""
        return cls(
            replicas=replicas,
            average_bits=sum(r.average_bits for r in replicas) / len(replicas),
            omega=max(r.omega for r in replicas),
            limits_met=all(r.limits_met for r in replicas),
        )


def replica_workload(workload: ReplicasWorkload, batch: int) -> ReplicasWorkload:
    """The workload of one replica that serves ``batch`` requests together."""
    return workload.model_copy(update={"batch": batch})


def batch_sizes(workload: ReplicasWorkload) -> tuple[int, ...]:
    """What a replica may serve together, from few to many; each divides the next."""
    sizes = [workload.batch]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    fixed = [s for s in (workload.prefill_microbatch, workload.decode_microbatch) if s]
    return tuple(b for b in reversed(sizes) if all(b % size == 0 for size in fixed))
