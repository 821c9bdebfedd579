"""The runtime: executes a plan's schedule with real kernels and compares it with the prediction."""
