"""RooflineSource: prices from a device's figures alone, for devices that nobody measured here.

``time = FACTOR * max(FLOP / peak(dtype), bytes / bandwidth) + launch`` (Williams, Waterman,
Patterson: Roofline, CACM 52(4), 2009), where real kernels stay below both ceilings by a factor:

`FACTOR` is fitted (three numbers, no other parameter): over 120,000 matrix products in fp32 on
P4, P100, T4, V100 and A100 (NeuSight's operators) the measured time over the roofline with launch
is 1.2-1.8 at the 5th percentile, 2.2-2.8 in the median, 5.9-9.3 at the 95th; over 37,000 in fp8,
int8 and int4 on A100, L40S and H100 (aiconfigurator's tables) 1.05-1.5, 1.5-2.5 and 2.2-6.1,
H100's int8 apart. The range taken covers both.

A kernel that writes the weight out before it multiplies moves those bytes besides (`unpacking`);
a pool on a processor goes through its windows besides (`pool_windows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from foreplan.cost_models.costs import Copy, Estimate, HostLaunch, Work
from foreplan.cost_models.rates.pool_windows import window_s
from foreplan.cost_models.sources._device_words import find
from foreplan.cost_models.unpacking import unpacking_bytes
from foreplan.datasets import device_zoo
from foreplan.datasets.cluster_entry import Rank
from foreplan.datasets.device import PEAK_DTYPES, Device
from foreplan.datasets.kernels.training_programs import is_training
from foreplan.datasets.operators import PRODUCTS
from foreplan.datasets.program import Program

#: Low end, expectation and high end of time over roofline (fitted, see the module).
FACTOR = (1.1, 2.0, 7.0)
#: Launch of a kernel where a device's figures say nothing of it. A call of a processor is measured:
#: the median of the six of ``pretrained:processors`` (1.13 to 1.34 us), in whose calls their rates,
#: pages and slow functions are counted, too. A GPU takes the constant that the zoo's figures have
#: for every one of their systems, because a launch is the host's, and no board may look slower than
#: its like for want of a figure.
ASSUMED_LAUNCH_S, ASSUMED_GPU_LAUNCH_S = 1.2e-6, 3e-6

#: Operators whose FLOP are products: only these have a peak of their own for each dtype, and enough
#: FLOP a byte for it to bound them.
ARITHMETIC = PRODUCTS | {"conv", "full_attention"}


class RooflineSource:
    """Prices programs, copies and launches from peak rates and bandwidth (source ``roofline``).

    Args:
        devices: the devices, or by rank label or device name.
        read_bandwidth: by the same name bytes a second of memory that is only read, where that is
            known: weights are.
        switch_s: by the same name seconds from one program of inference to the next, where passes
            are replayed from graphs (``Profile.switch_s``): these wait for no launch by the host.
    """

    def __init__(
        self, devices: Device | Iterable[Device] | Mapping[str, Device], *,
        read_bandwidth: Mapping[str, float] | None = None,
        switch_s: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self._read_bandwidth = dict(read_bandwidth or {})
        self._switch_s = dict(switch_s or {})
        if isinstance(devices, Mapping):
            self.devices = dict(devices)
        else:
            several = [devices] if isinstance(devices, Device) else list(devices)
            self.devices = {device.name: device for device in several}

    def estimate(self, work: Work, device: str) -> Estimate | None:
        """Price ``work`` on ``device``; ``None`` if a figure that it needs is missing."""
        figures = find(self.devices, device)
        if figures is None:
            return None
        launch = launch_s(figures)
        if isinstance(work, HostLaunch):
            return _estimate(0.0, work.calls * launch)
        if isinstance(work, Copy):
            inside = work.kind == "device"
            rate = figures.memory_bandwidth if inside else figures.host_link_bandwidth
            moved = work.bytes * (2 if inside else 1)
            return None if rate is None else _estimate(moved / rate, launch)
        if not isinstance(work, Program) or figures.memory_bandwidth is None:
            return None
        if device in self._switch_s and not is_training(work):
            launch = min(launch, self._switch_s[device])
        fastest = figures.memory_bandwidth
        if work.op == "linear":
            fastest = max(fastest, self._read_bandwidth.get(device, 0.0))
        memory_s = work.bytes / fastest
        unpack_s = unpacking_bytes(work, figures) / figures.memory_bandwidth
        if work.op not in ARITHMETIC:
            # Few FLOP a byte: no matrix peak bounds them, and a vector peak seldom does.
            return _estimate(memory_s + unpack_s, launch + window_s(work, figures, launch))
        peak = _peak(figures, work.variant.compute)
        if peak is None:
            return None
        return _estimate(max(work.flops / peak, memory_s) + unpack_s, launch)

    def lacks(self, work: Work, device: str) -> str | None:
        """The figure without which `estimate` has no price; ``None`` if it is no figure's."""
        figures = find(self.devices, device)
        if figures is None or not isinstance(work, (Program, Copy)):
            return None
        if self.estimate(work, device) is not None:
            return None
        if isinstance(work, Copy):
            return "memory_bandwidth" if work.kind == "device" else "host_link_bandwidth"
        lacking = f"peak_flops of {work.variant.compute}"
        return "memory_bandwidth" if figures.memory_bandwidth is None else lacking


