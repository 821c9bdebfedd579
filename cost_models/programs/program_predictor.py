"""ProgramPredictor: latency of scheduled programs on any device, from their compact ASTs.

A weighted sum of the program's parts (`program_scale`) is corrected twice, leaf by leaf by boosted
trees (`program_trees`) and by a transformer over all leaves (`program_transformer`); the prediction
is their weighted geometric mean, never below the roofline. A program that a device like this one
has timed is copied, too (`known_programs`).

Training rows are dealt to groups of whole families (`program_folds.validation_groups`). Each group
is predicted by trees and a network that never saw it; on those predictions the weight of the two is
chosen and the interval is calibrated (conformal, by ranges of predicted latency). The networks of
the groups are kept and averaged; trees and scale are fitted once more on all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import (  # type: ignore[import-untyped, unused-ignore]
    BaseEstimator,
    RegressorMixin,
)
from sklearn.utils.validation import (  # type: ignore[import-untyped, unused-ignore]
    check_is_fitted,
)

from foreplan.cost_models.model_store import MISFITS, read_card, read_weights, write_model
from foreplan.cost_models.programs.encoder._leaf_names import FEATURE_VERSION
from foreplan.cost_models.programs.known_programs import Copy, KnownPrograms, digests
from foreplan.cost_models.programs.program_inputs import (
    ProgramInputs,
    on_cpus,
    program_inputs,
    stored_scale,
)
from foreplan.cost_models.programs.program_scale import ProgramScale
from foreplan.cost_models.programs.program_table import Floats, ProgramTable
from foreplan.cost_models.programs.program_transformer import NetworkSettings, ProgramTransformer
from foreplan.cost_models.programs.program_trees import ProgramTrees
from foreplan.datasets.device import FEATURE_NAMES as DEVICE_FEATURES
from foreplan.datasets.device import Device
from foreplan.datasets.specs import validate
from foreplan.errors import MissingDataError, SpecError

SCHEMA = "foreplan.program-predictor/6"

#: Upper ends (seconds, predicted) of the ranges that are calibrated apart.
RANGES_S = (6e-6, 2e-5, 2e-4, float("inf"))


class ProgramPredictor(RegressorMixin, BaseEstimator):  # type: ignore[misc, unused-ignore]
    """Trees and transformers on a sum of parts, bounded by the roofline.

    Args:
        rounds: boosted trees; 0 for none.
        depth: of a tree.
        tree_rate: learning rate of boosting.
        perceptron_epochs: passes of the perceptrons beside trees of GPUs; 0 for none.
        networks: transformers, one a group, at most ``groups``; 0 for none.
        groups: of families, for the choice of weights and the interval; 0 with trees alone for
            none, and an interval of NaN.
        width: of a network.
        layers: of its encoder.
        epochs: passes over its training rows.
        batch: programs of a step.
        learning_rate: peak of a one-cycle schedule.
        positional: whether position and depth of leaves are used.
        bounded: whether predictions are held to the roofline.
        cmd_weight: weight of the discrepancy between domains of a batch.
        domains: what the domains are.
        coverage: nominal coverage of the interval.
        torch_device: where networks run.
        threads: trees that are fitted at once.
        seed: of every random choice.

    Attributes:
        scale_: the fitted `ProgramScale`.
        trees_: the fitted `ProgramTrees`, and those that fine-tuning added.
        shift_: added to the logarithm of the scale that trees correct; 0 before fine-tuning.
        networks_: the fitted `ProgramTransformer`s.
        weight_: of the networks in the mean of logarithms.
        known_: the `KnownPrograms` of training.
        copies_: how programs of a device that it was fine-tuned by are copied, by name.
        quantiles_: of abs(ln error) on rows kept out, for GPUs and CPUs, by range of predicted
            latency (2, ranges).
        card_: facts of the fit, as stored beside the weights.
    """

    def __init__(
        self,
        *,
        rounds: int = 400,
        depth: int = 6,
        tree_rate: float = 0.05,
        perceptron_epochs: int = 24,
        networks: int = 4,
        groups: int = 4,
        width: int = 96,
        layers: int = 2,
        epochs: int = 25,
        batch: int = 256,
        learning_rate: float = 1e-3,
        positional: bool = True,
        bounded: bool = True,
        cmd_weight: float = 0.02,
        domains: Literal["device", "family"] = "family",
        coverage: float = 0.9,
        torch_device: str = "cpu",
        threads: int = 1,
        seed: int = 0,
    ) -> None:
        self.rounds = rounds
        self.depth = depth
        self.tree_rate = tree_rate
        self.perceptron_epochs = perceptron_epochs
        self.networks = networks
        self.groups = groups
        self.width = width
        self.layers = layers
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.positional = positional
        self.bounded = bounded
        self.cmd_weight = cmd_weight
        self.domains = domains
        self.coverage = coverage
        self.torch_device = torch_device
        self.threads = threads
        self.seed = seed

    def fit(self, table: ProgramTable, y: Floats | None = None) -> Self:
        """Fit on a table.

        Args:
            table: training programs.
            y: seconds (N,); the table's own by default.

        Raises:
            SpecError: too few programs or tasks, no model to fit, or a label that is no positive
                number.
        """
        seconds = table.latency_s if y is None else np.asarray(y, dtype=float)
        if len(table) < 2 * self.groups or not np.all(seconds > 0):
            raise SpecError(
                "labels", got=len(table), expected=f"{2 * self.groups} programs or more, all > 0 s"
            )
        if self.rounds == 0 and self.networks == 0:
            raise SpecError("rounds and networks", got=0, expected="one of them above 0")
        from foreplan.cost_models.programs.program_fitting import fit_together

        return fit_together([self], [table], [seconds])[0]

    def continue_fit(
        self, table: ProgramTable, *, epochs: int = 20, learning_rate: float = 3e-4
    ) -> Self:
        """Fine-tune on programs of a new device, from its labels.

        Devices that were not trained on take the factors of the known device that suits the rows
        best. The trees' scale gets one factor, few trees are added for what is left, and the
        networks are trained on. The interval stays.

        Raises:
            SpecError: a label that is no positive number.
        """
        from foreplan.cost_models.programs.program_tuning import tune

        tune(self, table, epochs=epochs, learning_rate=learning_rate)
        return self

    def predict(self, table: ProgramTable) -> Floats:
        """Return seconds (N,).

        Raises:
            MissingDataError: a device without peak or bandwidth.
            sklearn.exceptions.NotFittedError: before `fit`.
        """
        check_is_fitted(self)
        inputs = program_inputs(table, self.scale_)
        logs = self._logs(table, inputs)
        for number, device in enumerate(table.devices):
            source, rows = self._source(device), np.flatnonzero(table.device == number)
            if source is not None and len(rows):
                logs[rows] = self._with_copies(logs[rows], table.take(rows), device, source)
        return np.maximum(np.exp(logs), self.floor(inputs))

    def logs(self, table: ProgramTable) -> Floats:
        """Logarithms of what trees and networks make of each program (N), without copies."""
        return self._logs(table, program_inputs(table, self.scale_))

    def _logs(self, table: ProgramTable, inputs: ProgramInputs) -> Floats:
        logs = np.zeros(len(table))
        if self.trees_ and self.weight_ < 1:
            logs += (1 - self.weight_) * np.log(program_seconds(inputs, self.leaf_seconds(inputs)))
        if self.networks_ and self.weight_ > 0:
            logs += self.weight_ * np.mean(
                [self._network_logs(network, table, inputs) for network in self.networks_], 0
            )
        return logs

    def _source(self, device: Device) -> Device | None:
        """The device whose times are copied for one: as fine-tuning found, or of the same chip."""
        rule, timed = self.copies_.get(device.name), self.known_.devices
        if rule is None and (device.kind == "cpu" or device.name in timed or not timed):
            return None
        known = self.known_devices()
        if rule is not None:
            return known[rule.source]
        return next((known[name] for name in timed if known[name].chip == device.chip), None)

    def _with_copies(
        self, logs: Floats, table: ProgramTable, device: Device, source: Device
    ) -> Floats:
        """Logarithms of predictions (N) of one device, beside copies of what another timed."""
        copied = np.log(self.known_.seconds(digests(table), source.name))
        if rule := self.copies_.get(device.name):
            found = rule.share * (copied + rule.factor) + (1 - rule.share) * logs
        else:  # a board that timed nothing: as much slower as predictions say
            there = replace(table, devices=(source,) * len(table.devices))
            found = copied + logs - self.logs(there)
        return np.where(np.isfinite(copied), found, logs)

    def leaf_seconds(self, inputs: ProgramInputs) -> Floats:
        """What the trees make of every leaf, seconds (M)."""
        corrected = np.sum([trees.predict(inputs) for trees in self.trees_], 0)
        return np.asarray(inputs.leaf_s * np.exp(self.shift_ + corrected))

    def predict_interval(self, table: ProgramTable) -> tuple[Floats, Floats, Floats]:
        """Return seconds and the ends of the interval, each (N,)."""
        seconds = self.predict(table)
        row = on_cpus(table).astype(np.int64)
        factor = np.exp(self.quantiles_[row, np.searchsorted(RANGES_S, seconds)])
        return seconds, seconds / factor, seconds * factor

    def embed(self, table: ProgramTable) -> NDArray[np.float32]:
        """Return embeddings (N, E), as used to choose tasks of a new device.

        Those of the first network; of a model of trees alone the standardised summaries.
        """
        inputs = program_inputs(table, self.scale_)
        if self.networks_:
            found: NDArray[np.float32] = self.networks_[0].predict(table, inputs)[1]
            return found
        width = np.maximum(inputs.summary.std(0), 0.05)
        return np.asarray((inputs.summary - inputs.summary.mean(0)) / width, dtype=np.float32)

    def save(self, folder: str | Path, **facts: Any) -> dict[str, Any]:
        """Write ``weights.safetensors`` and ``card.json``; return the card.

        Args:
            folder: made if need be.
            facts: further entries of the card (data, split, errors).

        Raises:
            SpecError: the folder cannot be written.
        """
        tensors: dict[str, Any] = {f"parts.{k}": v for k, v in self.scale_.arrays().items()}
        tensors |= {f"known.{k}": v for k, v in self.known_.arrays().items()}
        tensors["quantiles"] = self.quantiles_
        for number, trees in enumerate(self.trees_):
            tensors |= {f"trees{number}.{k}": v for k, v in trees.arrays().items()}
        for number, network in enumerate(self.networks_):
            tensors |= {f"network{number}.{k}": v for k, v in network.arrays().items()}
        card = {
            "schema": SCHEMA,
            "kind": "programs",
            "features": FEATURE_VERSION,
            "device_features": list(DEVICE_FEATURES),
            "parameters": {**self.get_params(), "torch_device": "cpu"},
            "networks": len(self.networks_),
            "trees": len(self.trees_),
            "weight": self.weight_,
            "shift": self.shift_,
            "scale_devices": list(self.scale_.devices),
            "known": list(self.known_.devices),
            "copies": {name: list(rule) for name, rule in self.copies_.items()},
            "ranges_s": [limit for limit in RANGES_S if np.isfinite(limit)],
            **self.card_,
            **facts,
        }
        contiguous = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
        write_model(Path(folder), contiguous, card)
        return card

    @classmethod
    def load(cls, folder: str | Path, *, torch_device: str = "cpu") -> Self:
        """Read what `save` wrote.

        Raises:
            MissingDataError: no such folder.
            SpecError: weights of something else, of another version of the features, damaged, or
                not those of the card.
        """
        where = Path(folder)
        if not (where / "card.json").exists():
            raise MissingDataError(f"no program predictor in {where}", fix="foreplan train")
        card = read_card(where)
        for name, wanted in (("schema", SCHEMA), ("features", FEATURE_VERSION)):
            if card.get(name) != wanted:
                raise SpecError(
                    f"{where}/card.json: {name}", got=card.get(name), expected=str(wanted),
                    fix="train the model again with this version: foreplan train",
                )  # fmt: skip
        tensors = read_weights(where, card)
        try:
            return cls._built(card, tensors, torch_device)
        except MISFITS as error:
            raise SpecError(
                str(where), got=str(error), expected="weights that fit the card"
            ) from error

    @classmethod
    def _built(
        cls, card: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], torch_device: str
    ) -> Self:
        model = cls(**{**card["parameters"], "torch_device": torch_device})

        def part(prefix: str) -> dict[str, Any]:
            return {k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)}

        known = ("schema", "kind", "features", "device_features", "parameters", "networks",
                 "trees", "weight", "shift", "scale_devices", "known", "copies",
                 "ranges_s")  # fmt: skip
        model.card_ = {k: v for k, v in card.items() if k not in known}
        names = card["scale_devices"]
        model.scale_ = stored_scale(part("parts."), names, model.known_devices() if names else {})
        model.trees_ = [
            ProgramTrees.from_arrays(part(f"trees{number}.")) for number in range(card["trees"])
        ]
        model.networks_ = [
            ProgramTransformer.from_arrays(model.settings(number), part(f"network{number}."))
            for number in range(card["networks"])
        ]
        model.known_ = KnownPrograms.from_arrays(part("known."), card.get("known", ()))
        model.copies_ = {name: Copy(*rule) for name, rule in card.get("copies", {}).items()}
        sources = {rule.source for rule in model.copies_.values()} | set(model.known_.devices)
        if sources and not sources <= set(model.known_devices()):
            raise ValueError("known programs of devices that the card does not describe")
        model.weight_, model.shift_ = float(card["weight"]), float(card["shift"])
        if not (0 <= model.weight_ <= 1 and abs(model.shift_) < 100):
            raise ValueError(f"weight {model.weight_}, shift {model.shift_}")
        model.quantiles_ = tensors["quantiles"]
        if model.quantiles_.shape != (2, len(RANGES_S)):
            raise ValueError(f"quantiles of shape {model.quantiles_.shape}")
        return model

    def known_devices(self) -> dict[str, Device]:
        """Devices that were trained on, by name and by the part of it after the chip.

        Raises:
            SpecError: the card has none, or a field of one is wrong.
        """
        found: dict[str, Device] = {}
        items = self.card_.get("devices")
        if not isinstance(items, list):
            raise SpecError("card.json: devices", got=items, expected="a list of devices")
        for number, item in enumerate(items):
            device = validate(Device, item, f"card.json: devices[{number}]")
            found.setdefault(device.name.rpartition("/")[2], device)
            found[device.name] = device
        return found

    def settings(self, number: int) -> NetworkSettings:
        """Of the network of a group."""
        return NetworkSettings(
            width=self.width, layers=self.layers, epochs=self.epochs, batch=self.batch,
            learning_rate=self.learning_rate, positional=self.positional, bounded=self.bounded,
            cmd_weight=self.cmd_weight, domains=self.domains, torch_device=self.torch_device,
            seed=1000 * self.seed + number,
        )  # fmt: skip

    def fit_trees(self, inputs: ProgramInputs, seconds: Floats) -> ProgramTrees:
        """Trees on training rows."""
        return ProgramTrees.fit(
            inputs, seconds, rounds=self.rounds, depth=self.depth, learning_rate=self.tree_rate,
            threads=1, seed=self.seed, perceptron_epochs=self.perceptron_epochs,
        )  # fmt: skip

    def _network_logs(
        self, network: ProgramTransformer, table: ProgramTable, inputs: ProgramInputs
    ) -> Floats:
        """A network reads the parts as its own training rows weighed them."""
        own = ProgramScale(network.scales["parts"].astype(np.float64))
        return network.predict(table, program_inputs(table, own))[0]

    def floor(self, inputs: ProgramInputs) -> Floats:
        """Least that is predicted, seconds (N)."""
        return inputs.bound.bound_s if self.bounded else np.zeros(len(inputs.scale_s))


def program_seconds(inputs: ProgramInputs, leaf_s: Floats) -> Floats:
    """Sums over the leaves of each program (N)."""
    return np.asarray(np.add.reduceat(leaf_s, inputs.starts))
