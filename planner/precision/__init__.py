"""The precision planner: precision of each operator of a training step, worker by worker."""

from foreplan.planner.precision.networks import register_network
from foreplan.planner.precision.planner import PrecisionPlanner

__all__ = ["PrecisionPlanner", "register_network"]
