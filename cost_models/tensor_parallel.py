"""Tensor parallelism inside a stage: what one of ``k`` equal devices holds and what they exchange.

Heads, MLP features and vocabulary are split as Megatron-LM does (Shoeybi et al., 2019, section
3): ``qkv``, ``up``, the embedding and the head by rows, ``out`` and ``down`` by columns, so that a
layer needs two all-reduces of the residual stream. Of experts, each is split like a plain MLP. With
fewer key/value heads than devices a head lies on ``k / kv_heads`` of them. A head's sink lies with
it. Norms, routers and the tables of positions lie on every device.

A shard is described as a `Model` with fewer heads, features and words: whatever counts programs or
bytes of a model does so for a shard. The last device has up to ``k - 1`` words less than it says.
"""

from __future__ import annotations

from collections.abc import Iterator

from foreplan.cost_models.costs import Collective
from foreplan.cost_models.layout import Box, Layout, Tensor
from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError

#: A device's best word and its logit, both in fp64, which holds every bf16 and every index.
CHOICE_BYTES = 16


def degrees(model: Model, most: int) -> tuple[int, ...]:
    """Numbers of devices, up to ``most``, over which the model's layers can be split evenly."""
    return tuple(k for k in range(1, most + 1) if _hindrance(model, k) is None)


