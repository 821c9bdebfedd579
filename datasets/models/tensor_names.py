"""`TensorSource`: which tensors of a checkpoint make up one of ours, family by family.

The runtime knows every decoder by the same few names (``qkv.weight``, ``norm1.bias``, ...) with
fused linears. This table says where they come from: which tensors, stacked along the output
features, and whether they are stored transposed, as GPT-2's ``Conv1D`` does (transformers,
``models/<family>/modeling_*.py`` and ``pytorch_utils.Conv1D``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foreplan.datasets.experts import Experts
from foreplan.datasets.models._family_names import EXPERT_NAMES, FAMILY_NAMES, WHOLE_QUERIES
from foreplan.datasets.models.block_floats import BLOCK, BlockFloats
from foreplan.datasets.models.checkpoint import Checkpoint
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.tensor_change import AS_STORED, TensorChange, change_of
from foreplan.errors import SpecError


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where one of our tensors comes from.

    Attributes:
        names: tensors of the checkpoint, stacked along dimension 0 (after transposing).
        rows: extent of each of them along dimension 0.
        shape: of the result.
        transposed: stored as ``[k, n]`` rather than ``[n, k]``.
        change: what is done to the fused tensor before the runtime has it.
        place: which it is of how many that a stored tensor stacks; ``None`` = it is alone.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    change: TensorChange = AS_STORED
    place: tuple[int, int] | None = None

    def stored_shape(self, index: int) -> tuple[int, ...]:
        """Shape of ``names[index]`` in the checkpoint."""
        shape = (self.rows[index], *self.shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return shape if self.place is None else (self.place[1], *shape)

    def blocks(self, index: int, checkpoint: Checkpoint) -> BlockFloats | None:
        """How ``names[index]`` is stored if that is in MXFP4; only stacks of matrices are."""
        name = self.names[index]
        if self.place is None or name in checkpoint.tensors or len(self.shape) < 2:
            return None
        found = BlockFloats(name, self.place[1], *self.shape)
        return found if next(iter(found.shapes)) in checkpoint.tensors else None


def layer_sources(model: Model, layer: int, prefix: str | None = None) -> dict[str, TensorSource]:
    """Where the tensors of decoder layer ``layer`` come from, by our name, in the order they run.

    Args:
        model: the model.
        layer: 0-based.
        prefix: of the base model's names; the family's own if ``None`` (see `find_prefix`).
    """
    names = FAMILY_NAMES[model.family]
    base = f"{names.prefix if prefix is None else prefix}{names.layers}.{layer}."
    layer_class = model.layer_classes[layer]
    linears = {linear.name: linear for linear in model.linears_of(layer_class)}
    sources: dict[str, TensorSource] = {}
    for part, parts in _layer_names(model).items():
        full = tuple(base + name for name in parts)
        if part in ("up", "down") and layer_class == "moe":
            continue
        if part in linears:
            linear = linears[part]
            rows = _split(model, part, len(parts), linear.n)
            stored = tuple(f"{name}.weight" for name in full)
            sources[f"{part}.weight"] = TensorSource(
                stored, rows, (linear.n, linear.k), transposed=model.family == "gpt2"
            )
            if linear.bias:
                biases = tuple(f"{name}.bias" for name in full)
                sources[f"{part}.bias"] = TensorSource(biases, rows, (linear.n,))
        elif part in ("q_norm", "k_norm"):
            if model.qk_norm:
                size = model.head_norm_sizes[0 if part == "q_norm" else 1]
                sources[f"{part}.weight"] = _vector(f"{full[0]}.weight", size)
        elif part == "sinks":
            if model.sinks:
                sources["sinks.weight"] = _vector(full[0], model.heads)
        elif model.latent is not None and part in ("expand", "latent_norm", "query_norm"):
            sources.update(_latent_source(model, part, full[0]))
        else:
            sources.update(_norm(model, part, full[0]))
    if layer_class != "dense":
        sources |= _expert_sources(model, base)
    return _changed(model, sources)


def _layer_names(model: Model) -> Mapping[str, tuple[str, ...]]:
    """Names of a layer's modules by our parts, without those of experts."""
    names = FAMILY_NAMES[model.family].layer
    if model.latent is None or model.latent.query_rank is not None:
        return names
    return {part: WHOLE_QUERIES.get(part, n) for part, n in names.items() if part != "query_norm"}


