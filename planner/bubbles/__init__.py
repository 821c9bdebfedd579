"""The bubble planner: encoders of a multimodal model in the idle time of its pipeline."""
