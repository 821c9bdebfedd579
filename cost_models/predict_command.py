"""What ``foreplan predict`` does: latency of a model's pass on one device, or a ranking of many."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.cost_models.book import CostChoice, cost_choice
from foreplan.cost_models.device_fit import fit_beside, fit_path
from foreplan.cost_models.execution import Execution, check_execution
from foreplan.cost_models.graph_step import PHASES, Phase, Step
from foreplan.cost_models.host_prices import HostPrices, Issue
from foreplan.cost_models.replay import LaunchSeconds, Replay, replay_book, replay_steps
from foreplan.cost_models.step_store import stored_steps
from foreplan.datasets import device_zoo
from foreplan.datasets.cluster import parse_devices
from foreplan.datasets.device import Device
from foreplan.datasets.dtypes import DTYPE_BYTES, weight_bytes
from foreplan.datasets.model import Model, load_model
from foreplan.datasets.profile import Profile
from foreplan.datasets.program import Program
from foreplan.datasets.specs import nearest
from foreplan.errors import MissingDataError, SpecError

if TYPE_CHECKING:
    from foreplan.cost_models.predictor import Predictor

#: Bytes of weights, gradients and two moments over those of the weights.
_TRAINING_STATE = 4


def predict_model(
    model: str,
    devices: Sequence[str],
    *,
    batch: int = 1,
    sequence_length: int = 128,
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
        phase: ``inference`` or ``training``.
        execution: ``eager``, or ``graph``: replayed from a CUDA graph, on GPUs alone.
        costs: ``predicted``, ``roofline``, or ``measured`` with a profile.
        weights: predictor, as `Predictor.load`.
        profile: of the one device asked for, or of the device it names if none is; a fit beside it
            (``foreplan profile --fit``) prices what is not measured.
        device_files: figures of devices that the zoo lacks; each is predicted too.
        launch_s: host time of one ATen call. If ``None``, by kind of call where the profile of a
            GPU holds its host's times, else published or assumed. At least 0.
        rank_by: ``latency``.
        trace: Chrome trace to write, for one device.

    Returns:
        ``model``, ``dtype`` (of its weights, in which it is priced), ``batch``,
        ``sequence_length``, ``phase``, ``execution``, ``costs``, ``fit`` (its file, if one is
        used), ``weight_bytes``,
        ``captured`` (``cache`` or ``now``), ``devices``: `Replay.document` each, with
        ``fits`` (weights, when training also gradients and moments, and what the largest linear
        reads and writes, in the device's memory; no other activations) and ``unpriced`` devices
        with the reason.

    Raises:
        SpecError: a name, number or file that is wrong.
        MissingDataError: the one device asked for lacks a figure, or no device is left.
    """
    if phase not in PHASES:
        guess = nearest(phase, PHASES)
        raise SpecError(
            "--phase", got=phase, expected=f"one of {', '.join(PHASES)}",
            fix=f"did you mean {guess}?" if guess else None,
        )  # fmt: skip
    if rank_by != "latency":
        raise SpecError("--rank-by", got=rank_by, expected="latency")
    if launch_s is not None and not 0 <= launch_s < math.inf:
        raise SpecError("--launch-us", got=launch_s * 1e6, expected="a number of at least 0")
    choice = cost_choice(costs)
    measured = None if profile is None else Profile.load(profile)
    if choice == "measured" and measured is None:
        raise SpecError("--costs", got=costs, expected="a --profile to take measurements from")
    targets = _targets(devices, device_files, measured)
    if len(targets) > 1 and (trace is not None or measured is not None):
        raise SpecError("--trace and --profile", got=f"{len(targets)} devices", expected="one")
    runs = _execution(execution, targets, launch_s)
    described = load_model(model)
    steps, cached = stored_steps(
        described, batch=batch, tokens=sequence_length, phase=_phase(phase)
    )
    fit = None
    if measured is not None and profile is not None and choice != "roofline":
        fit = fit_beside(profile, measured)
    predictor = _predictor(choice, weights)
    launches: LaunchSeconds = launch_s
    if runs == "eager" and launch_s is None and measured is not None and measured.host is not None:
        prices = HostPrices.load(measured.host.model_dump())
        launches = prices.launches(steps, Issue.of(steps), _phase(phase))
    found: list[Replay] = []
    unpriced: dict[str, str] = {}
    for target in targets:
        book = replay_book(target, choice, profile=measured, predictor=predictor, fit=fit)
        try:
            check_execution(runs, target)
            found.append(
                replay_steps(
                    steps, book, target, execution=runs, launch_s=launches,
                    gap_s=None if measured is None else measured.switch_s,
                )
            )  # fmt: skip
        except (MissingDataError, SpecError) as error:
            if len(targets) == 1:
                raise
            unpriced[target.name] = str(error)
    if not found:
        raise MissingDataError("no device has the figures that a price needs",
                               fix="give one with a peak and a bandwidth")  # fmt: skip
    found.sort(key=lambda result: (result.latency_s, result.device))
    if trace is not None:
        from foreplan.cost_models.timeline import chrome_trace
        from foreplan.datasets.storage import write_atomically

        write_atomically(trace, chrome_trace([(found[0].device, found[0].timeline)]))
    held = _held_bytes(described, phase) + _activation_bytes(steps)
    by_name = {target.name: target for target in targets}
    return {
        "model": described.name,
        "dtype": described.dtype,
        "batch": batch,
        "sequence_length": sequence_length,
        "phase": phase,
        "execution": runs,
        "costs": costs,
        "fit": None if fit is None or profile is None else fit_path(profile).name,
        "weight_bytes": _held_bytes(described, "inference"),
        "captured": "cache" if cached else "now",
        "devices": [
            {**result.document(), "fits": _fits(by_name[result.device], held)} for result in found
        ],
        "unpriced": unpriced,
    }