def shard_model(model: Model, degree: int) -> Model:
    """What one of ``degree`` devices holds, as a model.

    Raises:
        SpecError: heads, key/value heads, MLP features or words cannot be split so.
    """
    if degree == 1:
        return model
    hindrance = _hindrance(model, degree)
    if hindrance is not None:
        raise SpecError(
            "tensor parallelism", got=f"{degree} devices a stage",
            expected=f"a degree that {model.name} can be split by: {hindrance}",
        )  # fmt: skip
    changes: dict[str, object] = {
        "heads": model.heads // degree,
        "kv_heads": max(model.kv_heads // degree, 1),
        "ffn": model.ffn // degree,
        "vocab": -(-model.vocab // degree),
    }
    if model.experts is not None:  # every device computes its share of every expert
        sizes = {"ffn": model.experts.ffn, "shared_ffn": model.experts.shared_ffn}
        changes["experts"] = model.experts.model_copy(
            update={name: size // degree for name, size in sizes.items()}
        )
    return model.model_copy(update=changes)


def _hindrance(model: Model, degree: int) -> str | None:
    """Why the degree is impossible, in words."""
    if degree < 1 or model.heads % degree:
        return f"it has {model.heads} heads"
    if model.kv_heads % degree and degree % model.kv_heads:
        return f"it has {model.kv_heads} key/value heads"
    experts = model.experts
    for ffn in (model.ffn, *(() if experts is None else (experts.ffn, experts.shared_ffn))):
        if ffn % degree:
            return f"its MLP has {ffn} features"
    if degree > 1 and model.latent is not None:
        return "all of its heads attend to one latent, which is not split"
    if degree > 1 and model.qk_norm_whole:
        return "one norm takes all of its heads together"
    if model.vocab < degree * degree:
        return f"it has {model.vocab} words"
    return None


def stage_collectives(
    model: Model, group: tuple[int, ...], layers: int, requests: int, tokens: int,
    *, first: bool, last: bool,
) -> tuple[tuple[Collective, int], ...]:  # fmt: skip
    """What the devices of a stage exchange in one pass, and how often.

    Args:
        model: the whole model.
        group: ranks of the stage.
        layers: of the stage.
        requests: of the micro-batch.
        tokens: of each that go through.
        first: the stage embeds: each device looks up its words, the sum is everyone's.
        last: the stage has the head: each device picks the best of its words.

    Returns:
        Nothing for a group of one.
    """
    if len(group) == 1:
        return ()
    hidden = requests * tokens * model.hidden * 2
    found = []
    if layers or first:
        work = Collective("all_reduce", hidden, group, "bf16", waited=True)
        found.append((work, 2 * layers + int(first)))
    if last:
        size = len(group) * requests * CHOICE_BYTES
        found.append((Collective("all_gather", size, group, "fp64", waited=True), 1))
    return tuple(found)


# ------------------------------------------------------------------------------- which box is whose


def shard_layout(model: Model, degree: int) -> Layout:
    """Boxes of one decoder layer's, the embedding's and the head's tensors by device.

    Tensors are named as in `foreplan.datasets.models.weights`; a bias that is added to a sum lies
    on the first device. Of a fused tensor a device holds one box for each part (q, k, v; gate, up).

    Raises:
        SpecError: as `shard_model`.
    """
    tensors = {t.name: t for t in _tensors(model)}
    boxes: list[dict[str, tuple[Box, ...]]] = [{} for _ in range(degree)]
    for lane, held in enumerate(boxes):
        for name, tensor in tensors.items():
            cut = shard_boxes(model, degree, lane, name, tensor.shape)
            if cut:
                held[name] = cut
    return Layout(tensors, tuple(boxes))


def shard_boxes(
    model: Model, degree: int, lane: int, name: str, shape: tuple[int, ...]
) -> tuple[Box, ...]:
    """Boxes of one tensor that a device holds and joins by rows, ascending.

    Args:
        model: the whole model.
        degree: devices that share it.
        lane: which of them.
        name: of the tensor, as in `foreplan.datasets.models.weights`, without its layer.
        shape: of the whole tensor.

    Raises:
        SpecError: as `shard_model`.
    """
    shard = shard_model(model, degree)
    path, _, role = name.rpartition(".")
    part = path.rpartition(".")[2].removeprefix("shared_")
    rest = tuple((0, size) for size in shape[1:])
    if part in ("qkv", "sinks", "up", "embed", "head"):
        rows = _rows(model, shard, part, lane, shape[0])
        return tuple(Box((span, *rest)) for span in rows)
    if part in ("out", "down") and role == "weight":
        wide = shape[1] // degree
        return (Box(((0, shape[0]), (lane * wide, (lane + 1) * wide))),)
    return () if part in ("out", "down") and lane else (Box.whole(shape),)


def _tensors(model: Model) -> Iterator[Tensor]:
    for linear in model.linears:
        yield Tensor(f"{linear.name}.weight", (linear.n, linear.k))
        if linear.bias:
            yield Tensor(f"{linear.name}.bias", (linear.n,))
    before = ("norm1", "norm2") if model.norms_before else ()
    behind = ("attended_norm", "fed_norm") if model.norms_behind else ()
    for name in (*before, *behind, "final_norm"):
        yield Tensor(f"{name}.weight", (model.hidden,))
        if model.norm == "layer":
            yield Tensor(f"{name}.bias", (model.hidden,))
    if model.qk_norm:
        yield Tensor("q_norm.weight", (model.head_dim,))
        yield Tensor("k_norm.weight", (model.head_dim,))
    if model.sinks:
        yield Tensor("sinks.weight", (model.heads,))
    yield Tensor("embed.weight", (model.vocab, model.hidden))
    if model.position == "learned":
        yield Tensor("positions.weight", (model.position_rows, model.hidden))
    yield Tensor("head.weight", (model.vocab, model.hidden))


def _rows(model: Model, shard: Model, part: str, lane: int, rows: int) -> Iterator[tuple[int, int]]:
    """Rows of a fused tensor that are a device's, ascending."""
    degree = model.heads // shard.heads
    if part == "qkv":
        wide = shard.heads * model.head_dim
        yield lane * wide, (lane + 1) * wide
        # Devices that share a head take the one that their queries attend to.
        narrow = shard.kv_heads * model.head_dim
        at = lane * model.kv_heads // degree * model.head_dim
        for begin in (
            model.heads * model.head_dim,
            (model.heads + model.kv_heads) * model.head_dim,
        ):
            yield begin + at, begin + at + narrow
    elif part == "sinks":
        yield lane * shard.heads, (lane + 1) * shard.heads
    elif part == "up":
        ffn = rows // 2 if model.gated else rows
        wide = ffn // degree
        for begin in range(0, rows, ffn):
            yield begin + lane * wide, begin + (lane + 1) * wide
    else:
        yield lane * shard.vocab, min((lane + 1) * shard.vocab, model.vocab)
