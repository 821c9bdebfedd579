"""What a serving plan is made for and what it decides.

A *batch* of equal prompts is prefilled in micro-batches and then decoded token by token, in
micro-batches again; layers are split into contiguous *stages*, one device each, and every layer
gets its own number of bits (LLM-PQ's setting).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from foreplan.errors import SpecError
from foreplan.planner.serving.sparse_model import SparseModel

#: Storage dtypes that a number of bits can mean, by preference where they cost the same.
STORAGE: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {16: ("bf16",), 8: ("int8", "fp8"), 4: ("int4",), 3: ("int3",)}
)

#: Storage dtype of keys and values that a number of bits means.
CACHE_STORAGE: Mapping[int, str] = MappingProxyType({16: "bf16", 8: "int8"})

Count = Annotated[int, Field(gt=0, le=1 << 24)]


class ServingWorkload(SparseModel):
    """Traffic and quality that a serving plan is made for.

    Attributes:
        batch: requests that are served together.
        prompt_tokens: length that prompts are padded to.
        new_tokens: tokens generated for each request, the first by prefill.
        bits: numbers of bits a layer may have.
        min_average_bits: floor on the mean number of bits over layers, or ``None``.
        max_omega: cap on the summed quality loss, or ``None``.
        max_perplexity_increase: cap on the rise in perplexity, by the fitted curve, or ``None``.
        text: quality is measured on it, ``stdlib`` or a file; the weights alone where ``None``.
        quality: table of `foreplan quality` to use instead of measuring.
        theta_s: seconds one unit of quality loss is worth; 0 leaves quality to the limits.
        quantise_activations: allow kernels that round activations to 8 bits too.
        kv_bits: bits of a number in every layer's KV cache: 16, or 8 with a scale for each token
            and head; ``auto`` takes the better one.
        max_time_to_first_token_s: limit on when the last request of the batch has its first token.
        max_time_per_output_token_s: limit on the mean time between later tokens of a request.
        prefill_microbatch, decode_microbatch: requests of a micro-batch; searched where ``None``.
        tensor_parallel: equal devices that share each stage's layers; ``auto`` searches it stage by
            stage.
    """

    later: ClassVar[frozenset[str]] = frozenset({"tensor_parallel", "kv_bits"})

    batch: Count
    prompt_tokens: Count
    new_tokens: Count
    bits: tuple[int, ...] = (16, 8, 4)
    min_average_bits: Annotated[float, Field(gt=0, le=16)] | None = None
    max_omega: Annotated[float, Field(ge=0)] | None = None
    max_perplexity_increase: Annotated[float, Field(gt=0)] | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    quality: Annotated[str, Field(min_length=1)] | None = None
    theta_s: Annotated[float, Field(ge=0)] = 0.0
    quantise_activations: bool = False
    max_time_to_first_token_s: Annotated[float, Field(gt=0)] | None = None
    max_time_per_output_token_s: Annotated[float, Field(gt=0)] | None = None
    prefill_microbatch: Count | None = None
    decode_microbatch: Count | None = None
    tensor_parallel: Literal["auto"] | Annotated[int, Field(gt=0, le=1024)] = 1
    kv_bits: Literal["auto", 16, 8] = 16

    @field_validator("bits", mode="before")
    @classmethod
    def _one_number(cls, value: Any) -> Any:
        # ``bits=8`` on the command line; a list is no tuple to strict checks behind a validator.
        if isinstance(value, list):
            return tuple(value)
        return (value,) if type(value) is int else value

    @field_validator("bits")
    @classmethod
    def _known_bits(cls, bits: tuple[int, ...]) -> tuple[int, ...]:
        if not bits or len(set(bits)) < len(bits) or not set(bits) <= set(STORAGE):
            raise ValueError(f"different numbers of {sorted(STORAGE)}")
        return tuple(sorted(bits, reverse=True))

    @field_validator("tensor_parallel", mode="before")
    @classmethod
    def _known_degree(cls, degree: Any) -> Any:
        # In one line; a union's own errors are one for each of its members.
        if degree != "auto" and not (type(degree) is int and 1 <= degree <= 1024):
            raise ValueError("auto, or a number of devices from 1 to 1024")
        return degree

    @property
    def priced(self) -> bool:
        """Whether prices of devices matter."""
        return False

    @property
    def caches(self) -> tuple[Literal[16, 8], ...]:
        """Numbers of bits that the KV cache may have."""
        return (16, 8) if self.kv_bits == "auto" else (self.kv_bits,)

    @property
    def cache_bits(self) -> Literal[16, 8]:
        """Bits of the KV cache; ask where they are decided."""
        (bits,) = self.caches
        return bits

    @model_validator(mode="after")
    def _consistent(self) -> ServingWorkload:
        floor = self.min_average_bits
        if floor is not None and floor > max(self.bits):
            raise ValueError(f"min_average_bits up to {max(self.bits)}, the most bits allowed")
        for size in (self.prefill_microbatch, self.decode_microbatch):
            if size is not None and self.batch % size:
                raise ValueError(f"micro-batches that divide the batch of {self.batch}")
        return self


class StageDecision(SparseModel):
    """Layers ``[start, end)`` on one device, or on a group of equal ones by tensor parallelism.

    Attributes:
        rank: index of the device among the cluster's ranks; of a group, its first.
        device: its label, for readers.
        peers: ranks of the group's other devices; each computes a share of every layer.
        start, end: first layer and one past the last.
        bits: bits of each of these layers.
        kernels: variant by ``phase/attention``, ``phase/head`` and ``phase/linear/bits``. A variant
            is ``STORAGE/COMPUTE/KERNEL``: dtype that weights (of attention: the cache) are kept in,
            dtype of activations and arithmetic, and kernel, its library in front.
    """

    later: ClassVar[frozenset[str]] = frozenset({"peers"})

    rank: Annotated[int, Field(ge=0)]
    device: str
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(gt=0)]
    bits: tuple[int, ...]
    kernels: dict[str, str]
    peers: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all its devices."""
        return self.rank, *self.peers

    @property
    def degree(self) -> int:
        """How many devices share each of its layers."""
        return 1 + len(self.peers)

    @model_validator(mode="after")
    def _consistent(self) -> StageDecision:
        if len(self.bits) != self.end - self.start:
            raise ValueError(f"one number of bits for each of layers {self.start}..{self.end - 1}")
        return self


