"""Installed: what can be named of one kind (planners, exporters, networks), ours and packages'.

A package registers its own under the kind's entry point group; the name is the word that a user
gives. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from foreplan.datasets.specs import nearest
from foreplan.errors import SpecError


@dataclass(frozen=True, slots=True)
class Installed:
    """The implementations of one kind.

    Attributes:
        group: entry point group that packages register under.
        ours: ``module:name`` by word, in the order in which they are listed.
        expected: what an entry point has to give, in words.
    """

    group: str
    ours: Mapping[str, str]
    expected: str

    def names(self, more: Iterable[str] = ()) -> tuple[str, ...]:
        """Every word, ours first; ``more`` are known for another reason."""
        others = {*more, *(point.name for point in self._points())} - set(self.ours)
        return (*self.ours, *sorted(others))

    def load(self, word: str, where: str, more: Iterable[str] = ()) -> object:
        """What a word names.

        Args:
            word: as a user gave it.
            where: the field or option that it stands in, for the error.
            more: further words to list there.

        Raises:
            SpecError: no such word, or its package does not provide what it registers.
        """
        if not isinstance(word, str):  # from a notebook, unseen by a type checker
            raise SpecError(where, got=word, expected=f"one of {', '.join(self.names(more))}")
        if word in self.ours:
            module, _, name = self.ours[word].partition(":")
            return getattr(importlib.import_module(module), name)
        point = next((p for p in self._points() if p.name == word), None)
        if point is None:
            known = self.names(more)
            guess = nearest(word, known)
            raise SpecError(
                where, got=word, expected=f"one of {', '.join(known)}",
                fix=f"did you mean {guess}?" if guess
                else f"install a package that registers it under {self.group!r}",
            )  # fmt: skip
        try:
            return point.load()
        except Exception as error:  # a stranger's package may fail in any way
            where = f"entry point {point.value}"
            raise SpecError(where, got=error, expected=self.expected) from error

    def _points(self) -> tuple[EntryPoint, ...]:
        return tuple(entry_points(group=self.group))
