"""Sizes of a bubble workload's towers read from `torch.nn` modules, whatever they are called.

A transformer is found by its structure: the container (`ModuleList`, `Sequential`) with two or more
blocks of one class and equal matrices, in which a submodule knows its number of heads. Matrices
that every block multiplies with say the rest:

- the width ``h`` is a side of each of them;
- of attention with ``a`` heads, ``g`` key and value heads and ``d`` features of a head the other
  sides are ``a d, g d, g d, a d`` (queries, keys, values, output), or sums where they are one;
- of the MLP they are ``f, f``, with a gate ``f, f, f`` or ``2 f, f``.

Weights are not looked at, so that modules on the ``meta`` device do. An encoder none of whose
parameters asks for a gradient is frozen; of one that trains in part all is priced as trained.
Anything else (convolutions in stages, blocks that differ, cross-attention, experts) is refused. A
real run builds its own layers of these sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from foreplan.errors import SpecError

if TYPE_CHECKING:
    from torch import nn

_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads", "nhead")
_SHARED = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "dim_head")
#: Share of a block's matrices that may be something else: tables of relative positions, say.
_REST = 0.01
#: Share of the largest stack from which a second one makes it unclear which is meant.
_SECOND = 0.1

Sides = list[tuple[int, int]]


def is_module(value: object) -> bool:
    """Whether a value is a `torch.nn.Module`; does not load torch."""
    return any(
        kind.__name__ == "Module" and kind.__module__ == "torch.nn.modules.module"
        for kind in type(value).__mro__
    )


def with_sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a workload with sizes in place of modules.

    Args:
        fields: of a `BubblesWorkload`; ``backbone`` may be a module, and each encoder may have a
            ``module`` instead of ``dims`` and a module as its ``projector``. Sizes that an encoder
            states besides count, ``frozen`` too.

    Raises:
        SpecError: a backbone of which nothing trains; a frozen encoder with a projector that
            trains, unless the workload says ``frozen``; a module that is no stack of equal
            transformer blocks, or a projector that does not go from its encoder's width in one or
            two matrices, to the backbone's where the workload says that.
    """
    made = dict(fields)
    if is_module(made.get("backbone")):
        made["backbone"] = backbone_sizes(made["backbone"], "backbone")
    stated, backbone = made.get("encoders"), made.get("backbone")
    target = backbone.get("hidden") if isinstance(backbone, Mapping) else None
    if isinstance(stated, list | tuple):
        made["encoders"] = [
            _encoder(dict(e), f"encoders[{k}]", target) if isinstance(e, Mapping) else e
            for k, e in enumerate(stated)
        ]
    return made


def backbone_sizes(module: nn.Module, where: str) -> dict[str, Any]:
    """Fields of `TransformerDims` of a language model, ``vocab`` included."""
    from torch import nn

    path, sizes = _transformer(module, where)
    if not _trains(module):
        raise SpecError(
            where, got=f"{type(module).__name__} with frozen parameters alone",
            expected="a backbone that trains", fix="its sizes (dims) are planned as if it did",
        )  # fmt: skip
    rows = [
        m.num_embeddings for m in _outside(module, path)
        if isinstance(m, nn.Embedding) and m.embedding_dim == sizes["hidden"]
    ]  # fmt: skip
    if not rows:
        raise _refused(where, module, f"an nn.Embedding of width {sizes['hidden']} for its tokens")
    return sizes | {"vocab": max(rows)}


