"""`apply_precision`: two lines make a training script compute as a plan says.

    plan = foreplan.load_plan("plan.json")
    foreplan.apply_precision(model, plan, rank)

Planned modules change their class to a subclass of it that computes by its `Recipe`; parameters,
names and ``state_dict`` stay what they were (fp32 masters, fp32 gradients), so that optimizers,
DDP and checkpoints do not notice, and `remove_precision` undoes it. A planned module computes the
same inside a region of autocast as outside.

Operators that no module owns promote unlike operands: what torch refuses to compute of bf16 and
fp32 is computed in fp32, products and attention at once (`_PROMOTED`), anything else after the
refusal. What is written into a tensor takes that tensor's dtype. What the model returns is fp32,
because losses need it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from foreplan.datasets.kernels.quantise import DTYPES
from foreplan.datasets.kernels.training_linear import linear
from foreplan.datasets.kernels.training_recipe import Recipe, multiple_of, recipe
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.plan import Plan, load_plan
from foreplan.planner.precision.spec import PrecisionDecision
from foreplan.planner.precision.task import fingerprint

_LOW = (torch.bfloat16, torch.float16)


def apply_precision(
    model: nn.Module, plan: Plan | PrecisionDecision | str | Path, rank: int
) -> nn.Module:
    """Make a model compute as a plan says for one rank.

    Args:
        model: with fp32 parameters, on the device it will run on; changed in place. Wrapped by
            ``DistributedDataParallel`` before or afterwards.
        plan: a precision plan, its decision, or the file of a plan.
        rank: whose precisions; ``torch.distributed.get_rank()`` where processes follow the plan's
            order.

    Returns:
        The model, for chaining.

    Raises:
        SpecError: the plan is of another kind or for another model (names the parameters that
            differ), has no such rank, or a module cannot be computed as planned on its device.
    """
    _check_module(model)
    decision = _decision(plan)
    # From a launcher, unseen by a type checker: RANK of the environment is a text.
    if not isinstance(rank, Integral) or not 0 <= rank < len(decision.workers):
        raise SpecError("rank", got=rank, expected=f"0..{len(decision.workers) - 1} of this plan")
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    _check_same_network(inner, decision)
    apply_variants(inner, decision.workers[rank].operators, seed=rank << 40)
    return model


def apply_variants(model: nn.Module, variants: Mapping[str, str], *, seed: int = 0) -> nn.Module:
    """Make named modules compute by variants; everything else as it is.

    Args:
        model: changed in place; what an earlier call changed is undone first.
        variants: text of the variant by the module's path.
        seed: of stochastic rounding.

    Raises:
        SpecError: no such module, or one that cannot be computed so; the model is as it was.
    """
    modules = dict(model.named_modules())
    planned: list[tuple[nn.Module, Recipe]] = []
    for name, text in variants.items():
        if name not in modules:
            raise SpecError(f"plan: operator {name}", got="no such module", expected=_near(modules))
        planned.append((modules[name], _fitting(name, modules[name], recipe(text))))
    remove_precision(model)
    for index, (module, found) in enumerate(planned):
        module.planned = Planned(found, seed + (index << 24))  # type: ignore[assignment]
        module.__class__ = _subclass(type(module), _MIXINS[found.operator])
    model.__class__ = _subclass(type(model), _Root)
    return model


def remove_precision(model: nn.Module) -> nn.Module:
    """Undo `apply_precision`; does nothing to a model that has no plan.

    Args:
        model: changed in place.

    Returns:
        The model, for chaining.

    Raises:
        SpecError: it is no module.
    """
    _check_module(model)
    for module in model.modules():
        module.__class__ = _original(type(module))
        module.__dict__.pop("planned", None)
    return model


def restart_rounding(model: nn.Module) -> None:
    """Let stochastic rounding begin anew, so that a repeated run gives the same bits."""
    for module in model.modules():
        state = module.__dict__.get("planned")
        if isinstance(state, Planned):
            state.calls = 0


class Planned:
    """What a planned module knows beside its parameters.

    Attributes:
        recipe: how it computes.
        seed: of its stochastic rounding.
        calls: how often it ran.
    """

    def __init__(self, found: Recipe, seed: int) -> None:
        self.recipe = found
        self.seed = seed
        self.calls = 0

    def next_seed(self) -> int:
        """A seed for one pass; the backward pass takes this one and the next."""
        self.calls += 1
        # Multiplied by an odd number, so that seeds of nearby calls and modules lie far apart.
        return (self.seed + 2 * self.calls) * 0x2545F491 & 0x7FFFFFFE


# ------------------------------------------------------------------------------------- modules


class _Linear(nn.Module):
    planned: Any

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        with _without_autocast(x), _without_promotion():
            return linear(
                x, module.weight, module.bias, self.planned.recipe, self.planned.next_seed()
            )


class _Conv2d(nn.Module):
    planned: Any

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        dtype = DTYPES[self.planned.recipe.forward]
        with _without_autocast(x), _without_promotion():
            bias = None if module.bias is None else module.bias.to(dtype)
            made: Tensor = module._conv_forward(x.to(dtype), module.weight.to(dtype), bias)
            return made.to(DTYPES[self.planned.recipe.output])


class _Embedding(nn.Module):
    planned: Any

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = super().forward(ids)
        return made.to(DTYPES[self.planned.recipe.output])


class _Other(nn.Module):
    planned: Any

    def forward(self, *inputs: Any, **named: Any) -> Any:
        found: Recipe = self.planned.recipe
        dtype = DTYPES[found.forward]
        inputs, named = tree_map(_cast_to(dtype), (inputs, named))
        kind = _kind_of((inputs, named), self)
        with torch.autocast(kind, dtype=dtype if dtype in _LOW else None, enabled=dtype in _LOW):
            made = super().forward(*inputs, **named)
        return tree_map(_cast_to(DTYPES[found.output]), made)


class _Root(nn.Module):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        # Every call of a function goes through Python then, so only where there is a need.
        with _Promotion() if _hands_on_low(self) else contextlib.nullcontext():
            made = super().forward(*inputs, **named)
        return tree_map(_cast_to(torch.float32), made)


_MIXINS: Mapping[str, type[nn.Module]] = {
    "linear": _Linear,
    "conv2d": _Conv2d,
    "embedding": _Embedding,
    "other": _Other,
}
_TYPES: Mapping[str, type[nn.Module]] = {
    "linear": nn.Linear,
    "conv2d": nn.Conv2d,
    "embedding": nn.Embedding,
    "other": nn.Module,
}


def _make_subclass(cls: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """``cls`` with the mixin's ``forward`` in front, under the name that ``cls`` has."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "planned_from": cls})


