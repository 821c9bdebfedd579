"""A processor and a GPU of round figures."""

from foreplan.datasets.device import Device

CPU = Device(
    name="a processor", chip="c", vendor="v", kind="cpu", memory_bandwidth=4e10,
    launch_overhead_s=1e-6, peak_flops={"fp32/vector": 1e11}, units=1,
)  # fmt: skip
GPU = Device(
    name="a gpu", chip="g", vendor="v", kind="cuda", memory_bandwidth=1e12,
    launch_overhead_s=4e-6, peak_flops={"fp32/vector": 2e13}, units=100,
)  # fmt: skip
