"""`GivenModule`: a module of a user's own, with the inputs that its pass is priced for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foreplan.datasets.graphs.input_words import input_words
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: Arguments and keyword arguments, as ``torch.export.export(module, args, kwargs)`` takes them.
_ARGUMENTS_AND_KEYWORDS = 2


@dataclass(frozen=True, slots=True)
class GivenModule:
    """See the module.

    Attributes:
        name: what to call it.
        module: the module; its weights are not looked at.
        inputs: arguments of its ``forward``, positional or by name.
    """

    name: str
    module: torch.nn.Module
    inputs: Sequence[Any] | Mapping[str, Any]

    @classmethod
    def of(cls, name: str, module: torch.nn.Module, inputs: Any) -> GivenModule:
        """A module with inputs in any of the forms that people write.

        Args:
            name: what to call it.
            module: the module.
            inputs: a tensor, a tuple or list of arguments, a mapping by name, or of a tuple and a
                mapping both, as ``torch.export`` takes them.

        Raises:
            SpecError: arguments that ``forward`` does not take; something else; a module whose
                layers wait for a first pass to have sizes.
        """
        import torch
        from torch.nn.parameter import is_lazy

        if any(is_lazy(parameter) for parameter in module.parameters()):
            raise SpecError(
                name, got="lazy layers without sizes", expected="a module that has been run once",
                fix="call it on the example inputs where it is made",
            )  # fmt: skip
        given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        if not isinstance(given, (tuple, list, Mapping)):
            raise SpecError(
                f"{name}: example inputs", got=type(inputs).__name__,
                expected="a tensor, a tuple of arguments, or a mapping by name",
            )  # fmt: skip
        return cls(name, module, _named(name, module, given))

    @property
    def dtype(self) -> str:
        """Of its first parameter of numbers with a fraction, ``fp32`` where it has none."""
        import torch

        words = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
        floats = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return words.get(next(floats, torch.float32), "fp32")

    @property
    def weight_bytes(self) -> int:
        """Bytes of its parameters."""
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    @property
    def shape(self) -> str:
        """Dtypes and extents of its inputs, in words."""
        return f"inputs {input_words(self.inputs)}"

    def converted(self, dtype: str) -> GivenModule:
        """The module, changed in place, and its inputs in another dtype.

        Args:
            dtype: ``fp32``, ``fp16`` or ``bf16``.

        Raises:
            SpecError: another dtype.
        """
        import torch
        from torch.utils import _pytree as pytree

        known = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        if dtype not in known:
            raise SpecError("dtype", got=dtype, expected=f"one of {', '.join(known)}")

        def put(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(known[dtype]) if tensor.is_floating_point() else tensor

        inputs = pytree.tree_map_only(torch.Tensor, put, self.inputs)
        return GivenModule(self.name, self.module.to(known[dtype]), inputs)


def _named(
    name: str, module: torch.nn.Module, given: Sequence[Any] | Mapping[str, Any]
) -> Sequence[Any] | Mapping[str, Any]:
    """Arguments and keyword arguments by name, or in a row where some have no name.

    What is one or the other stays as it is.
    """
    if not isinstance(given, tuple) or len(given) != _ARGUMENTS_AND_KEYWORDS:
        return given
    positional, keywords = given
    if not isinstance(positional, tuple) or not isinstance(keywords, Mapping):
        return given
    if not keywords:
        return positional
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*positional, **keywords)
    except TypeError as error:
        raise SpecError(
            f"{name}: example inputs", got=str(error), expected=f"arguments of forward{signature}"
        ) from error
    named = dict[str, Any]()
    for word, value in bound.arguments.items():
        kind = signature.parameters[word].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            named[word] = value
        elif bound.kwargs:
            raise SpecError(
                f"{name}: example inputs", got=f"{word} beside arguments by name",
                expected="arguments that all have names, or none",
                fix=f"wrap it: a forward that names what it gives forward{signature}",
            )  # fmt: skip
        else:
            return bound.args
    return named