#: One class for each pair, so that equal modules have equal types.
_subclass: Any = functools.cache(_make_subclass)


def _original(cls: type[nn.Module]) -> type[nn.Module]:
    while "planned_from" in cls.__dict__:
        cls = cls.__dict__["planned_from"]
    return cls


def _cast_to(dtype: torch.dtype) -> Callable[[Any], Any]:
    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return cast


def _kind_of(inputs: Any, module: nn.Module) -> str:
    found: list[str] = [parameter.device.type for parameter in module.parameters()][:1]
    tree_map(lambda value: found.append(value.device.type) if isinstance(value, Tensor) else None,
             inputs)  # fmt: skip
    return found[0] if found else "cpu"


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def _without_promotion() -> contextlib.AbstractContextManager[Any]:
    """A planned module sees to its own dtypes; a call through `_Promotion` takes microseconds."""
    found: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return found


def _hands_on_low(model: nn.Module) -> bool:
    planned = (module.__dict__.get("planned") for module in model.modules())
    return any(isinstance(p, Planned) and DTYPES[p.recipe.output] in _LOW for p in planned)


# ----------------------------------------------------------------------------------- promotion

#: Functions that are known to refuse operands of unlike float dtypes.
_PROMOTED: Collection[Any] = frozenset(
    {
        torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm,
        torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm,
        torch.einsum, torch.dot, torch.mv, Tensor.mv, F.linear, F.bilinear, torch.conv1d,
        torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
        torch.conv_transpose3d, F.multi_head_attention_forward, F.prelu, F.embedding_bag,
        F.scaled_dot_product_attention, torch.lerp, torch.cdist,
    }
)  # fmt: skip
#: Norms that take a bf16 input beside fp32 parameters on CPU, but are fp32 on a GPU.
_NORMS: Collection[Any] = frozenset({F.layer_norm, F.group_norm, F.rms_norm, F.batch_norm})


