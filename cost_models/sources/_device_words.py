"""Finding a device's data under the words that a plan calls the device by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def find(table: Mapping[str, Value], device: str) -> Value | None:
    """Look a device up by rank label, by host and name, or by name alone.

    Args:
        table: by any of the three, as ``hosta/cuda:0/sms=32`` or ``cuda:0/sms=32``.
        device: a rank label (``host/device#k``), a shorter form of it, or a device name.

    Returns:
        The entry of the most exact word, ``None`` if there is none.
    """
    unnumbered = device.rpartition("#")[0] or device
    for word in (device, unnumbered, unnumbered.partition("/")[2]):
        if word in table:
            return table[word]
    return None
