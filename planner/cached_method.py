"""`cached_method`: what a method returns, kept as long as its object and no longer.

`functools.cache` on a method keeps every object it was ever called on, and with a search all its
prices and the predictor behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def cached_method(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Keep a method's results on the object, by arguments.

    A keyword argument counts as another call than the same argument by position. A plain dictionary
    on the object, no cache of the bound method: that would be a cycle, which frees a search's tens
    of megabytes only when the collector next looks at old objects.

    Args:
        method: of a class whose objects have a ``__dict__``; its arguments are hashable.
    """
    name = f"_kept_{method.__name__}"

    @functools.wraps(method)
    def kept(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        results: dict[Any, R]
        try:
            results = self.__dict__[name]
        except KeyError:
            results = self.__dict__[name] = {}
        key = (args, *kwargs.items()) if kwargs else args
        try:
            return results[key]
        except KeyError:
            pass
        results[key] = found = method(self, *args, **kwargs)
        return found

    return kept