class ServingDecision(SparseModel):
    """A serving plan's decision.

    Attributes:
        stages: in pipeline order; ranks of a run are numbered stage by stage, in a stage device by
            device.
        prefill_microbatch: requests of a prefill micro-batch.
        decode_microbatch: requests of a decode micro-batch.
        average_bits: mean over layers.
        omega: summed quality loss by the plan's indicator.
        limits_met: whether memory and every quality limit hold; a baseline may miss the quality.
        kv_bits: bits of every layer's KV cache.
    """

    later: ClassVar[frozenset[str]] = frozenset({"kv_bits"})

    stages: Annotated[tuple[StageDecision, ...], Field(min_length=1)]
    prefill_microbatch: Count
    decode_microbatch: Count
    average_bits: float
    omega: float
    limits_met: bool = True
    kv_bits: Literal[16, 8] = 16

    @model_validator(mode="after")
    def _consistent(self) -> ServingDecision:
        ends = [0, *(stage.end for stage in self.stages)]
        if [stage.start for stage in self.stages] != ends[:-1]:
            raise ValueError("stages that follow each other from layer 0")
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError("a device of its own for every stage")
        check_mean_bits(self.average_bits, self.bits, "layers")
        return self

    @property
    def ranks(self) -> tuple[int, ...]:
        """Cluster rank of every device, in the order of a run's ranks."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    def place(self, rank: int) -> tuple[int, int]:
        """(stage, device in it) of a rank of a run.

        Raises:
            SpecError: there is no such rank.
        """
        left = rank
        for index, stage in enumerate(self.stages):
            if 0 <= left < stage.degree:
                return index, left
            left -= stage.degree
        raise SpecError("rank", got=rank, expected=f"0..{len(self.ranks) - 1}")

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.stages[-1].end

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of every layer."""
        return tuple(b for stage in self.stages for b in stage.bits)


def check_mean_bits(stated: float, bits: Sequence[float], over: str) -> None:
    """Refuse a mean that does not follow from the bits, as after an edit of either.

    Raises:
        ValueError: it differs by more than the six digits that are named.
    """
    mean = sum(bits) / len(bits)
    if not math.isclose(stated, mean, rel_tol=1e-5):
        raise ValueError(f"average_bits of {mean:.6g}, the mean over {over}")
