"""Fields of a ``config.json``, each read as what it has to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foreplan.errors import SpecError


class UnmodelledError(SpecError):
    """An option that no plan models. The folder may be sound: a pass of it can be captured."""


class ConfigFields:
    """A configuration with one-line errors that name file and field."""

    def __init__(self, where: str, fields: Mapping[str, Any]) -> None:
        self.where = where
        self.fields = fields

    def error(self, field: str, expected: str, fix: str | None = None) -> SpecError:
        got = self.fields.get(field)
        return SpecError(f"{self.where}: {field}", got=got, expected=expected, fix=fix)

    def unmodelled(self, field: str, expected: str) -> UnmodelledError:
        """An error of an option that is not modelled."""
        got = self.fields.get(field)
        return UnmodelledError(f"{self.where}: {field}", got=got, expected=expected)

    def size(self, field: str, default: int | None = None) -> int:
        """A positive whole number; ``default`` stands for a missing or null field."""
        value = self.fields.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, "a whole number of at least 1")
        return value

    def factor(self, field: str, default: float = 1.0) -> float:
        """A positive number; ``default`` stands for a missing field."""
        value = self.fields.get(field, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
            raise self.error(field, "a positive number below 1e9")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.fields.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, "true or false")
        return value

    def layers(self, field: str) -> tuple[int, ...]:
        """A list of layers; a missing or null field is an empty one."""
        value = self.fields.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or any(type(layer) is not int for layer in value):
            raise self.error(field, "a list of layers")
        return tuple(value)

    def choice(self, field: str, default: str, choices: Mapping[str, str]) -> str:
        value = self.fields.get(field, default)
        if not isinstance(value, str) or value not in choices:
            raise self.unmodelled(field, f"one of {', '.join(choices)}")
        return choices[value]
