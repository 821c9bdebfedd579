"""Text as a model's tokens, in two parts that share nothing: to calibrate on, and to judge by.

``stdlib`` is the source of Python's standard library, split by file (see `byte_text`): neither part
is what our byte-level models were trained on. Any other source is a text file; its last fifth
judges. A model folder with a tokenizer uses it; a model of 256 tokens without one reads bytes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from foreplan.datasets.graphs.decoder_module import LOCAL_DATA
from foreplan.datasets.models.byte_text import standard_library_text
from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError

Part = Literal["calibration", "held_out"]
IntArray = npt.NDArray[np.int64]

STANDARD_LIBRARY = "stdlib"
#: Share of a text file that judges.
_HELD_OUT = 0.2


def text_tokens(model: Model, source: str, part: Part) -> IntArray:
    """Tokens of one part of a text.

    Args:
        model: its folder's tokenizer is used; with a vocabulary of 256 and none, a token is a byte.
        source: ``stdlib`` or a path.
        part: see the module.

    Returns:
        int64 ``[tokens]``, in the order of the text.

    Raises:
        SpecError: no such file, no UTF-8, or no way to read text for this model.
        MissingDataError: ``stdlib`` where Python came without sources.
    """
    if source == STANDARD_LIBRARY:
        split = standard_library_text("validation" if part == "calibration" else "test")
        content = split.tobytes()
    else:
        content = _file_part(Path(source), part)
    folder = None if model.path is None else Path(model.path)
    if folder is not None and any((folder / n).is_file() for n in _TOKENIZERS):
        return _tokenized(folder, content)
    if model.vocab != 256:
        raise SpecError(
            f"model {model.name}", got=f"a vocabulary of {model.vocab} and no tokenizer",
            expected=f"one of {', '.join(_TOKENIZERS)} in its folder",
        )  # fmt: skip
    return np.frombuffer(content, np.uint8).astype(np.int64)


def text_digest(source: str) -> str:
    """First 16 hex digits of the SHA-256 of a whole text, for provenance.

    Raises:
        SpecError: no such file.
    """
    digest = hashlib.sha256()
    if source == STANDARD_LIBRARY:
        for split in ("validation", "test"):
            digest.update(standard_library_text(split).tobytes())
    else:
        digest.update(_read(Path(source)))
    return digest.hexdigest()[:16]


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"text {path}", got=error.strerror, expected=f"a text file or {STANDARD_LIBRARY}"
        ) from error


def _file_part(path: Path, part: Part) -> bytes:
    content = _read(path)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"text {path}", got=f"bytes that are not UTF-8 (at byte {error.start})",
            expected=f"a text file or {STANDARD_LIBRARY}",
        ) from None  # fmt: skip
    # Whole lines, so that no character of several bytes is cut in two.
    cut = content.rfind(b"\n", 0, int(len(content) * (1 - _HELD_OUT))) + 1
    return content[:cut] if part == "calibration" else content[cut:]


def _tokenized(folder: Path, content: bytes) -> IntArray:
    import transformers

    load: Any = transformers.AutoTokenizer.from_pretrained
    try:
        tokenizer: Any = load(str(folder), **LOCAL_DATA)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{folder}", got=str(error).splitlines()[0], expected="a tokenizer that can be read"
        ) from error
    ids = tokenizer(content.decode("utf-8", "replace"), add_special_tokens=False)["input_ids"]
    return np.asarray(ids, np.int64)
