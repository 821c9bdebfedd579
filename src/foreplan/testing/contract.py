"""`ContractError`: a promise that an implementation does not keep."""

from __future__ import annotations


class ContractError(AssertionError):
    """An implementation breaks a promise of its base class.

    Args:
        who: class or method, as ``MyPlanner.decide``.
        promise: what should hold.
        found: what was found instead.
    """

    def __init__(self, who: str, promise: str, found: object) -> None:
        self.who, self.promise, self.found = who, promise, found
        shown = repr(found)
        if len(shown) > 300:
            shown = shown[:297] + "..."
        super().__init__(f"{who} {promise}; found {shown}")


def require(held: bool, who: str, promise: str, found: object) -> None:
    """Raise unless a promise holds.

    Raises:
        ContractError: it does not.
    """
    if not held:
        raise ContractError(who, promise, found)
