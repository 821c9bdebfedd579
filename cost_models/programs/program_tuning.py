"""Fine-tuning on few tasks of a new device, and the choice of those tasks.

Tasks are chosen as CDMPP does (`choose_tasks`): the programs' embeddings are clustered by KMeans
with as many centres as tasks are wanted; from the largest cluster to the smallest, each takes the
nearest task that is not taken yet. No latency of the device is needed for that.

A new device starts with the factors (`ProgramScale`) of a known one. Its figures hardly say which,
so the measured programs do: the one of its instruction set that leaves the least spread.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreplan.cost_models.programs.program_inputs import device_figures, program_inputs
from foreplan.cost_models.programs.program_scale import DeviceFactors, ProgramScale
from foreplan.cost_models.programs.program_table import ProgramTable
from foreplan.cost_models.programs.program_trees import ProgramTrees
from foreplan.datasets.device import Device
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from foreplan.cost_models.programs.program_predictor import ProgramPredictor

#: Rows of the new device that count for one in the trust of its own mean.
_PRIOR_ROWS = 8.0
_ROUNDS = 80


def choose_tasks(
    embedding: NDArray[np.float32], task: NDArray[np.str_], count: int, *, seed: int = 0
) -> list[str]:
    """Choose tasks to measure on a new device.

    Args:
        embedding: of every candidate program (N, E), as `ProgramPredictor.embed` gives.
        task: key of each program's task (N).
        count: tasks wanted.
        seed: of KMeans.

    Raises:
        SpecError: more tasks wanted than there are.
    """
    from sklearn.cluster import KMeans  # type: ignore[import-untyped, unused-ignore]

    names = np.unique(task)
    if not 0 < count <= len(names):
        raise SpecError("tasks to choose", got=count, expected=f"1 to {len(names)}")
    with warnings.catch_warnings():
        # Fewer distinct programs than centres: the centres that coincide take different tasks.
        warnings.filterwarnings("ignore", message="Number of distinct clusters")
        clusters = KMeans(count, random_state=seed, n_init=1).fit(embedding)
    distance = clusters.transform(embedding)
    mean = np.stack([distance[task == name].mean(0) for name in names])
    sizes = np.bincount(clusters.labels_, minlength=count)
    taken: list[int] = []
    for centre in np.argsort(-sizes, kind="stable"):
        order = np.argsort(mean[:, centre], kind="stable")
        taken.append(next(int(at) for at in order if int(at) not in taken))
    return [str(names[at]) for at in taken]


def tune(
    model: ProgramPredictor, table: ProgramTable, *, epochs: int, learning_rate: float
) -> None:
    """Fine-tune a predictor in place; see `ProgramPredictor.continue_fit`.

    Raises:
        SpecError: a label that is no positive number.
    """
    seconds = table.latency_s
    if len(table) == 0 or not np.all(seconds > 0):
        raise SpecError("labels", got="none, zero or unknown", expected="all > 0 s")
    if model.trees_:
        for number in np.unique(table.device).tolist():
            _liken(model, table.take(table.device == number), table.devices[number])
    _copy(model, table)
    inputs = program_inputs(table, model.scale_)
    if model.trees_:
        leaf_s = model.leaf_seconds(inputs)
        left = np.log(seconds / np.add.reduceat(leaf_s, inputs.starts))
        # Few rows say how much faster the device is, more say what it is faster at.
        shift = float(np.median(left)) * len(left) / (len(left) + _PRIOR_ROWS)
        model.shift_ += shift
        model.trees_.append(
            ProgramTrees.fit(
                inputs, seconds, rounds=_ROUNDS, depth=3, learning_rate=0.05,
                threads=model.threads, seed=model.seed, start_s=leaf_s * np.exp(shift),
            )
        )  # fmt: skip
    for network in model.networks_:
        own = ProgramScale(network.scales["parts"].astype(np.float64))
        network.train(table, program_inputs(table, own), seconds, epochs, learning_rate)


def _copy(model: ProgramPredictor, table: ProgramTable) -> None:
    """Decide whether programs that other devices of the kind have timed are copied from them."""
    described = model.known_devices()
    for number in np.unique(table.device).tolist():
        device, rows = table.devices[number], table.take(table.device == number)
        if device.name in model.known_.devices:
            continue  # it was trained on
        others = [
            name for name in model.known_.devices
            if name != device.name and described[name].kind == device.kind
        ]  # fmt: skip
        model.copies_.pop(device.name, None)
        rule = model.known_.copy_for(rows, np.exp(model.logs(rows)), others)
        if rule is not None:
            model.copies_[device.name] = rule


def _liken(model: ProgramPredictor, table: ProgramTable, device: Device) -> None:
    """Give a device that was not trained on the factors that suit its programs best.

    That is where abs(ln(predicted / measured)) about its median is least: what all programs have in
    common is fitted afterwards.
    """
    scale, cpu = model.scale_, device.kind == "cpu"
    known = {name: item for name, item in scale.devices.items() if item.cpu == cpu}
    if device.name in known or not known:
        return
    described = model.known_devices()
    # Which instructions a program is made of says more of its time than which chip runs it.
    alike = [name for name in known if described[name].isa == device.isa] or list(known)
    tried = {}
    for name in alike:
        own = DeviceFactors(cpu, device_figures(device), known[name].factors)
        inputs = program_inputs(table, ProgramScale(scale.weights, {device.name: own}))
        predicted_s = np.add.reduceat(model.leaf_seconds(inputs), inputs.starts)
        left = np.log(predicted_s / table.latency_s)
        tried[name] = float(np.abs(left - np.median(left)).mean()), own
    scale.devices[device.name] = min(tried.values(), key=lambda one: one[0])[1]
    model.card_["devices"] = [*model.card_["devices"], device.model_dump(mode="json")]
