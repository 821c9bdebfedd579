"""The kernels that profiles measure and the runtime executes, by operator and variant."""