def _latent_source(model: Model, part: str, name: str) -> dict[str, TensorSource]:
    latent = model.latent
    assert latent is not None  # the caller asked
    weight = f"{name}.weight"
    if part == "expand":
        return {f"{part}.weight": _matrix(weight, *latent.expanding(model.heads))}
    size = latent.rank if part == "latent_norm" else latent.query_rank or 0
    return {f"{part}.weight": _vector(weight, size)}


def _expert_sources(model: Model, base: str) -> dict[str, TensorSource]:
    """``router``, ``expert.0.up``, ``expert.0.down``, ..., and those of a shared expert."""
    experts, names = model.experts, EXPERT_NAMES[model.family]
    assert experts is not None  # the layer is a MoE layer
    hidden = model.hidden
    sources = {"router.weight": _matrix(f"{base}{names.router}.weight", experts.count, hidden)}
    if experts.routing.corrected:
        sources["router.correction"] = _vector(
            f"{base}{names.router}.e_score_correction_bias", experts.count
        )
    if experts.routing.biased:
        sources["router.bias"] = _vector(f"{base}{names.router}.bias", experts.count)
    if names.stacked:
        return sources | _stacked_sources(model, experts, f"{base}{names.expert}", names.mlp)
    places = [(f"expert.{e}.", base + names.expert.format(e)) for e in range(experts.count)]
    widths = [experts.ffn] * experts.count
    if experts.shared_ffn:
        places.append(("shared_", base + names.shared))
        widths.append(experts.shared_ffn)
    for (ours, theirs), ffn in zip(places, widths, strict=True):
        gate, up, down = (f"{theirs}{name}.weight" for name in names.mlp)
        sources[f"{ours}up.weight"] = TensorSource((gate, up), (ffn, ffn), (2 * ffn, hidden))
        sources[f"{ours}down.weight"] = _matrix(down, hidden, ffn)
    if experts.shared_gate:
        gate = f"{base}{names.shared_gate}.weight"
        sources["shared_gate.weight"] = _matrix(gate, 1, hidden)
    return sources


def _stacked_sources(
    model: Model, experts: Experts, base: str, mlp: tuple[str, ...]
) -> dict[str, TensorSource]:
    """Experts of which a checkpoint's tensor holds all, with their biases."""
    sources = {}
    for e in range(experts.count):
        for linear, stored in zip(model.expert_linears, mlp, strict=True):
            name, place = f"{base}{stored}", (e, experts.count)
            sources[f"expert.{e}.{linear.name}.weight"] = TensorSource(
                (name,), (linear.n,), (linear.n, linear.k), transposed=True, place=place
            )
            if linear.bias:
                sources[f"expert.{e}.{linear.name}.bias"] = TensorSource(
                    (f"{name}_bias",), (linear.n,), (linear.n,), place=place
                )
    return sources


def embedding_sources(model: Model, prefix: str | None = None) -> dict[str, TensorSource]:
    """Where the token embedding and learned positions come from."""
    names = FAMILY_NAMES[model.family]
    base = names.prefix if prefix is None else prefix
    sources = {"embed.weight": _matrix(f"{base}{names.embed}.weight", model.vocab, model.hidden)}
    if model.position == "learned":
        sources["positions.weight"] = _matrix(
            f"{base}{names.positions}.weight", model.position_rows, model.hidden
        )
    return _changed(model, sources)


def head_sources(model: Model, prefix: str | None = None) -> dict[str, TensorSource]:
    """Where the final norm and the head come from; a tied head is the embedding's tensor."""
    names = FAMILY_NAMES[model.family]
    base = names.prefix if prefix is None else prefix
    head = f"{base}{names.embed}.weight" if model.tied else f"{names.head}.weight"
    sources = {
        **_norm(model, "final_norm", f"{base}{names.final_norm}"),
        "head.weight": _matrix(head, model.vocab, model.hidden),
    }
    return _changed(model, sources)


