"""What a bubble plan is made for: a multimodal model, its batch, and what is fixed of its layout.

A multimodal model is one or more *encoders* with a projector each, and a language model, the
*backbone*. A training step runs ``microbatches`` micro-batches through each backbone pipeline; the
encoders' work goes into the times in which the backbone leaves a device idle (Optimus, USENIX ATC
2025, section 3).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from foreplan.datasets.specs import StrictModel

Count = Annotated[int, Field(gt=0, le=1 << 20)]
Index = Annotated[int, Field(ge=0, le=1 << 20)]
Seconds = Annotated[float, Field(ge=0, lt=1e6)]

Recompute = Literal["none", "selective", "full"]
PipelineName = Literal["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2"]


class TransformerDims(StrictModel):
    """Sizes of one transformer, encoder or backbone, without its weights.

    Attributes:
        layers: of attention and MLP.
        hidden: features of a token between layers.
        heads: query heads of attention.
        kv_heads: key and value heads; ``heads`` if left out.
        head_dim: features of a head; ``hidden / heads`` if left out.
        ffn: features inside the MLP; ``4 * hidden`` if left out.
        gated: the MLP has a gate.
        vocab: rows of embedding and head: 0 for an encoder, a backbone needs its number.
        layer_forward_s, layer_backward_s: seconds of one layer for one micro-batch on one rank of
            its tensor parallel group, without collectives, where they are known; they override the
            cost book.
    """

    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn: Count | None = None
    gated: bool = False
    vocab: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    layer_forward_s: Seconds | None = None
    layer_backward_s: Seconds | None = None

    @model_validator(mode="after")
    def _consistent(self) -> TransformerDims:
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads that divide the {self.heads} heads")
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"heads that divide hidden = {self.hidden}, or a head_dim")
        if (self.layer_forward_s is None) != (self.layer_backward_s is None):
            raise ValueError("both or neither of layer_forward_s and layer_backward_s")
        return self


class Encoder(StrictModel):
    """One encoder and its projector into the backbone's width.

    Its input is ``[microbatch, tokens, patch_features]``: a linear brings patches to the encoder's
    width in front of the first layer, the projector brings tokens to the backbone's behind the
    last one (both count as part of those layers).

    Attributes:
        name: what a reader calls it.
        model: name in the encoder zoo, or a Hugging Face folder with a vision configuration, which
            is read when the plan is made; a plan holds the sizes found.
        dims: its sizes, instead of ``model``.
        tokens: positions that the encoder attends over, for each sample.
        images: sequences of ``tokens`` positions for each sample, encoded apart.
        projected_tokens: positions that a sample's features take in the backbone's sequence;
            ``tokens * images`` if left out.
        patch_features: features of one patch; ``hidden`` if left out.
        projector: ``linear`` (one matrix), ``mlp`` (two, by way of the backbone's width) or
            ``merger`` (two, by way of the width of what it takes).
        pool: how the projector takes positions where there are fewer features: their ``mean``, or
            one after another (``concatenate``), as Qwen2-VL and InternVL do.
        frozen: no backward pass, no gradients, no optimizer states.
        recompute: keep the input of each unit alone and compute its inside again in the backward
            pass; ``auto`` leaves that to the planner.
    """

    name: str = Field(min_length=1)
    model: str | None = None
    dims: TransformerDims | None = None
    tokens: Count
    images: Count = 1
    projected_tokens: Count | None = None
    patch_features: Count | None = None
    projector: Literal["linear", "mlp", "merger"] = "linear"
    pool: Literal["mean", "concatenate"] = "mean"
    frozen: bool = False
    recompute: bool | Literal["auto"] = False

    @field_validator("recompute", mode="before")
    @classmethod
    def _known_recompute(cls, value: Any) -> Any:
        # In one line; a union's own errors are one for each of its members.
        if type(value) is not bool and value != "auto":
            raise ValueError("true, false or auto")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Encoder:
        if (self.model is None) == (self.dims is None):
            raise ValueError("one of model and dims")
        positions = self.tokens * self.images
        if self.pool == "concatenate" and positions % self.features:
            raise ValueError(f"projected_tokens that divide the {positions} positions, to put them "
                             "one after another")  # fmt: skip
        return self

    @property
    def merged(self) -> int:
        """Positions that the projector takes one after another."""
        whole = self.tokens * self.images
        return whole // self.features if self.pool == "concatenate" else 1

    @property
    def features(self) -> int:
        """Positions of a sample's features in the backbone's sequence."""
        return self.projected_tokens or self.tokens * self.images


class BackbonePlan(StrictModel):
    """How the backbone is laid out: ``dp * pp * tp`` devices.

    Attributes:
        dp: replicas of the pipeline.
        pp: ranks of each pipeline.
        tp: tensor parallel devices of each rank.
        chunks: virtual stages of a rank.
        device_order: which block of ``dp * tp`` devices, in the cluster's order, each pipeline rank
            takes; ``None`` for that order. On unlike devices other orders are tried where it is
            left out.
    """

    dp: Count = 1
    pp: Count = 1
    tp: Count = 1
    chunks: Count = 1
    device_order: tuple[Index, ...] | None = None

    @model_validator(mode="after")
    def _each_block_once(self) -> BackbonePlan:
        if self.device_order is not None and sorted(self.device_order) != list(range(self.pp)):
            raise ValueError(f"a device_order that names each of {self.pp} blocks once")
        return self

    def block(self, rank: int) -> int:
        """The block of devices that a pipeline rank takes."""
        return rank if self.device_order is None else self.device_order[rank]

    @property
    def devices(self) -> int:
        """Devices it takes."""
        return self.dp * self.pp * self.tp

    @property
    def words(self) -> str:
        """Its numbers, for a reader."""
        text = f"dp {self.dp} x pp {self.pp} x tp {self.tp}, {self.chunks} chunks"
        order = self.device_order
        return text if order is None else f"{text}, devices {', '.join(map(str, order))}"


class GivenTimes(StrictModel):
    """Seconds that override the cost book, for published settings.

    Attributes:
        tensor_collective_s: one all-gather or reduce-scatter of a backbone layer's activations.
        encoder_tensor_collective_s: one of an encoder layer's.
        all_gather_s, reduce_scatter_s: parameters and gradients over the data parallel ranks, the
            part that nothing of the backbone hides.
        encoder_all_gather_s, encoder_reduce_scatter_s: likewise of one encoder stage.
        transfer_s: activations from one pipeline rank to the next.
        optimizer_s: the optimizer's step.
    """

    tensor_collective_s: Seconds | None = None
    encoder_tensor_collective_s: Seconds | None = None
    all_gather_s: Seconds | None = None
    reduce_scatter_s: Seconds | None = None
    encoder_all_gather_s: Seconds | None = None
    encoder_reduce_scatter_s: Seconds | None = None
    transfer_s: Seconds | None = None
    optimizer_s: Seconds | None = None


class BubblesWorkload(StrictModel):
    """A multimodal training step.

    Attributes:
        encoders: every encoder; all of them must be done with a micro-batch before the backbone
            starts on it.
        backbone: sizes of the language model, unless ``--model`` names it.
        multimodal: Hugging Face folder of a LLaVA, Qwen2-VL or InternVL that backbone and encoder
            (called ``vision``) are read from when the plan is made; what the workload states of
            them itself counts. A plan holds the sizes found.
        sequence_length: positions of the backbone's sequence, features included.
        microbatch: samples of a micro-batch.
        microbatches: micro-batches of each backbone pipeline in a step; as other numbers of
            pipelines would be other batches, the search takes one, ``dp: 1``.
        global_batch: samples of a step over all pipelines, instead of ``microbatches``; data
            parallelism is searched only with this.
        plan: the backbone's layout, ``dp * pp * tp`` devices; searched if left out, ``dp`` only
            with ``global_batch``.
        schedule: the backbone's pipeline schedule; ``interleaved-1f1b`` needs chunks above 1, and
            1F1B stands in for it where there is one chunk.
        recompute: of the backbone's activations: ``none`` keeps all, ``selective`` leaves out the
            attention's inside, ``full`` all but each layer's input, ``auto`` is searched.
        sharded_optimizer: gradients are reduce-scattered, parameters all-gathered (ZeRO); all-
            reduced otherwise.
        unit_layers: layers of an encoder that one unit may hold, to try; a half is the attention
            or the MLP block.
        encoder_stages: numbers of encoder stages to try; the divisors of ``pp`` if empty.
        devices: how many of the cluster's devices to use; all if left out.
        times: seconds that override the cost book.
    """

    encoders: Annotated[tuple[Encoder, ...], Field(min_length=1, max_length=8)]
    backbone: TransformerDims | None = None
    multimodal: str | None = None
    sequence_length: Count
    microbatch: Count = 1
    microbatches: Annotated[int, Field(gt=0, le=4096)] | None = None
    global_batch: Count | None = None
    plan: BackbonePlan | None = None
    schedule: PipelineName = "interleaved-1f1b"
    recompute: Literal[Recompute, "auto"] = "selective"
    sharded_optimizer: bool = True
    unit_layers: tuple[Annotated[float, Field(gt=0, le=1024)], ...] = (0.5, 1.0, 2.0, 4.0)
    encoder_stages: tuple[Count, ...] = ()
    devices: Count | None = None
    times: GivenTimes = GivenTimes()

    @field_validator("unit_layers")
    @classmethod
    def _halves(cls, sizes: tuple[float, ...]) -> tuple[float, ...]:
        if not sizes or any(2 * size != int(2 * size) for size in sizes):
            raise ValueError("one or more multiples of 0.5, the smallest unit being half a layer")
        return tuple(sorted(set(sizes)))

    @model_validator(mode="after")
    def _consistent(self) -> BubblesWorkload:
        if (self.microbatches is None) == (self.global_batch is None):
            raise ValueError("one of microbatches and global_batch")
        names = [encoder.name for encoder in self.encoders]
        if len(set(names)) < len(names):
            raise ValueError("encoders of different names")
        if self.global_batch is not None and self.global_batch % self.microbatch:
            raise ValueError(f"a global_batch that {self.microbatch} samples a micro-batch divide")
        features = sum(encoder.features for encoder in self.encoders)
        if features > self.sequence_length:
            raise ValueError(
                f"a sequence_length of at least the {features} positions of the encoders' features"
            )
        return self