class _Promotion(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func in _PROMOTED or (func in _NORMS and args[0].is_cuda):
            dtypes = {t.dtype for t in _floats((*args, *named.values()))}
            if len(dtypes) > 1 and not dtypes.isdisjoint(_LOW):
                widest = functools.reduce(torch.promote_types, dtypes)
                args, named = tree_map(_cast_to(widest), (args, dict(named)))
        try:
            return func(*args, **named)
        except RuntimeError:
            alike = _of_one_dtype(func, args, named)
            if alike is None:  # it was not for the dtypes
                raise
        return func(*alike[0], **alike[1])


def _of_one_dtype(
    func: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Operands in the widest dtype, or in that of the tensor written into; ``None``: alike."""
    dtypes = {t.dtype for t in _floats((*args, *named.values()))}
    if len(dtypes) < 2 or dtypes.isdisjoint(_LOW):
        return None
    name = getattr(func, "__name__", "")
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        into: torch.dtype = args[0].dtype
        rest = tree_map(_cast_to(into), (args[1:], dict(named)))
        return (args[0], *rest[0]), rest[1]
    widest = functools.reduce(torch.promote_types, dtypes)
    alike: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(_cast_to(widest), (args, dict(named)))
    return alike


def _floats(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _floats(value)


# -------------------------------------------------------------------------------------- checks


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise SpecError("model", got=type(model).__name__, expected="a torch.nn.Module")


def _decision(plan: Plan | PrecisionDecision | str | Path) -> PrecisionDecision:
    if isinstance(plan, PrecisionDecision):
        return plan
    if not isinstance(plan, Plan):
        plan = load_plan(plan)
    if plan.kind != "precision":
        raise SpecError("plan.kind", got=plan.kind, expected="precision")
    return validate(PrecisionDecision, plan.decision, "plan: decision")


def _check_same_network(model: nn.Module, decision: PrecisionDecision) -> None:
    parameters = dict(model.named_parameters())
    planned = {name for bucket in decision.buckets for name in bucket}
    trained = {name for name, value in parameters.items() if value.requires_grad}
    if planned != trained:
        lacking, more = sorted(planned - trained), sorted(trained - planned)
        got = [f"no parameter {lacking[0]}"] if lacking else []
        got += [f"{more[0]}, which the plan does not know"] if more else []
        raise SpecError(
            "model", got=" and ".join(got),
            expected=f"the model that the plan was made for ({len(planned)} parameters)",
        )  # fmt: skip
    if fingerprint(parameters.items()) != decision.network:
        largest = max(parameters, key=lambda name: parameters[name].numel())
        raise SpecError(
            "model",
            got=f"parameters of other shapes (here {largest} is {list(parameters[largest].shape)})",
            expected="the model that the plan was made for",
        )
    for name, value in parameters.items():
        if value.dtype is not torch.float32 and name in planned:
            raise SpecError(
                f"model: {name}.dtype", got=str(value.dtype), expected="torch.float32",
                fix="a plan keeps fp32 master weights: do not convert the model",
            )  # fmt: skip


def fits(module: nn.Module, found: Recipe) -> bool:
    """Whether a module can be computed by a recipe, on whichever device."""
    return _misfit(module, found) is None


def _misfit(module: nn.Module, found: Recipe) -> tuple[str, str] | None:
    """(what it is, what it would have to be) of a module that a recipe is not for."""
    original = _original(type(module))
    wanted = _TYPES[found.operator]
    own_forward = found.operator != "other" and original.forward is not wanted.forward
    if not issubclass(original, wanted) or own_forward:
        return f"{original.__name__} as {found.text}", f"a plain {wanted.__name__}"
    multiple = multiple_of(found)
    if isinstance(module, nn.Linear):
        features = module.in_features, module.out_features
        if any(size % multiple for size in features):
            return f"{found.text} with {features[0]} x {features[1]} features", (
                f"multiples of {multiple}"
            )
    return None


def _fitting(name: str, module: nn.Module, found: Recipe) -> Recipe:
    """The recipe, if a module can be computed by it where it is."""
    wrong = _misfit(module, found)
    kind = _kind_of((), module)
    if wrong is None and kind not in (*found.kinds, "meta"):
        wrong = f"{found.text} on {kind}", " or ".join(found.kinds)
    if wrong is not None:
        raise SpecError(f"plan: operator {name}", got=wrong[0], expected=wrong[1])
    return found


def _near(modules: Mapping[str, nn.Module]) -> str:
    names = [name for name in modules if name]
    return f"one of its {len(names)} modules, as {names[0]}" if names else "a model with modules"