def _targets(names: Sequence[str], files: Sequence[Path], profile: Profile | None) -> list[Device]:
    wanted = [name for text in names for item in text.split(",") if item for name in _each(item)]
    if wanted == ["all"]:
        wanted = list(device_zoo.names())
    own = [Device.load(path) for path in files]
    known = {device.name: device for device in own}
    if profile is not None:
        known[profile.device.name] = profile.device
    targets = [known.get(name) or device_zoo.device(name, "--device") for name in wanted]
    targets = list({device.name: device for device in [*targets, *own]}.values())
    if not targets and profile is not None:
        targets = [profile.device]
    if not targets:
        raise SpecError("--device", got=None, expected="a device of 'foreplan devices', or all")
    return targets


def _each(item: str) -> list[str]:
    """Names in one item of ``--devices``: an inline cluster, ``4xt4@small``, names its device."""
    if not re.match(r"\s*[0-9]+\s*[xX×*]", item) and "@" not in item:
        return [item]
    found = dict.fromkeys(rank.name.zoo for rank in parse_devices(item, "--device").ranks())
    return [name for name in found if name is not None]


def _predictor(choice: CostChoice, weights: str) -> Predictor | None:
    if choice == "roofline":
        return None
    from foreplan.cost_models.predictor import Predictor as Loaded

    return Loaded.load(weights)


def _phase(text: str) -> Phase:
    return "training" if text == "training" else "inference"


def _execution(text: str, targets: Sequence[Device], launch_s: float | None) -> Execution:
    """The way of execution that a word names, where some device can do it."""
    check_execution(text, next((t for t in targets if t.kind != "cpu"), targets[0]))
    if text == "graph" and launch_s is not None:
        raise SpecError(
            "--launch-us", got=launch_s * 1e6,
            expected="--execution eager: the host issues no operator of a graph",
        )  # fmt: skip
    return "graph" if text == "graph" else "eager"


def _held_bytes(model: Model, phase: str) -> int:
    weights = int(model.parameters * DTYPE_BYTES[model.dtype])
    return weights * (_TRAINING_STATE if phase == "training" else 1)


def _activation_bytes(steps: Sequence[Step]) -> int:
    """Most bytes that one linear of the forward pass reads and writes beside its weights."""
    most = 0.0
    for step in steps:
        work = step.work
        if step.part == "forward" and isinstance(work, Program) and work.op == "linear":
            weights = weight_bytes(work.dims["n"], work.dims["k"], work.variant.storage)
            most = max(most, work.bytes - weights)
    return int(most)


def _fits(device: Device, held_bytes: int) -> bool | None:
    return None if device.memory_bytes is None else held_bytes <= device.memory_bytes