def launch_s(figures: Device) -> float:
    """Seconds of a launch: the device's figure, else what is assumed of its kind."""
    assumed = ASSUMED_LAUNCH_S if figures.kind == "cpu" else ASSUMED_GPU_LAUNCH_S
    return figures.launch_overhead_s or assumed


def compute_share(item: Program, figures: Device) -> float:
    """Share of arithmetic in a program's time, by peak rates; the rest is memory traffic.

    0 for operators of few FLOP a byte, 0.5 where a figure is missing.
    """
    if item.op not in ARITHMETIC:
        return 0.0
    peak = _peak(figures, item.variant.compute)
    if peak is None or figures.memory_bandwidth is None:
        return 0.5
    compute_s, memory_s = item.flops / peak, item.bytes / figures.memory_bandwidth
    return compute_s / (compute_s + memory_s) if compute_s + memory_s else 0.5


def _peak(figures: Device, dtype: str) -> float | None:
    """Peak of a dtype, of bf16 as `bf16_as` has it."""
    name = bf16_as(figures) if dtype == "bf16" else dtype
    return figures.peak(name) if name in PEAK_DTYPES else None


def bf16_as(figures: Device) -> str:
    """The dtype whose arithmetic bf16 is priced as: where a chip has none fp16's, or else fp32's.

    A chip with neither (compute capability 6.1) still keeps values as fp16, two bytes each: cuBLAS
    multiplies them at fp32's rate (``cublasGemmEx``, from capability 5.0 on). So bytes stay.
    """
    known = (name for name in ("bf16", "fp16", "fp32") if figures.peak(name) is not None)
    return next(known, "bf16")


def without_bf16(ranks: Iterable[Rank]) -> dict[str, list[str]]:
    """The zoo's GPUs among ranks without a profile that have no bf16, by `bf16_as`."""
    found: dict[str, list[str]] = {}
    names = dict.fromkeys(rank.name.zoo for rank in ranks if rank.profile is None)
    for figures in (device_zoo.device(name) for name in names if name is not None):
        if figures.kind != "cpu" and bf16_as(figures) != "bf16":
            found.setdefault(bf16_as(figures), []).append(figures.name)
    return found


def instead_of_bf16(dtype: str) -> str:
    """What a reader is told where `bf16_as` gives ``dtype``."""
    if dtype == "fp16":
        return "priced as fp16 there, and has to run so"
    return "priced as fp16 multiplied at fp32's rate there, and has to run as fp16"


def unpacking(item: Program, figures: Device) -> Estimate:
    """Price of writing a weight out before it is multiplied by; 0 s for fused kernels."""
    if figures.memory_bandwidth is None:
        return _estimate(0.0, 0.0)
    return _estimate(unpacking_bytes(item, figures) / figures.memory_bandwidth, 0.0)


def _estimate(roofline_s: float, launch_s: float) -> Estimate:
    low, mean, high = (factor * roofline_s + launch_s for factor in FACTOR)
    return Estimate(mean, low, high, "roofline")
