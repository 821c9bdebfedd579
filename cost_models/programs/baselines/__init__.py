"""Baselines for scheduled programs, under the contract of `ProgramPredictor`, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foreplan.cost_models.programs.baselines.cdmpp_released import (
    CdmppReleased,
    fit_cdmpp_together,
)
from foreplan.cost_models.programs.baselines.leaf_mlp import LeafMlp
from foreplan.cost_models.programs.baselines.roofline_programs import RooflinePrograms
from foreplan.cost_models.programs.baselines.store_features import StoreFeatureEncoder
from foreplan.cost_models.programs.baselines.tree_lstm import TreeLstm
from foreplan.cost_models.programs.baselines.xgboost_programs import XGBoostPrograms

BASELINES: Mapping[str, Any] = MappingProxyType(
    {
        "cdmpp": CdmppReleased,
        "mlp": LeafMlp,
        "roofline": RooflinePrograms,
        "tree_lstm": TreeLstm,
        "xgboost": XGBoostPrograms,
    }
)

__all__ = [
    "BASELINES",
    "CdmppReleased",
    "LeafMlp",
    "RooflinePrograms",
    "StoreFeatureEncoder",
    "TreeLstm",
    "XGBoostPrograms",
    "fit_cdmpp_together",
]
