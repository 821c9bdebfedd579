"""A disk that is really full: a small tmpfs where one may be mounted, else a limit on files.

`write_paths` makes every act fail in turn; here the kernel refuses, wherever it comes to it.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Kilobytes of the disk: from too small for anything to room for some of the files.
SIZES = (4, 40)
#: Paths that write what is asked for, without measuring.
NAMES = ("plan", "export", "verify", "train", "dataset import")


def _write(folder: Path, refused: dict[str, str]) -> None:
    """Every path into a folder without room; what it said, and that what is there is whole."""
    from tests.robustness.write_path_cases import cases

    from foreplan.errors import ForeplanError

    for name in NAMES:
        path = cases()[name]
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        # What lies around the folder is written to the real disk beside it.
        try:
            if name != "train":
                path.prepare(folder)
            path.run(folder)
        except ForeplanError as error:
            refused[name] = str(error)
        except OSError:
            assert name in ("verify", "train"), "only what prepares the case may fail unsaid"
        assert not [p.name for p in folder.rglob(".*") if p.suffix == ".tmp"], name
        if name == "plan":
            path.whole(folder)


def _main(folder: Path, limit: int | None) -> None:
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    refused: dict[str, str] = {}
    _write(folder, refused)
    print(json.dumps(refused))


@pytest.mark.parametrize("size", SIZES)
def test_a_full_disk_is_said_and_leaves_no_halves(size: int, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    code = f"from tests.robustness.test_disk_full import _main, Path; _main(Path({str(folder)!r}), "
    mount = f"mount -t tmpfs -o size={size}k tmpfs {folder}"
    # The mount is in a namespace of its own and goes with its process.
    alone = ["unshare", "-m", "sh", "-c", mount + ' && exec "$@"', "sh"]
    can = shutil.which("unshare") and not subprocess.run(
        [*alone, "true"], capture_output=True, check=False
    ).returncode  # fmt: skip
    words = [sys.executable, "-c", code + ("None)" if can else f"{size << 10})")]
    done = subprocess.run(
        [*alone, *words] if can else words, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refused = json.loads(done.stdout.splitlines()[-1])
    assert refused
    assert all(len(line.splitlines()) == 1 for line in refused.values())
    assert all("No space left" in line or "too large" in line for line in refused.values())
