"""`Ranking`: a model's pass on many devices, fastest first; `rank_devices` makes one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.cost_models.book import CostChoice, cost_choice
from foreplan.cost_models.execution import (
    EXECUTIONS,
    Execution,
    check_any_execution,
    check_execution,
)
from foreplan.cost_models.given_seconds import LaunchSeconds
from foreplan.cost_models.lowering.asked_steps import (
    USUAL_TOKENS,
    Priced,
    asked_model,
    asked_sizes,
    module_steps,
    takes_images,
)
from foreplan.cost_models.lowering.graph_step import Phase
from foreplan.cost_models.lowering.step_store import stored_steps
from foreplan.cost_models.pass_arguments import (
    check_launch,
    check_phase,
    loaded_predictor,
    named_devices,
)
from foreplan.cost_models.pass_memory import devices_that_fit, state_bytes
from foreplan.cost_models.passes.host_prices import profiled_launches
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.cost_models.replayed_pass import Replay
from foreplan.cost_models.roofline import bf16_as
from foreplan.cost_models.sources.device_fit import DeviceFit
from foreplan.datasets.device import Device, DeviceKind
from foreplan.datasets.graphs.given_module import GivenModule
from foreplan.datasets.graphs.transformers_network import TransformersNetwork
from foreplan.datasets.models.model import Model
from foreplan.datasets.profile import Profile
from foreplan.datasets.quantity import format_seconds
from foreplan.datasets.specs import StrictModel
from foreplan.errors import InfeasibleError, MissingDataError, SpecError

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.axes import Axes

    from foreplan.cost_models.predictor import Predictor


@dataclass(frozen=True, slots=True, repr=False)
class Ranking:
    """Predicted latencies of one pass on several devices.

    Attributes:
        model: whose pass.
        batch: sequences or images; ``None`` of a module, whose inputs have their own shapes.
        sequence_length: new tokens of each; ``None`` of a module, and of images.
        phase: ``inference`` or ``training``.
        execution: ``eager``, ``graph`` or ``compiled``.
        costs: where prices come from.
        replays: a pass on each device that has prices, fastest first.
        fits: by device, whether weights, when training also gradients and moments, and what the
            largest operator reads and writes lie in its memory; no other activations are counted.
            ``None`` where the memory is not known.
        kinds: of the same devices.
        unpriced: devices without a price, and why.
        bf16_as: what bf16 is priced as on GPUs without it, by device, where the pass is in bf16.
        captured: whether the operators were found on disk (``cache``) or captured ``now``.
    """

    model: Priced
    batch: int | None
    sequence_length: int | None
    phase: Phase
    execution: Execution
    costs: str
    replays: tuple[Replay, ...]
    fits: Mapping[str, bool | None]
    kinds: Mapping[str, DeviceKind]
    unpriced: Mapping[str, str]
    bf16_as: Mapping[str, str]
    captured: str

    def __repr__(self) -> str:
        """One line: what of which model, and the fastest devices."""
        first = [f"{r.device} {format_seconds(r.latency_s)}" for r in self.replays[:3]]
        more = ["..."] if len(self.replays) > 3 else []
        return (
            f"<Ranking: {self.model.name}, {self._shape()}, {self.phase}: "
            f"{', '.join([*first, *more])}>"
        )

    def _shape(self) -> str:
        return _shape_words(self.model, self.batch, self.sequence_length)

    @property
    def fastest(self) -> Replay:
        """The fastest pass among the devices that hold it, as far as their memory is known.

        Raises:
            InfeasibleError: only devices without a price hold it.
        """
        holding = [found for found in self.replays if self.fits[found.device] is not False]
        if not holding:
            raise InfeasibleError("no device that has prices holds the pass")
        return holding[0]

    def document(self) -> dict[str, Any]:
        """The ranking as ``foreplan predict --json`` prints it."""
        return {
            "model": self.model.name,
            "dtype": self.model.dtype,
            "batch": self.batch,
            "sequence_length": self.sequence_length,
            "shape": self._shape(),
            "images": takes_images(self.model),
            "scans": isinstance(self.model, TransformersNetwork) and self.model.scans,
            "phase": self.phase,
            "execution": self.execution,
            "costs": self.costs,
            "weight_bytes": state_bytes(self.model, "inference"),
            "captured": self.captured,
            "devices": [
                {
                    **found.document(),
                    "fits": self.fits[found.device],
                    "device_kind": self.kinds[found.device],
                }
                for found in self.replays
            ],
            "unpriced": dict(self.unpriced),
            "bf16_as": dict(self.bf16_as),
        }

    def to_frame(self) -> pd.DataFrame:
        """A row for each device: latency with its interval in seconds, what limits it, fits."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "device": found.device, "latency_s": found.latency_s, "low_s": found.low_s,
                    "high_s": found.high_s, "limit": found.limit, "fits": self.fits[found.device],
                }
                for found in self.replays
            ]
        )  # fmt: skip

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw latencies with their intervals on a logarithmic axis, fastest on top."""
        import matplotlib.pyplot as plt

        frame = self.to_frame()
        if axes is None:
            _, axes = plt.subplots(figsize=(8, 0.22 * len(frame) + 1.2))
        ends = [frame["latency_s"] - frame["low_s"], frame["high_s"] - frame["latency_s"]]
        axes.errorbar(
            frame["latency_s"] * 1e3, frame["device"], xerr=[end * 1e3 for end in ends], fmt="o"
        )
        axes.set_xscale("log")
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"{self.model.name}, {self._shape()}, {self.phase}", loc="left")
        return axes

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(index=False))


def rank_devices(
    model: str | Path | Model | TransformersNetwork | torch.nn.Module,
    devices: str | Device | Iterable[str | Device] = "all",
    *,
    inputs: Any = None,
    batch: int | None = None,
    sequence_length: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    dtype: str | None = None,
    phase: str = "inference",
    execution: str = "eager",
    costs: str = "predicted",
    predictor: Predictor | str | Path | None = None,
    launch_s: float | None = None,
) -> Ranking:
    """Predict a model's latency on devices that need not be here, fastest first.

    Args:
        model: zoo name, Hugging Face folder (of any network of transformers), what `load_model`
            returns, or any module with ``inputs``.
        devices: names of the zoo, apart by commas or one by one, or as in an inline cluster
            (``2xa100-80g,4xt4``: one pass on each kind); figures of a device; ``all``: the zoo;
            ``cpu``, ``cpu:threads=1``: this host's processor by figures that are read off it now.
        inputs: example inputs of a module, as for `predict_latency`.
        batch: sequences or images, 1 if ``None``.
        sequence_length: new tokens of each sequence, 128 if ``None``.
        image_size: side of images in pixels, or height and width; the network's usual ones if
            ``None``.
        dtype: of weights and activations, ``fp32``, ``fp16`` or ``bf16``; the model's if ``None``.
            A module has its own.
        phase: ``inference`` or ``training``.
        execution: ``eager``, or on GPUs alone ``graph``: replayed from a CUDA graph, or
            ``compiled``: by ``torch.compile``, as a CUDA graph.
        costs: ``predicted`` or ``roofline``. For ``measured``, of one device, see
            `predict_latency`.
        predictor: from `Predictor.load`, or what that takes; the shipped one if ``None``.
        launch_s: host time of one ATen call, at least 0; a usual host's if ``None``.

    Raises:
        SpecError: a name, number or folder that is wrong.
        InfeasibleError: none of the devices has the memory.
        MissingDataError: no device has the figures that a price needs; the first one's is named.
    """
    if isinstance(devices, (str, Device)):
        devices = [devices]
    elif isinstance(devices, StrictModel) or not isinstance(devices, Iterable):  # from a notebook
        raise SpecError("rank_devices: devices", got=devices, expected="names of the zoo, or all")
    targets = named_devices(devices, where="rank_devices: devices")
    choice = cost_choice(costs, "rank_devices: costs")
    if choice == "measured":
        raise SpecError(
            "rank_devices: costs", got=costs, expected="predicted or roofline",
            fix="predict_latency takes the profile of one device",
        )  # fmt: skip
    check_phase(phase, "rank_devices: phase")
    check_launch(launch_s, execution, "rank_devices: launch_s")
    if not targets:
        raise SpecError("rank_devices: devices", got=None, expected="names of the zoo, or all")
    check_any_execution(execution, targets, "rank_devices: execution")
    priced = asked_model(model, inputs, dtype, image_size, "rank_devices")
    where = ("rank_devices: batch", "rank_devices: sequence_length")
    batch, sequence_length = asked_sizes(priced, batch, sequence_length, where)
    return rank(
        priced, targets, batch=batch, sequence_length=sequence_length, phase=phase,
        execution=execution, costs=costs,
        predictor=loaded_predictor(predictor, choice, "rank_devices: predictor"),
        launch_s=launch_s,
    )  # fmt: skip


def rank(
    model: Priced,
    targets: Sequence[Device],
    *,
    batch: int | None,
    sequence_length: int | None,
    phase: str,
    execution: str,
    costs: str,
    predictor: Predictor | None = None,
    weights: str = "pretrained:ops",
    profile: Profile | None = None,
    fit: DeviceFit | None = None,
    launch_s: float | None = None,
) -> Ranking:
    """`rank_devices` with checked arguments, and for one device with its profile.

    Args:
        model: whose pass.
        targets: the devices, at least one.
        batch: as all that is not said here, and the errors, see `rank_devices`.
        sequence_length: likewise.
        phase: likewise.
        execution: likewise.
        costs: ``measured``, too, with a profile.
        predictor: the one of ``weights`` if ``None``.
        weights: as `Predictor.load`.
        profile: measurements of the one device.
        fit: fitted beside the profile.
        launch_s: by kind of call if ``None`` and the profile holds its host's times.
    """
    check_any_execution(execution, targets, "--execution")
    (runs,) = (way for way in EXECUTIONS if way == execution)
    asked: Phase = "training" if phase == "training" else "inference"
    choice = cost_choice(costs)
    # Before the capture, which takes seconds: the folder may be none.
    predictor = predictor or _predictor(choice, weights)
    compiled, cached = runs == "compiled", False
    if isinstance(model, GivenModule):  # whose code may be another one the next time
        batch = sequence_length = None
        steps = module_steps(model, asked, compiled)
    else:
        batch = 1 if batch is None else batch
        if sequence_length is None and not takes_images(model):
            sequence_length = USUAL_TOKENS
        steps, cached = stored_steps(
            model, batch=batch, tokens=sequence_length or 1, phase=asked, compiled=compiled
        )
    shape = _shape_words(model, batch, sequence_length)
    fits = devices_that_fit(model, asked, steps, targets, shape)
    launches: LaunchSeconds = launch_s
    if runs == "eager" and launch_s is None:
        launches = profiled_launches(profile, steps, asked)
    found: list[Replay] = []
    unpriced: dict[str, str] = {}
    for target in targets:
        book = replay_book(
            target, choice, profile=profile, predictor=predictor, fit=fit, steps=steps
        )
        try:
            check_execution(runs, target)
            found.append(
                replay_steps(
                    steps, book, target, execution=runs, launch_s=launches,
                    gap_s=None if profile is None else profile.switch_s,
                )
            )  # fmt: skip
        except (MissingDataError, SpecError) as error:
            if len(targets) == 1:
                raise
            unpriced[target.name] = str(error)
    if not found:
        raise MissingDataError(f"no device has a price: {next(iter(unpriced.values()))}")
    found.sort(key=lambda result: (result.latency_s, result.device))
    stands = {target.name: bf16_as(target) for target in targets if target.kind != "cpu"}
    bf16 = {
        result.device: stands[result.device] for result in found
        if model.dtype == "bf16" and stands.get(result.device, "bf16") != "bf16"
    }  # fmt: skip
    return Ranking(
        model, batch, sequence_length, asked, runs, costs, tuple(found),
        {result.device: fits[result.device] for result in found},
        {target.name: target.kind for target in targets if target.name not in unpriced},
        unpriced, bf16, "cache" if cached else "now",
    )  # fmt: skip


def _shape_words(model: Priced, batch: int | None, sequence_length: int | None) -> str:
    if isinstance(model, GivenModule):
        return model.shape
    tokens = f"{batch} x {sequence_length} tokens"
    if not isinstance(model, TransformersNetwork):
        return tokens
    return model.images_of(batch) if model.images else f"{tokens} {model.beside}".rstrip()


def _predictor(choice: CostChoice, weights: str) -> Predictor | None:
    if choice == "roofline":
        return None
    from foreplan.cost_models.predictor import Predictor as Loaded

    return Loaded.load(weights)
