"""The bubble planner: encoders of a multimodal model in the idle time of the backbone's pipeline."""
