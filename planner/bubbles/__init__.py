"""The bubble planner: encoders of a multimodal model in the idle time of its pipeline."""

from foreplan.planner.bubbles.planner import BubblesPlanner

__all__ = ["BubblesPlanner"]
