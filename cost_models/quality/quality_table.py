"""`QualityTable`: what each layer of a trained model loses at each number of bits; a document.

Made once for a model (``foreplan quality``), read by every plan for it. It belongs to one set of
weights, by digest, and says how it was made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from foreplan.cost_models.quality.perplexity_curve import PerplexityCurve
from foreplan.datasets.models.model import Model
from foreplan.datasets.specs import StrictModel, load_document, nearest, validate
from foreplan.datasets.storage import write_atomically
from foreplan.datasets.torch_device import usable
from foreplan.errors import SpecError

if TYPE_CHECKING:
    from foreplan.cost_models.quality.quantised_decoder import QuantisedDecoder

FloatArray = npt.NDArray[np.float64]
Say = Callable[[str], None]

SCHEMA: Literal["foreplan.quality/1"] = "foreplan.quality/1"
Indicator = Literal["measured_kl", "fisher", "output_error", "variance_bound", "hessian", "weights"]
INDICATORS: tuple[Indicator, ...] = (
    "measured_kl", "fisher", "output_error", "variance_bound", "hessian", "weights"
)  # fmt: skip
#: Bits of a table unless the caller says otherwise; 16 is lossless.
BITS = (8, 4, 3)
#: Windows of calibration text, and tokens of each.
WINDOWS, LENGTH = 16, 256
#: Random plans behind the curve, and how many times more text they are measured on: a rise in
#: cross-entropy is far noisier than a divergence.
PLANS, MORE_TEXT = 16, 4
_MOST = 1e9
#: Tokens of calibration text that are read at most: more would take days.
_MOST_TOKENS = 1 << 24


class QualityTable(StrictModel):
    """Quality losses and where they come from.

    Attributes:
        schema_: format and version.
        model: its name.
        weights_digest: of the weights that were measured.
        indicator: see `foreplan.cost_models.quality.quality_indicators`.
        bits: of each column.
        omega: a row a layer; ``measured_kl`` and ``fisher`` in nats a token.
        text, text_digest: what was read; ``stdlib`` or a path.
        windows, length, seed: of the calibration text.
        curve: from a plan's sum to perplexity, ``None`` where the fit failed.
        cache_omega: what KV caches of 8 bits add to a plan's sum, in nats a token; ``None`` where
            it was not measured, as beside every indicator but ``measured_kl``.
    """

    schema_: Literal["foreplan.quality/1"] = Field(default=SCHEMA, alias="schema")
    model: str
    weights_digest: str
    indicator: Indicator
    bits: tuple[int, ...]
    omega: tuple[tuple[float, ...], ...]
    text: str
    text_digest: str
    windows: int = Field(gt=0)
    length: int = Field(gt=0)
    seed: int = Field(ge=0)
    curve: PerplexityCurve | None = None
    cache_omega: Annotated[float, Field(ge=0, le=_MOST)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> QualityTable:
        if any(len(row) != len(self.bits) for row in self.omega):
            raise ValueError("omega with one number for each of bits in every row")
        losses = np.array(self.omega, dtype=float)
        if losses.shape != (len(self.omega), len(self.bits)) or not self.omega:
            raise ValueError("omega with one number for each of bits in every row")
        if not ((losses >= 0) & (losses <= _MOST)).all():  # which no NaN is
            raise ValueError(f"losses from 0 to {_MOST:g}")
        if len(set(self.bits)) < len(self.bits) or not set(self.bits) <= set(range(1, 16)):
            raise ValueError("different bits below 16")
        return self

    def losses(self, bits: Sequence[int]) -> FloatArray:
        """``[layers, len(bits)]``; 16 bits lose nothing.

        Raises:
            SpecError: bits that the table lacks.
        """
        lacking = sorted(set(bits) - {16} - set(self.bits))
        if lacking:
            raise SpecError(
                "quality table", got=f"no {lacking[0]} bits", expected=f"{list(bits)}",
                fix="make it again with --bits",
            )  # fmt: skip
        table = np.array(self.omega)
        zero = np.zeros(len(table))
        columns = [zero if b == 16 else table[:, self.bits.index(b)] for b in bits]
        return np.stack(columns, axis=1)

    def check(self, model: Model) -> None:
        """Raise `SpecError` unless the table was made for these weights."""
        if len(self.omega) != model.layers or self.weights_digest != weights_digest(model):
            raise SpecError(
                "quality table", got=f"made for other weights ({self.model})",
                expected=f"those of {model.name}", fix="make it again: foreplan quality MODEL",
            )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document; never half of it."""
        document = self.model_dump(mode="json", by_alias=True)
        write_atomically(path, json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QualityTable:
        """Read a table.

        Raises:
            SpecError: no such file, or no quality table.
        """
        return validate(cls, load_document(Path(path)), Path(path).name)


def measure_quality(
    model: Model,
    text: str,
    *,
    indicator: str = "measured_kl",
    bits: Sequence[int] = BITS,
    windows: int = WINDOWS,
    length: int = LENGTH,
    seed: int = 0,
    device: str = "cpu",
    say: Say = lambda text: None,
) -> QualityTable:
    """Compute an indicator on a text's calibration part and fit its curve.

    Args:
        model: with trained weights.
        text: see `foreplan.datasets.text_tokens`.
        indicator: one of `INDICATORS`.
        bits: fewer than 16.
        windows: of text.
        length: tokens of each, cut to what the model attends to.
        seed: of windows, signs and draws.
        device: torch device; the whole model must fit there in fp32.
        say: hears progress.

    Raises:
        SpecError: random weights, an unknown indicator, other numbers of bits, more windows than
            can be read, a device that is not here, or a text that is too short.
    """
    from foreplan.cost_models.quality import quality_indicators as by
    from foreplan.cost_models.quality.quantised_decoder import STORAGE, QuantisedDecoder
    from foreplan.cost_models.quality.sensitivity import weight_sensitivity
    from foreplan.datasets.models import byte_text
    from foreplan.datasets.text_tokens import text_digest, text_tokens

    if indicator not in INDICATORS:
        guess = nearest(indicator, INDICATORS)
        raise SpecError(
            "indicator", got=indicator, expected=f"one of {', '.join(INDICATORS)}",
            fix=f"did you mean {guess!r}?" if guess else None,
        )  # fmt: skip
    chosen = next(name for name in INDICATORS if name == indicator)
    known = sorted(set(STORAGE) - {16})
    if not bits or len(set(bits)) < len(bits) or not set(bits) <= set(known):
        raise SpecError("bits", got=list(bits), expected=f"different numbers of {known}")
    if model.weights != "trained":
        raise SpecError(
            f"model {model.name}", got=f"{model.weights} weights",
            expected="trained ones: quality of random weights means nothing",
        )  # fmt: skip
    asked, length = length, min(length, model.max_sequence - 1)
    if windows * length > _MOST_TOKENS:
        raise SpecError(
            "windows", got=windows, expected=f"at most {_MOST_TOKENS // length} of {length} tokens"
        )
    tokens = text_tokens(model, text, "calibration")
    if len(tokens) <= length:
        raise SpecError(
            f"text {text}", got=f"{len(tokens)} tokens to calibrate on",
            expected=f"more than {length}", fix="give a longer text, or a smaller --length",
        )  # fmt: skip
    decoder = QuantisedDecoder(model, usable(device, "device"))
    ids = byte_text.windows(tokens, windows, length + 1, (seed,))
    seen = ids[:, :-1]
    if asked > length and asked != LENGTH:
        say(f"length {asked}: cut to {length}, as {model.name} attends to {model.max_sequence}")
    say(f"{chosen} on {seen.size} tokens")
    omega = {
        "measured_kl": lambda: by.measured_kl(decoder, seen, bits, say),
        "fisher": lambda: by.fisher(decoder, seen, bits, seed=seed),
        "output_error": lambda: by.output_error(decoder, seen, bits),
        "variance_bound": lambda: by.variance_bound(decoder, seen, bits),
        "hessian": lambda: by.hessian(decoder, ids, bits, seed=seed),
        "weights": lambda: weight_sensitivity(model, bits),
    }[chosen]()
    cache = _cache(decoder, seen, say) if chosen == "measured_kl" else None
    table = QualityTable(
        model=model.name, weights_digest=weights_digest(model), indicator=chosen, bits=tuple(bits),
        omega=tuple(tuple(float(v) for v in row) for row in omega), text=text,
        text_digest=text_digest(text), windows=windows, length=length, seed=seed,
        cache_omega=cache,
    )  # fmt: skip
    say(f"perplexity of {PLANS} random plans")
    ids = byte_text.windows(tokens, MORE_TEXT * windows, length + 1, (seed, 1))
    plans = [(16,) * model.layers, *by.random_plans(model.layers, bits, PLANS, seed)]
    found = by.plan_quality(decoder, ids, plans)
    column = {16: 0} | {b: i + 1 for i, b in enumerate(bits)}
    losses = table.losses((16, *bits))
    sums = [sum(losses[i, column[b]] for i, b in enumerate(plan)) for plan in plans[1:]]
    nats = found[0][1]
    try:
        curve = PerplexityCurve.fit(sums, [loss - nats for _, loss in found[1:]], nats)
    except SpecError as error:
        say(f"no curve: {error}")
        return table
    return table.model_copy(update={"curve": curve})


def _cache(decoder: QuantisedDecoder, ids: npt.NDArray[np.int64], say: Say) -> float | None:
    from foreplan.cost_models.quality.quality_indicators import cache_kl

    try:
        return cache_kl(decoder, ids)
    except SpecError as error:
        say(f"caches of 8 bits not measured: {error}")
        return None


def weights_digest(model: Model) -> str:
    """First 16 hex digits of the SHA-256 of a model's description and its last layer's weights.

    Raises:
        SpecError: a folder that cannot be read.
    """
    from foreplan.datasets.models.weights import open_weights

    described = model.model_dump_json(exclude={"path", "name"})
    digest = hashlib.sha256(described.encode())
    if model.weights == "trained":
        weights = open_weights(model)
        for name in weights.names(model.layers - 1):
            tensor = weights.tensor(model.layers - 1, name)
            digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()[:16]
