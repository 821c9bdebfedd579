"""Text as tokens, in two parts that share nothing."""

import numpy as np
import pytest

from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.text_tokens import text_digest, text_tokens
from foreplan.errors import SpecError

BYTES = load_model("demo-llama-random").model_copy(update={"vocab": 256})


def test_a_file_is_cut_once_between_lines(tmp_path):
    lines = [f"line {i} \u00e4\n".encode() for i in range(50)]
    file = tmp_path / "text.txt"
    file.write_bytes(b"".join(lines))
    first, last = (text_tokens(BYTES, str(file), part) for part in ("calibration", "held_out"))
    assert np.concatenate([first, last]).astype(np.uint8).tobytes() == file.read_bytes()
    assert first[-1] == last[-1] == ord("\n")
    assert len(last) == pytest.approx(0.2 * file.stat().st_size, abs=max(map(len, lines)))


def test_the_standard_library_s_parts_are_other_files():
    first, last = (text_tokens(BYTES, "stdlib", part) for part in ("calibration", "held_out"))
    assert first.dtype == np.int64
    assert first.min() >= 0
    assert first.max() < 256
    assert min(len(first), len(last)) > 1 << 17
    assert not np.array_equal(first[:4096], last[:4096])


def test_a_digest_belongs_to_the_content(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\n")
    before = text_digest(str(file))
    file.write_text("two\n")
    assert len(before) == 16
    assert text_digest(str(file)) != before
    assert text_digest("stdlib") == text_digest("stdlib") != before


def test_bad_texts_say_what_they_lack(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        text_tokens(BYTES, str(tmp_path / "none"), "held_out")
    (tmp_path / "bytes").write_bytes(b"abc\xff\n")
    with pytest.raises(SpecError, match="not UTF-8 \\(at byte 3\\)"):
        text_tokens(BYTES, str(tmp_path / "bytes"), "calibration")
    with pytest.raises(SpecError, match="no tokenizer"):
        text_tokens(load_model("llama-2-7b"), "stdlib", "held_out")
