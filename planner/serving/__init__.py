"""The serving planner: contiguous stages, bits per layer and micro-batches for one model."""

from foreplan.planner.serving.planner import ServingPlanner

__all__ = ["ServingPlanner"]