def linear_modules(model: Model) -> tuple[str, ...]:
    """What the family calls the modules of a dense layer's linears, in the order they run."""
    layer = _layer_names(model)
    return tuple(name for linear in model.linears for name in layer[linear.name])


def find_prefix(model: Model, checkpoint: Checkpoint) -> str:
    """Prefix of the checkpoint's names: a base model saved alone has none (``h.0...`` in GPT-2).

    Raises:
        SpecError: the embedding is there under neither name.
    """
    own = FAMILY_NAMES[model.family].prefix
    bare = embedding_sources(model, "")["embed.weight"].names[0]
    if own + bare not in checkpoint.tensors and bare in checkpoint.tensors:
        return ""
    checkpoint.tensor(own + bare)
    return own


def check_tensors(model: Model, checkpoint: Checkpoint) -> int:
    """Check that every tensor of the model is there, in its shape and not quantised.

    Returns:
        Bytes of all of them as stored, a tied head once; buffers that a checkpoint may also hold
        are not counted.

    Raises:
        SpecError: one is missing, has another shape, or is stored in another dtype than fp32,
            fp16 or bf16.
    """
    prefix = find_prefix(model, checkpoint)
    groups = [embedding_sources(model, prefix), head_sources(model, prefix)]
    groups += [layer_sources(model, layer, prefix) for layer in range(model.layers)]
    total: dict[str, int] = {}
    for source in (source for group in groups for source in group.values()):
        for index, name in enumerate(source.names):
            blocks = source.blocks(index, checkpoint)
            if blocks is not None:
                total.update(_check_blocks(blocks, checkpoint))
                continue
            stored = checkpoint.tensor(name)
            expected = source.stored_shape(index)
            if stored.shape != expected:
                raise SpecError(
                    f"{stored.file}: {name}.shape",
                    got=list(stored.shape),
                    expected=f"{list(expected)}, as config.json implies",
                )
            if stored.dtype not in ("fp32", "fp16", "bf16"):
                raise SpecError(
                    f"{stored.file}: {name}.dtype",
                    got=stored.dtype,
                    expected="F32, F16 or BF16: Foreplan quantises the weights itself",
                )
            total[name] = stored.bytes
    return sum(total.values())


def _check_blocks(blocks: BlockFloats, checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of the tensors of a stack in MXFP4 by name.

    Raises:
        SpecError: one is missing, or has another shape or dtype.
    """
    found = {}
    for name, shape in blocks.shapes.items():
        stored = checkpoint.tensor(name)
        if stored.shape != shape or stored.dtype != "U8" or blocks.k % BLOCK:
            raise SpecError(
                f"{stored.file}: {name}", got=f"{stored.dtype} {list(stored.shape)}",
                expected=f"U8 {list(shape)}, as config.json implies of blocks of {BLOCK}",
            )  # fmt: skip
        found[name] = stored.bytes
    return found


def _changed(model: Model, sources: dict[str, TensorSource]) -> dict[str, TensorSource]:
    return {name: replace(s, change=change_of(model, name)) for name, s in sources.items()}


def _split(model: Model, part: str, parts: int, n: int) -> tuple[int, ...]:
    """Output features of each of the ``parts`` tensors that make up a fused linear."""
    if parts == 1:
        return (n,)
    if part == "qkv":
        kv = model.kv_heads * model.head_dim
        return (model.heads * model.head_dim, kv, kv)
    if part == "latents" and model.latent is not None:
        return (model.latent.cached, n - model.latent.cached)
    return (n // parts,) * parts


def _vector(name: str, size: int) -> TensorSource:
    return TensorSource((name,), (size,), (size,))


def _matrix(name: str, n: int, k: int) -> TensorSource:
    return TensorSource((name,), (n,), (n, k))


def _norm(model: Model, ours: str, name: str) -> dict[str, TensorSource]:
    sources = {f"{ours}.weight": _vector(f"{name}.weight", model.hidden)}
    if model.norm == "layer":
        sources[f"{ours}.bias"] = _vector(f"{name}.bias", model.hidden)
    return sources
