"""What ``foreplan predict`` does: latency of a model's pass on one device, or a ranking of many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreplan.cost_models.book import cost_choice
from foreplan.cost_models.pass_arguments import check_launch, check_phase, named_devices
from foreplan.cost_models.ranking import rank
from foreplan.cost_models.sources.device_fit import fit_beside, fit_path
from foreplan.datasets.device import Device
from foreplan.datasets.device_zoo import own_figures
from foreplan.datasets.graphs.network_folder import network_or_model
from foreplan.datasets.profile import Profile
from foreplan.errors import SpecError


def predict_model(
    model: str,
    devices: Sequence[str],
    *,
    batch: int = 1,
    sequence_length: int = 128,
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
        model: zoo name or Hugging Face folder.
        devices: zoo names, apart by commas or as in an inline cluster (``2xa100-80g,4xt4``: one
            pass on each kind); ``all`` for the whole zoo.
        batch: sequences.
        sequence_length: new tokens of each.
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
        `Ranking.document`, and ``fit``: the file of the fit, if one is used.

    Raises:
        SpecError: a name, number or file that is wrong.
        InfeasibleError: none of the devices has the memory.
        MissingDataError: the one device asked for lacks a figure, or no device is left.
    """
    check_phase(phase, "--phase")
    if rank_by != "latency":
        raise SpecError("--rank-by", got=rank_by, expected="latency")
    check_launch(launch_s, execution, "--launch-us", unit_s=1e-6)
    choice = cost_choice(costs)
    measured = None if profile is None else Profile.load(profile)
    if choice == "measured" and measured is None:
        raise SpecError("--costs", got=costs, expected="a --profile to take measurements from")
    targets = _targets(devices, device_files, measured)
    if len(targets) > 1 and (trace is not None or measured is not None):
        raise SpecError("--trace and --profile", got=f"{len(targets)} devices", expected="one")
    fit = None
    if measured is not None and profile is not None and choice != "roofline":
        fit = fit_beside(profile, measured)
    found = rank(
        network_or_model(model, dtype), targets, batch=batch, sequence_length=sequence_length,
        phase=phase, execution=execution, costs=costs, weights=weights, profile=measured, fit=fit,
        launch_s=launch_s,
    )  # fmt: skip
    if trace is not None:
        from foreplan.cost_models.timeline import chrome_trace
        from foreplan.datasets.storage import write_atomically

        (only,) = found.replays
        write_atomically(trace, chrome_trace([(only.device, only.timeline)]))
    used = None if fit is None or profile is None else fit_path(profile).name
    return {**found.document(), "fit": used}


def _targets(names: Sequence[str], files: Sequence[Path], profile: Profile | None) -> list[Device]:
    own = own_figures(files)
    known = dict(own)
    if profile is not None:
        known[profile.device.name] = profile.device
    targets = named_devices([*names, *own.values()], known, where="--devices")
    if not targets and profile is not None:
        targets = [profile.device]
    if not targets:
        raise SpecError("--devices", got=None, expected="a device of 'foreplan devices', or all")
    return targets
