"""What a processor takes for the windows of a pool, beside moving its images.

torch's kernels go through the window of each output element by element, in no vector: an average
adds them up, a maximum compares each and branches, which a processor foretells badly. How quickly a
core does that nobody publishes; how quickly it issues a call says it best (as of the weights of a
convolution, see `operator_rates`).
"""

from __future__ import annotations

import math
from types import MappingProxyType

from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

#: Elements in the time of a call, by kernel. Measured in fp32 on one core of an EPYC (Zen 4) for 12
#: drawn images with windows of 2 x 2 to 5 x 5: 2.1-3.6 ns an element of a maximum (1.4 where the
#: images are so small that their branches are learnt) and 0.6-1.2 of an average, 1.15 us a call
#: (docs/results/end_to_end.md). Where channels are last they are one vector (0.4-0.95 ns a result
#: of an average, 0.65-1.6 of a maximum, six images by hand, Zen 5), and the mean over a whole image
#: is taken by vectors, too: it moves what it reads, and stands not here, nor do adaptive maxima,
#: which were not timed. Lines and volumes on one core of an EPYC (Zen 5), 1.0 us a call, three
#: sizes each (``tests/benchmarks/function_figures.py``).
_IN_A_CALL = MappingProxyType({
    "torch.max_pool2d": 400, "torch.max_pool2d_with_indices": 400, "torch.avg_pool2d": 1150,
    "torch.max_pool1d": 4000, "torch.max_pool3d": 670, "torch.max_pool3d_with_indices": 670,
    "torch.avg_pool3d": 2850,
})  # fmt: skip
#: Results in the time of a call, whatever their windows.
_RESULTS_IN_A_CALL = MappingProxyType({
    "torch.avg_pool1d": 210, "torch.avg_pool3d": 285, "torch.max_pool3d": 83,
    "torch.max_pool3d_with_indices": 83,
    "torch.max_pool2d_channels_last": 1300, "torch.avg_pool2d_channels_last": 2800,
})  # fmt: skip


def window_s(program: Program, device: Device, launch_s: float) -> float:
    """Seconds that go into the windows of a pool; 0 of any other work and of other devices.

    Args:
        program: what is asked for.
        device: its cores share the outputs out.
        launch_s: seconds of one call on it.
    """
    if device.kind != "cpu" or program.op != "pool":
        return 0.0
    kernel = program.variant.kernel
    calls = program.flops / _IN_A_CALL.get(kernel, math.inf)
    calls += program.dims["rows"] / _RESULTS_IN_A_CALL.get(kernel, math.inf)
    return launch_s * calls / (device.units or 1)
