"""`readers`: every reader of the project with valid inputs, to be broken by `mutations`."""

from __future__ import annotations

from tests.robustness.device_readers import device_readers
from tests.robustness.measurement_readers import measurement_readers
from tests.robustness.model_readers import model_readers
from tests.robustness.plan_readers import plan_readers
from tests.robustness.reader import Reader
from tests.robustness.spoken import spoken


def readers() -> dict[str, Reader]:
    """Every reader by name."""
    found = [*plan_readers(), *device_readers(), *model_readers(), *measurement_readers()]
    found += [Reader(**of) for of in spoken()]
    return {reader.name: reader for reader in found}