def _encoder(fields: dict[str, Any], where: str, target: object) -> dict[str, Any]:
    """Fields of an `Encoder` without modules; ``target`` is the backbone's width, where known."""
    module, projector = fields.pop("module", None), fields.get("projector")
    width = None
    if module is not None:
        if not is_module(module):
            raise SpecError(f"{where}.module", got=type(module).__name__,
                            expected="a torch.nn.Module")  # fmt: skip
        path, sizes = _transformer(module, f"{where}.module")
        stated = fields.get("dims") or {}
        fields["dims"] = sizes | dict(stated)
        if (patch := _patch_features(module, path, sizes["hidden"])) is not None:
            fields.setdefault("patch_features", patch)
        width = fields["dims"]["hidden"]
        if not _trains(module) and "frozen" not in fields:
            if projector is not None and is_module(projector) and _trains(projector):
                raise SpecError(
                    where, got="a frozen module and a projector that trains",
                    expected="frozen: true, which leaves the projector's backward pass out, or "
                    "frozen: false, which prices the module's too",
                )  # fmt: skip
            fields["frozen"] = True
    if projector is not None and is_module(projector):
        dims = fields.get("dims")
        width = width or (dims.get("hidden") if isinstance(dims, Mapping) else None)
        if width is None:
            raise SpecError(f"{where}.projector", got="a module beside no sizes of its encoder",
                            expected="module or dims of the encoder")  # fmt: skip
        fields |= _projector(projector, width, target, fields, f"{where}.projector")
    return fields


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _projector(
    module: nn.Module, width: int, target: object, fields: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Kind and pooling of a projector from ``width`` times the positions that it takes together."""
    from torch import nn

    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    shapes = [(m.in_features, m.out_features) for m in linears]
    chained = all(a[1] == b[0] for a, b in itertools.pairwise(shapes))
    if len(shapes) not in (1, 2) or not chained or shapes[0][0] % width:
        shown = ", ".join(f"{a} -> {b}" for a, b in shapes) or "no nn.Linear"
        raise SpecError(
            where, got=shown, expected=f"one or two nn.Linear from a multiple of {width} features"
        )  # fmt: skip
    if isinstance(target, int) and shapes[-1][1] != target:
        raise SpecError(
            where, got=f"{shapes[-1][1]} features", expected=f"the {target} of the backbone"
        )
    taken, between = shapes[0]
    found: dict[str, Any] = {"projector": "linear"}
    if len(shapes) == 2:
        if between not in (taken, shapes[1][1]):
            raise SpecError(
                where, got=f"{taken} -> {between} -> {shapes[1][1]}",
                expected="a width between that of its input or of its output",
            )  # fmt: skip
        found["projector"] = "mlp" if between == shapes[1][1] else "merger"
    merged, tokens = taken // width, fields.get("tokens")
    if merged > 1 and isinstance(tokens, int):
        positions = tokens * fields.get("images", 1)
        found |= {"pool": "concatenate"}
        found |= {"projected_tokens": fields.get("projected_tokens", positions // merged)}
    return found


# ----------------------------------------------------------------------------------------- stacks


def _transformer(module: nn.Module, where: str) -> tuple[str, dict[str, Any]]:
    """Path of a module's stack of blocks, and fields of `TransformerDims` without ``vocab``."""
    every = list(_stacks(module))
    inner = [path for path, blocks, _ in every if _block(blocks[0]) is not None]
    # Several towers in one container are no blocks.
    stacks = sorted(
        (found for found in every if not any(_holds(found[0], path) for path in inner)),
        key=lambda found: -found[2],
    )
    if not stacks:
        raise _refused(
            where, module, "two or more equal transformer blocks in one container, with a "
            "submodule that has num_heads",
        )  # fmt: skip
    (path, blocks, size), rest = stacks[0], stacks[1:]
    if rest and rest[0][2] > _SECOND * size:
        raise _refused(
            where, module, f"one stack, not {path} and {rest[0][0]} (give the one meant)"
        )
    shapes = [_sides(block) for block in blocks]
    unlike = next((k for k, found in enumerate(shapes) if found != shapes[0]), None)
    if unlike is not None:
        dot = f"{path}." if path else ""
        raise _refused(where, module, f"equal blocks ({dot}0 and {dot}{unlike} differ)")
    sizes = _block(blocks[0])
    if sizes is None:
        raise _refused(
            where, module,
            f"blocks of one attention and one MLP of two or three matrices in {path or 'it'}",
        )  # fmt: skip
    return path, {"layers": len(blocks), **sizes}


def _stacks(module: nn.Module) -> Iterator[tuple[str, list[nn.Module], int]]:
    """Containers of blocks with heads: path, blocks, elements of their matrices."""
    for path, container in module.named_modules():
        blocks = list(container.children())
        kinds = {type(block) for block in blocks}
        if len(blocks) < 2 or len(kinds) > 1 or type(container) in kinds:
            continue
        if not any(_knows_heads(m) for m in blocks[0].modules()) or _knows_heads(container):
            continue
        size = sum(a * b for block in blocks for a, b in _sides(block))
        yield path, blocks, size


def _holds(outer: str, inner: str) -> bool:
    """Whether one path leads to something inside another's module."""
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _knows_heads(module: nn.Module) -> bool:
    return _number(module, (*_HEADS, *_HEAD_DIM), deep=False) is not None


def _sides(module: nn.Module) -> Sides:
    """Shapes of the matrices, those of experts (three sides) as they are counted: none fits."""
    return [tuple(p.shape) for p in module.parameters() if p.dim() == 2]  # type: ignore[misc]


def _block(block: nn.Module) -> dict[str, Any] | None:
    """Sizes of a block, ``None`` if it is no attention and MLP."""
    if any(p.dim() > 2 for p in block.parameters()):
        return None
    matrices = [(name, p.shape[0], p.shape[1]) for name, p in block.named_parameters()
                if p.dim() == 2]  # fmt: skip
    whole = sum(a * b for _, a, b in matrices)
    for hidden in _widths(matrices, whole):
        others = {
            name: b if a == hidden else a for name, a, b in matrices if hidden in (a, b)
        }  # fmt: skip
        for path, holder in block.named_modules():
            if path and _knows_heads(holder) and (found := _split(block, path, hidden, others)):
                return found
    return None


def _widths(matrices: list[tuple[str, int, int]], whole: int) -> list[int]:
    """Sides that nearly all matrices share, the most common first."""
    sides = {side for _, a, b in matrices for side in (a, b)}
    covered = {s: sum(a * b for _, a, b in matrices if s in (a, b)) for s in sides}
    counts = {s: sum((a == s) + (b == s) for _, a, b in matrices) for s in sides}
    fitting = [s for s in sides if covered[s] >= (1.0 - _REST) * whole]
    return sorted(fitting, key=lambda s: -counts[s])


def _split(
    block: nn.Module, path: str, hidden: int, others: Mapping[str, int]
) -> dict[str, Any] | None:
    """Sizes if the submodule at ``path``, or one around it, is the attention."""
    holder = block.get_submodule(path)
    heads = _number(holder, _HEADS)
    head_dim = _number(holder, _HEAD_DIM)
    if heads is None or (head_dim is None and hidden % heads):
        return None
    head_dim, words = head_dim or hidden // heads, path.split(".")
    shared = _number(holder, _SHARED)
    for kv_heads in [shared] if shared else [k for k in range(heads, 0, -1) if heads % k == 0]:
        for end in range(len(words), 0, -1):
            prefix = ".".join(words[:end]) + "."
            attention = [side for name, side in others.items() if name.startswith(prefix)]
            rest = [side for name, side in others.items() if not name.startswith(prefix)]
            ffn = _ffn(rest)
            if ffn is not None and _attends(attention, heads * head_dim, kv_heads * head_dim):
                return {
                    "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
                    "ffn": ffn[0], "gated": ffn[1],
                }  # fmt: skip
    return None


def _attends(sides: list[int], inner: int, keys: int) -> bool:
    """Whether matrices of these other sides are queries, keys, values and output."""
    return sorted(sides) in (
        sorted((inner, keys, keys, inner)), sorted((inner, 2 * keys, inner)),
        sorted((inner + 2 * keys, inner)),
    )  # fmt: skip


def _ffn(sides: list[int]) -> tuple[int, bool] | None:
    """Features inside an MLP of matrices with these other sides, and whether it has a gate."""
    if len(sides) in (2, 3) and len(set(sides)) == 1:
        return sides[0], len(sides) == 3
    if len(sides) == 2 and max(sides) == 2 * min(sides):
        return min(sides), True
    return None


# ------------------------------------------------------------------------------------- in front


def _patch_features(module: nn.Module, path: str, hidden: int) -> int | None:
    """Features that the first matrix or convolution to the encoder's width takes."""
    from torch import nn

    for name, found in module.named_modules():
        if name == path and path:
            return None  # what is registered behind the stack pools or classifies
        if not path or name.startswith(f"{path}."):
            continue
        weight = getattr(found, "weight", None)
        if weight is None or isinstance(found, nn.Embedding) or weight.dim() < 2:
            continue
        if weight.shape[0] == hidden:
            return int(math.prod(weight.shape[1:]))
    return None


def _outside(module: nn.Module, path: str) -> Iterator[nn.Module]:
    """Modules that are neither the stack nor in it."""
    for name, found in module.named_modules():
        if path and name != path and not name.startswith(f"{path}."):
            yield found


def _number(module: nn.Module, names: tuple[str, ...], *, deep: bool = True) -> int | None:
    """A whole number that a module, or the configuration that it keeps, has under one of names."""
    for place in (module, *([getattr(module, "config", None)] if deep else [])):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _refused(where: str, module: nn.Module, expected: str) -> SpecError:
    return SpecError(
        where, got=type(module).__name__, expected=expected,
        fix="state its sizes instead (dims: layers, hidden, heads, ffn)",
    )  # fmt: skip
