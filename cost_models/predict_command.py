"""What ``foreplan predict`` does: latency of a model's pass on one device, or a ranking of many."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreplan.cost_models.book import cost_choice
from foreplan.cost_models.execution import check_any_execution
from foreplan.cost_models.lowering.asked_steps import Priced, asked_sizes
from foreplan.cost_models.pass_arguments import check_launch, check_phase, named_devices
from foreplan.cost_models.ranking import rank
from foreplan.cost_models.sources.device_fit import fit_beside, fit_path
from foreplan.datasets.device import Device
from foreplan.datasets.device_zoo import own_figures
from foreplan.datasets.graphs.python_file import is_python_file, module_of_file, own_code
from foreplan.datasets.graphs.transformers_network import network_or_model
from foreplan.datasets.profile import Profile
from foreplan.datasets.storage import refuse_overwriting, write_atomically
from foreplan.datasets.timing.host_device import is_host_processor
from foreplan.errors import SpecError

#: Load of a core from which on what is read off it is said to be of a busy one (assumed).
_BUSY = 0.75


def predict_model(
    model: str,
    devices: Sequence[str],
    *,
    batch: int | None = None,
    sequence_length: int | None = None,
    image_size: str | None = None,
    dtype: str | None = None,
    phase: str = "inference",
    execution: str = "eager",
    costs: str = "predicted",
    weights: str = "pretrained:ops",
    profile: Path | None = None,
    device_files: Sequence[Path] = (),
    launch_s: float | None = None,
    rank_by: str = "latency",
    trace: Path | None = None,
) -> dict[str, Any]:
    """Predict a model's latency on devices, fastest first.

    Args:
        model: zoo name, Hugging Face folder, or a Python file that is run, see `module_of_file`.
        devices: zoo names, apart by commas or as in an inline cluster (``2xa100-80g,4xt4``: one
            pass on each kind); ``all`` for the whole zoo; ``cpu`` or ``cpu:threads=1``: this
            host's processor, by figures that are read off it now.
        batch: sequences or images, 1 if ``None``.
        sequence_length: new tokens of each sequence, 128 if ``None``.
        image_size: pixels of images, ``224`` or ``224x320`` (height first); the network's usual
            ones if ``None``. A Python file says by itself which of the three it takes.
        dtype: of weights and activations, the checkpoint's if ``None``.
        phase: ``inference`` or ``training``.
        execution: ``eager``, or on GPUs alone ``graph``: replayed from a CUDA graph, or
            ``compiled``: by ``torch.compile``, as a CUDA graph.
        costs: ``predicted``, ``roofline``, or ``measured`` with a profile.
        weights: predictor, as `Predictor.load`.
        profile: of the one device asked for, or of the device it names if none is; a fit beside it
            (``foreplan profile --fit``) prices what is not measured.
        device_files: figures of devices that the zoo lacks; each is predicted too.
        launch_s: host time of one ATen call. If ``None``, by kind of call where the profile of a
            GPU holds its host's times, else what a usual host takes (`gpu_host_s`). At least 0.
        rank_by: ``latency``.
        trace: Chrome trace to write, for one device.

    Returns:
        `Ranking.document`, and ``fit``: the file of the fit, if one is used, and ``here``: what
        this host's processor is, by device, and whether others use it.

    Raises:
        SpecError: a name, number or file that is wrong.
        InfeasibleError: none of the devices has the memory.
        MissingDataError: the one device asked for lacks a figure, or no device is left.
    """
    check_phase(phase, "--phase")
    if trace is not None:
        refuse_overwriting(trace, model, profile, *device_files)
    if rank_by != "latency":
        raise SpecError("--rank-by", got=rank_by, expected="latency")
    check_launch(launch_s, execution, "--launch-us", unit_s=1e-6)
    choice = cost_choice(costs)
    measured = None if profile is None else Profile.load(profile)
    if choice == "measured" and measured is None:
        raise SpecError("--costs", got=costs, expected="a --profile to take measurements from")
    own = own_figures(device_files)
    busy = _busy()  # before the figures are read, which is work, too
    targets = _targets(devices, own, measured)
    described = {*own, *([measured.device.name] if measured else [])}
    here = {
        t.name: ", ".join(word for word in (t.notes, busy) if word)
        for t in targets
        if t.name not in described and is_host_processor(t.name)
    }
    if len(targets) > 1 and (trace is not None or measured is not None):
        raise SpecError("--trace and --profile", got=f"{len(targets)} devices", expected="one")
    fit = None
    if measured is not None and profile is not None and choice != "roofline":
        fit = fit_beside(profile, measured)
    check_any_execution(execution, targets, "--execution")
    sides = None if image_size is None else _sides(image_size)
    for where, size in (("--batch", batch), ("--sequence-length", sequence_length)):
        if size is not None and size < 1:
            raise SpecError(where, got=size, expected="at least 1")
    priced: Priced
    if is_python_file(model):
        given = {"batch": batch, "sequence_length": sequence_length, "image_size": sides}
        priced = module_of_file(model, {k: v for k, v in given.items() if v is not None})
        priced = priced if dtype is None else priced.converted(dtype)
        batch = sequence_length = None
    else:
        priced = network_or_model(model, dtype, sides)
        asked_sizes(priced, batch, sequence_length, ("--batch", "--sequence-length"))
    with own_code():  # a module's own code runs once more where it is captured
        found = rank(
            priced, targets, batch=batch, sequence_length=sequence_length, phase=phase,
            execution=execution, costs=costs, weights=weights, profile=measured, fit=fit,
            launch_s=launch_s,
        )  # fmt: skip
    if trace is not None:
        from foreplan.cost_models.timeline import chrome_trace

        (only,) = found.replays
        write_atomically(trace, chrome_trace([(only.device, only.timeline)]))
    used = None if fit is None or profile is None else fit_path(profile).name
    return {**found.document(), "fit": used, "here": here}


def _busy() -> str:
    """What others do on this host's cores while its figures are read, in words; "" if little.

    Products by several threads wait for the slowest: on two cores with a load of 5 two threads
    read a third of the peak of one.
    """
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f"busy: load {load:.1f} on {cores} cores" if load > _BUSY * cores else ""


def _sides(text: str) -> tuple[int, int]:
    """Height and width of ``224`` or ``224x320``."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})(?:[xX×]([1-9][0-9]{0,4}))?", text.strip())
    if match is None:
        raise SpecError(
            "--image-size", got=text, expected="pixels: 224, or height x width as in 224x320"
        )
    return int(match[1]), int(match[2] or match[1])


def _targets(
    names: Sequence[str], own: Mapping[str, Device], profile: Profile | None
) -> list[Device]:
    known = dict(own)
    if profile is not None:
        known[profile.device.name] = profile.device
    targets = named_devices([*names, *own.values()], known, where="--devices")
    if not targets and profile is not None:
        targets = [profile.device]
    if not targets:
        raise SpecError(
            "--devices", got=None, expected="a device of 'foreplan devices', all, or cpu"
        )
    return targets
