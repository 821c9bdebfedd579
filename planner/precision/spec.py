"""What a precision plan is made for and what it decides.

Synchronous data-parallel training on unlike devices with equal local batches (QSync, IPDPS 2024):
every worker holds fp32 master weights and fp32 gradients in the same DDP buckets, and computes each
operator of its step by a *variant* of its own.

Contract between the planner and what executes a plan (``planner/precision/execution``):

- ``WorkerDecision.operators`` names every *adjustable* module (linear, convolution, embedding) by
  its path in ``TrainingTask.module`` and gives its variant, as `Variant.parse` reads it. The module
  casts its input and its master weight to the variant's compute dtype, computes, and hands on a
  result of the variant's output dtype, see `TrainingVariant`.
- Every other operator runs in eager mode without autocast on what it is fed: element-wise operators
  promote (bf16 + fp32 gives fp32); matrix products and attention of unlike inputs are promoted to
  the widest of them before the call; a loss is computed on fp32.
- Actions of a rank, in order: ``forward`` (whole forward pass and loss), then for every bucket
  ``q = 0, 1, ...`` in launch order ``backward`` with ``step=q`` (the backward pass from where
  bucket ``q - 1`` became ready until bucket ``q`` is; the last one runs to the end) and
  ``all_reduce`` with ``step=q`` (mean of the bucket's fp32 gradients; a rendezvous of all ranks on
  the queue ``link:all_reduce`` of each, so that it overlaps the backward pass), then ``optimizer``.
  With one rank there are no ``all_reduce`` actions. Bytes on the wire are 4 a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from foreplan.datasets.kernels.training_variant import PRECISIONS as PRECISIONS
from foreplan.datasets.kernels.training_variant import TRAINING_VARIANTS as TRAINING_VARIANTS
from foreplan.datasets.kernels.training_variant import Precision as Precision
from foreplan.datasets.kernels.training_variant import TrainingVariant as TrainingVariant
from foreplan.datasets.kernels.training_variant import training_variant as training_variant
from foreplan.datasets.program import Variant
from foreplan.datasets.specs import StrictModel

Count = Annotated[int, Field(gt=0, le=1 << 24)]
#: Samples, or tokens, of a worker's step: half a GB of the smallest images.
MOST_SAMPLES = 1 << 21
Indicator = Literal[
    "gradient_variance", "first_order", "depth_weighted", "hessian", "weight_change", "uniform",
    "random",
]  # fmt: skip

#: What a plan chooses from unless it is told otherwise.
DEFAULT_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
#: Ops of a rank's list, as the execution reads them.
FORWARD, BACKWARD, ALL_REDUCE, OPTIMIZER = "forward", "backward", "all_reduce", "optimizer"


class PrecisionWorkload(StrictModel):
    """Training step that a precision plan is made for.

    Attributes:
        batch: samples of each worker's step.
        sequence_length: tokens of a sample; ``None`` where a sample is no sequence, and of a
            decoder 128, or as many as it attends to.
        network: what is trained: ``model`` (the plan's decoder), ``byte_lm``, ``digits_mlp``,
            ``digits_cnn``, or a registered name, see `foreplan.planner.precision.networks`.
        network_options: keyword arguments of the network's builder.
        optimizer: ``sgd`` (momentum 0.9: one fp32 state a parameter) or ``adamw`` (two).
        learning_rate: of the optimizer.
        steps: training steps that a verification runs.
        precisions: precisions that operators may have; ``tf32`` and ``fp8`` need a GPU, and where a
            device has no kernel for one it is no choice there.
        indicator: what the plan minimises the sum of.
        calibration_batches: batches that the indicator's statistics are averaged over.
        gamma: weight of the forward pass's variance in the indicator; 1 = the derivation's.
        target_s: seconds an iteration may take; ``None``: the iteration time of the starting plan,
            in which every device runs at the uniform precision that is fastest on it.
        slack: share by which an iteration may exceed that.
        memory_headroom: share of a device's memory that stays free.
        full_precision: ranks (labels or device names) that stay at fp32, QSync's training devices.
        share_layers: operators of repeated blocks get one precision a position in the block.
        first_bucket_bytes, bucket_bytes: DDP's bucket limits.
        max_nodes: of the solver's search tree.
    """

    batch: Count
    sequence_length: Count | None = None
    network: str = "model"
    network_options: Mapping[str, Any] = Field(default_factory=dict)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-2
    steps: Count = 4
    precisions: tuple[Precision, ...] = DEFAULT_PRECISIONS
    indicator: Indicator = "gradient_variance"
    calibration_batches: Count = 4
    gamma: Annotated[float, Field(gt=0)] = 1.0
    target_s: Annotated[float, Field(gt=0)] | None = None
    slack: Annotated[float, Field(ge=0)] = 0.0
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    full_precision: tuple[str, ...] = ()
    share_layers: bool = False
    first_bucket_bytes: Annotated[int, Field(gt=0)] = 1 << 20
    bucket_bytes: Annotated[int, Field(gt=0)] = 25 << 20
    max_nodes: Count = 20_000

    @field_validator("precisions", "full_precision", mode="before")
    @classmethod
    def _one_word(cls, value: Any) -> Any:
        # A list is no tuple to strict checks behind a validator, also where it comes from JSON.
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _bounded(self) -> PrecisionWorkload:
        if self.batch * (self.sequence_length or 1) > MOST_SAMPLES:
            raise ValueError(f"at most {MOST_SAMPLES} samples, or tokens, a worker and step")
        return self

    @field_validator("precisions")
    @classmethod
    def _distinct(cls, value: tuple[Precision, ...]) -> tuple[Precision, ...]:
        if "fp32" not in value or len(set(value)) < len(value):
            raise ValueError("different precisions with fp32 among them")
        return tuple(sorted(value, key=PRECISIONS.index))


class WorkerDecision(StrictModel):
    """Precisions of one worker.

    Attributes:
        rank: index of the device among the cluster's ranks; also the rank of its process.
        device: its label, for readers.
        operators: variant of every adjustable module, by the module's path:
            ``STORAGE/FORWARD/KERNEL`` are dtype of the master weight, dtype of the forward product
            and kernel, its library in front; 8-bit kernels are followed by ``+`` and the dtype of
            the backward products (``fp32/int8/torch.int_mm+bf16``), with ``@tensor`` where operands
            have one scale a tensor and not one a row.
    """

    rank: Annotated[int, Field(ge=0)]
    device: str
    operators: dict[str, str]

    @field_validator("operators")
    @classmethod
    def _known(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if text not in TRAINING_VARIANTS:
                raise ValueError(f"for {name} one of {', '.join(TRAINING_VARIANTS)}, not {text}")
        return value

    def variant(self, name: str) -> Variant:
        """Variant of a module."""
        return Variant.parse(self.operators[name])


class PrecisionDecision(StrictModel):
    """A precision plan's decision.

    Attributes:
        workers: one a rank of the cluster, in its order.
        buckets: names of the parameters of each DDP bucket, in launch order; equal on all ranks.
        network: fingerprint of the network's parameters, see `task.fingerprint`.
        omega: summed indicator over workers and operators.
        target_s: seconds that an iteration was allowed.
        limits_met: whether time and memory hold; a baseline may miss them.
    """

    workers: Annotated[tuple[WorkerDecision, ...], Field(min_length=1)]
    buckets: Annotated[tuple[tuple[str, ...], ...], Field(min_length=1)]
    network: str
    omega: float
    target_s: float
    limits_met: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> PrecisionDecision:
        if [worker.rank for worker in self.workers] != list(range(len(self.workers))):
            raise ValueError("one worker a rank, in the order of ranks from 0")
        names = [name for bucket in self.buckets for name in bucket]
        if len(set(names)) < len(names):
            raise ValueError("every parameter in one bucket")
        if len({frozenset(worker.operators) for worker in self.workers}) > 1:
            raise ValueError("the same operators on every worker")
        return self
