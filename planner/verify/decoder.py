"""`DecoderStage`: layers [start, end) of a decoder on one device, executed with real kernels.

A stage is loaded once, layer by layer, and then takes micro-batches through its layers: prefill
fills the KV cache of ``prompt`` positions, decode step ``s`` (from 1) adds position ``prompt + s -
1``. The first stage embeds token ids; the last applies final norm and head and picks the most
likely token. Requests are the rows of one cache; prefill and decode may cut them into different
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from foreplan.datasets.experts import LayerClass
from foreplan.datasets.kernels.quantised_cache import QuantisedCache
from foreplan.datasets.kernels.registry import function, kernels_for
from foreplan.datasets.models.decoder_programs import fixed_variant
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.rotary import RotationKind
from foreplan.datasets.models.weights import WeightSource
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError
from foreplan.planner.verify._decoder_layer import (
    DECODE,
    PREFILL,
    Cache,
    DecoderLayer,
    Linear,
    Norm,
    Pass,
    keep_table,
    nbytes,
)
from foreplan.planner.verify._expert_layer import ExpertLayer
from foreplan.planner.verify._latent_layer import LatentExpertLayer, LatentLayer
from foreplan.planner.verify.allocator import mapped_allocations
from foreplan.planner.verify.rotation import rotation
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

#: Storage of a quantised cache.
_QUANTISED = "int8"
#: Of one token that attends to latents, by the planned kernel.
_REFERENCES = dict.fromkeys(
    [v.kernel for v in kernels_for("latent_attention", "cpu")],
    Variant("bf16", "fp32", "torch.latent_sdpa"),
)
#: By what a layer's MLP is, and whether it attends to latents.
_LAYERS: Mapping[tuple[LayerClass, bool], type[DecoderLayer]] = MappingProxyType(
    {
        ("dense", False): DecoderLayer,
        ("dense", True): LatentLayer,
        ("moe", False): ExpertLayer,
        ("moe", True): LatentExpertLayer,
    }
)


class DecoderStage:
    """Layers ``[start, end)`` of a model on one device.

    Args:
        model: the model.
        start: first layer; 0 means that the stage embeds.
        end: one past the last; the number of layers means that the stage has the head.
        prefill_batches: requests of each prefill micro-batch, which follow each other in the cache.
        decode_batches: requests of each decode micro-batch; the same total.
        prompt: tokens of each prompt; shorter ones are padded.
        positions: of the cache: prompt and new tokens.
        device: torch device (``cpu``, ``cuda:0``).
        reference: compute in fp32 on the dequantised weights, with an fp32 cache or the same
            quantised one, instead of with the planned kernels.

    Attributes:
        logits: of the last token, ``[batch, vocab]``, after a pass of a stage with the head, while
            ``keep_logits`` is set; with ``every_position`` of all tokens, ``[rows, vocab]``.

    Raises:
        SpecError: no such layers, micro-batches that do not fit together, or a sequence longer
            than the model's.
    """

    def __init__(
        self,
        model: Model,
        start: int,
        end: int,
        *,
        prefill_batches: Sequence[int],
        decode_batches: Sequence[int],
        prompt: int,
        positions: int,
        device: str = "cpu",
        reference: bool = False,
    ) -> None:
        if not 0 <= start < end <= model.layers:
            raise SpecError(
                "stage", got=[start, end], expected=f"layers within [0, {model.layers})"
            )
        self.model = model
        self.start, self.end = start, end
        self.first, self.last = start == 0, end == model.layers
        self.device = torch.device(device)
        self.reference = reference
        self.keep_logits = self.every_position = False
        self.logits: Tensor | None = None
        self._dtype = torch.float32 if reference else torch.bfloat16
        self._layers: list[DecoderLayer] = []
        self._caches: tuple[list[list[tuple[Cache, Cache]]], ...] = ([], [])
        self._cache: Cache | None = None
        self._quantised = False
        self._embed: Tensor | None = None
        self._positions: Tensor | None = None
        self._final_norm: Norm | None = None
        self._head: Linear | None = None
        self._rotations: dict[RotationKind, tuple[Tensor, Tensor]] = {}
        self._embedding = function("embedding", fixed_variant(model, "embedding"))
        self._add = function("add", fixed_variant(model, "add"))
        self._argmax = function("argmax", fixed_variant(model, "argmax"))
        self._fit(prefill_batches, decode_batches, prompt, positions)

    def _fit(
        self, prefill: Sequence[int], decode: Sequence[int], prompt: int, positions: int
    ) -> None:
        _check_batches(prefill, decode)
        if not 1 <= prompt <= positions:
            raise SpecError("stage.prompt", got=prompt, expected=f"1 to {positions} positions")
        if positions > self.model.max_sequence:
            raise SpecError(
                "stage.positions",
                got=positions,
                expected=f"at most {self.model.max_sequence}, what {self.model.name} attends to",
            )
        self.prompt, self.positions = prompt, positions
        self._batches = (tuple(prefill), tuple(decode))

    # Loading ----------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self, weights: WeightSource, kernels: StageKernels) -> None:
        """Read, pack and keep the stage's weights, and allocate its cache and tables.

        The host holds one plain linear at a time beside what is packed already.

        Raises:
            SpecError: kernels that do not fit the stage or the device, or incomplete weights.
        """
        model, device = self.model, self.device
        if len(kernels.layers) != self.end - self.start:
            raise SpecError(
                "stage kernels", got=len(kernels.layers), expected=f"{self.end - self.start} layers"
            )
        for offset, layer in enumerate(kernels.layers):
            layer.check_layout(f"layer {self.start + offset}")
        attention = kernels.attention.both
        self._quantised = attention[0].storage == _QUANTISED
        if attention[0].storage != attention[1].storage:
            raise SpecError(
                "stage kernels.attention", got=f"{attention[0]} and {attention[1]}",
                expected="one storage, so that both phases share one cache",
            )  # fmt: skip
        if self.reference:
            # fp32 arithmetic on a plain cache, then kept in fp32 too, or on a quantised one.
            prefill, decode = (
                _REFERENCES.get(v.kernel, replace(v, compute="fp32")) for v in attention
            )
            attention = (prefill, decode)
        with mapped_allocations():
            # The largest matrices come first, while there is room for a second copy of them.
            if self.first:
                self._load_embedding(weights)
            if self.last:
                self._load_head(weights, kernels.head)
            self._layers = []
            for index, layer in enumerate(kernels.layers, self.start):
                kind = _LAYERS[model.layer_classes[index], model.latent is not None]
                loaded = kind(
                    model, index, weights, layer.both, attention, device, reference=self.reference
                )
                self._layers.append(loaded)
        self._allocate()

    @torch.inference_mode()
    def resize(
        self,
        prefill_batches: Sequence[int],
        decode_batches: Sequence[int],
        prompt: int,
        positions: int,
    ) -> None:
        """Make a loaded stage one for other requests; its weights stay, its cache is emptied.

        Raises:
            SpecError: as of the stage itself.
        """
        self._fit(prefill_batches, decode_batches, prompt, positions)
        self._cache = None
        self._caches[PREFILL].clear()
        self._caches[DECODE].clear()
        self._allocate()

    def _load_embedding(self, weights: WeightSource) -> None:
        where = (self.device, self._dtype)
        self._embed = keep_table(weights, "embedding", "embed.weight", *where)
        if self.model.position == "learned":
            self._positions = keep_table(weights, "embedding", "positions.weight", *where)

    def _load_head(self, weights: WeightSource, kernels: PhaseKernels | None) -> None:
        if kernels is None:
            raise SpecError("stage kernels.head", got=None, expected="kernels of the head")
        kernels.check_layout("head")
        norm = fixed_variant(self.model, "norm")
        self._final_norm = Norm(weights, "head", "final_norm", self.device, self._dtype, norm)
        self._head = Linear(
            weights, "head", "head", kernels.both, self.device, reference=self.reference
        )

    def _allocate(self) -> None:
        """Cache ``[layers, 1 or 2, requests, G, L, D]`` with its views, and tables of rotations."""
        model, batches = self.model, self._batches
        parts, heads, features = model.cache_shape
        shape = (sum(batches[PREFILL]), heads, self.positions, features)
        whole = (len(self._layers), parts, *shape)
        cache: Cache
        if self._quantised:
            cache = QuantisedCache.zeros(whole, self.device)
        else:
            cache = torch.empty(whole, dtype=self._dtype, device=self.device).zero_()
        # Written once, so that no page is first touched while a pass is timed.
        self._cache = cache
        for phase in (PREFILL, DECODE):
            self._caches[phase].clear()
            for begin, stop in _ranges(batches[phase]):
                rows = slice(begin, stop)
                layers = (cache[i, :, rows] for i in range(len(self._layers)))
                views = [(layer[0], layer[parts - 1]) for layer in layers]
                self._caches[phase].append(views)
        for kind in model.rotations_of(self.start, self.end):
            cos, sin = rotation(model, self.positions, kind)
            self._rotations[kind] = (
                cos.to(self.device, self._dtype),
                sin.to(self.device, self._dtype),
            )

    # Passes -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, micro_batch: int, x: Tensor) -> Tensor:
        """Take the prompts of a micro-batch through the stage and fill its cache.

        Args:
            micro_batch: index in ``prefill_batches``.
            x: first stage: token ids ``[batch, prompt]`` int64; others: the peer's result
                ``[batch * prompt, hidden]``.

        Returns:
            The residual stream ``[batch * prompt, hidden]``, or on the last stage the next token
            ids ``[batch]`` int64. A new tensor, contiguous.
        """
        batch = self._batches[PREFILL][micro_batch]
        return self._run(PREFILL, micro_batch, batch, self.prompt, 0, x)

    @torch.inference_mode()
    def decode(self, micro_batch: int, step: int, x: Tensor) -> Tensor:
        """Take one token of each request of a micro-batch through the stage.

        Args:
            micro_batch: index in ``decode_batches``.
            step: 1 for the token that prefill produced, then 2, ...
            x: first stage: token ids ``[batch]`` int64; others: ``[batch, hidden]``.

        Returns:
            The residual stream ``[batch, hidden]``, or on the last stage the next token ids
            ``[batch]`` int64. A new tensor, contiguous.
        """
        position = self.prompt + step - 1
        batch = self._batches[DECODE][micro_batch]
        return self._run(DECODE, micro_batch, batch, 1, position, x)

    def _run(
        self, phase: int, micro_batch: int, batch: int, tokens: int, position: int, x: Tensor
    ) -> Tensor:
        now = self._at(phase, batch, tokens, position)
        return self._through(x, now, self._caches[phase][micro_batch])

    def _through(self, x: Tensor, now: Pass, views: Sequence[tuple[Cache, Cache]]) -> Tensor:
        """Take a pass through all layers, each with its part of the cache."""
        if self._embed is not None:
            x = self._placed(self._embedding(self._embed, x.reshape(-1)), now)
        for layer, (cache_k, cache_v) in zip(self._layers, views, strict=True):
            x = layer(x, now, cache_k, cache_v)
        if self._head is None:
            return x
        ids: Tensor = self._argmax(self._scores(x, now))
        return ids

    def _at(self, phase: int, batch: int, tokens: int, position: int) -> Pass:
        """A pass that begins at a position of the cache."""
        end = position + tokens
        if not self.prompt <= end <= self.positions:
            raise SpecError("step", got=end - self.prompt, expected="a position in the cache")
        turns = {
            kind: (cos[position:end], sin[position:end])
            for kind, (cos, sin) in self._rotations.items()
        }
        return Pass(phase, batch, tokens, position, end, turns)

    def _placed(self, x: Tensor, now: Pass) -> Tensor:
        """Embedded tokens with their learned positions, where the model has such."""
        if self._positions is None:
            return x
        offset = self.model.position_offset
        if now.unequal is not None and now.tokens == 1:
            own: Tensor = self._add(x, self._positions[offset + now.unequal.last])
            return own
        rows = self._positions[offset + now.position : offset + now.keys]
        # The same positions for every request: broadcast, not gathered.
        placed: Tensor = self._add(x.view(now.batch, now.tokens, -1), rows)
        return placed.view(now.batch * now.tokens, -1)

    def _scores(self, x: Tensor, now: Pass) -> Tensor:
        """Logits of the last token, or of every one."""
        assert self._head is not None and self._final_norm is not None  # noqa: PT018 - one part
        if now.tokens > 1 and not self.every_position:
            x = x.view(now.batch, now.tokens, -1)
            if now.unequal is None:
                x = x[:, -1]
            else:
                x = x[torch.arange(now.batch, device=x.device), now.unequal.last]
        head = self._head
        logits = head.run[now.phase](self._final_norm(x), head.weight, head.bias)
        if self.keep_logits:
            # A cap leaves the most likely token what it is: passes that only pick it need none.
            cap = self.model.logit_cap
            self.logits = logits if cap is None else (logits / cap).tanh() * cap
        return logits

    @property
    def recordable(self) -> bool:
        """See `DecoderLayer.recordable`; of all layers."""
        return all(layer.recordable for layer in self._layers)

    # Accounting -------------------------------------------------------------------------------

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held, by the items of `foreplan.datasets.models.decoder_memory.stage_bytes`."""
        head = sum(part.bytes for part in (self._head, self._final_norm) if part is not None)
        return {
            "weights": sum(layer.bytes for layer in self._layers),
            "embedding": nbytes(self._embed) + nbytes(self._positions),
            "head": head,
            "kv_cache": nbytes(self._cache),
            "buffers": sum(nbytes(t) for tables in self._rotations.values() for t in tables),
        }


def _check_batches(prefill: Sequence[int], decode: Sequence[int]) -> None:
    for name, batches in (("prefill_batches", prefill), ("decode_batches", decode)):
        if not batches or min(batches) < 1:
            raise SpecError(f"stage.{name}", got=list(batches), expected="sizes of at least 1")
    if sum(prefill) != sum(decode):
        raise SpecError(
            "stage.decode_batches",
            got=f"{sum(decode)} requests",
            expected=f"the {sum(prefill)} of prefill",
        )


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return list(zip([0, *ends[:-1]], ends, strict=True))
