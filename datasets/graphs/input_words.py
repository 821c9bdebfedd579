"""`input_words`: inputs of a module in a line, as ``(x=float32[1, 3, 224, 224])``."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any


def input_words(inputs: Sequence[Any] | Mapping[str, Any]) -> str:
    """Shapes and dtypes of inputs."""
    one = _Brief().repr
    if isinstance(inputs, Mapping):
        return f"({', '.join(f'{key}={one(value)}' for key, value in inputs.items())})"
    return f"({', '.join(map(one, inputs))})"


class _Brief(reprlib.Repr):
    """Writes tensors as their dtype and shape, in tuples, lists and mappings too, the rest cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = 60

    def repr1(self, x: Any, level: int) -> str:
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if isinstance(x, Mapping):  # of any class, as below: `reprlib` goes by the name alone
            return self.repr_dict(dict(x), level)
        if isinstance(x, tuple):
            return self.repr_tuple(x, level)
        return self.repr_list(x, level) if isinstance(x, list) else super().repr1(x, level)
