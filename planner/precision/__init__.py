"""The precision planner: precision of each operator of a training step, worker by worker."""
