"""What a processor takes for functions of elements, beside moving their tensors.

Profiles time an addition and a GELU. torch computes other functions by polynomials of their own,
some in no vector at all; how quickly a core does that nobody publishes, and how quickly it issues a
call says it best (as of pools, see `pool_windows`).
"""

from __future__ import annotations

from types import MappingProxyType

from foreplan.cost_models.lowering.copy_layout import plain_kernel
from foreplan.datasets.device import Device
from foreplan.datasets.program import Program

#: Elements in the time of a call, by kernel, beside an addition's bytes. Measured in fp32 on one
#: core of an EPYC (Zen 5, 1.0 us a call) for 8 drawn sizes up to 425,952 elements: 2.0 ns an
#: element of a hyperbolic tangent, 0.9-1.0 of sine, cosine and error function, 0.5 of an
#: exponential, 0.1 of a sigmoid or SiLU, whose gradient takes 0.2
#: (``tests/benchmarks/likeness_figures.py``). Whole powers take what an addition takes.
_IN_A_CALL = MappingProxyType(
    {"tanh": 500, "sin": 1000, "cos": 1000, "erf": 1100, "exp": 2000, "sigmoid": 6000,
     "silu": 6000, "silu_backward": 5000, "softmax": 2200}
)  # fmt: skip


def function_s(program: Program, device: Device, launch_s: float) -> float:
    """Seconds that go into the function of a map; 0 of any other work and of other devices.

    Args:
        program: what is asked for.
        device: its cores share the elements out.
        launch_s: seconds of one call on it.
    """
    name = plain_kernel(program.variant.kernel).removeprefix("torch.").removesuffix("_")
    elements = _IN_A_CALL.get(name)
    if device.kind != "cpu" or program.op not in ("elementwise", "softmax") or elements is None:
        return 0.0
    count = program.dims["rows"] * program.dims["cols"]
    return launch_s * count / elements / (device.units or 1)
