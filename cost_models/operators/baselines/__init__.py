"""Baselines of the operator predictor, under its contract: ``fit(table)``, ``predict(table)``.

Each fits on a table's ``latency_s`` and predicts seconds, NaN where it cannot.
"""

from __future__ import annotations

from typing import Any

from foreplan.errors import SpecError

__all__ = ["BASELINES", "baseline"]

#: Names that `baseline` knows, the untrained first.
BASELINES = ("roofline", "nearest-device", "xgboost", "tile-wave")


def baseline(name: str, *, seed: int = 0) -> Any:
    """Make an unfitted baseline.

    Args:
        name: one of `BASELINES`.
        seed: of its random choices, if it makes any.

    Raises:
        SpecError: no such baseline.
    """
    if name == "roofline":
        from foreplan.cost_models.operators.baselines.roofline import RooflineModel

        return RooflineModel()
    if name == "nearest-device":
        from foreplan.cost_models.operators.baselines.nearest_device import NearestDeviceModel

        return NearestDeviceModel()
    if name == "xgboost":
        from foreplan.cost_models.operators.baselines.boosted import BoostedModel

        return BoostedModel(seed=seed)
    if name == "tile-wave":
        from foreplan.cost_models.operators.baselines.tile_wave import TileWaveModel

        return TileWaveModel(seed=seed)
    raise SpecError("baseline", got=name, expected="one of " + ", ".join(BASELINES))
