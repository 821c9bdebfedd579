"""Every command that writes, killed or failed at every act on a file, and resumed.

``python -m tests.robustness.write_paths`` compiles ``faults.c``, preloads it and runs, for each
path, a child that dies by SIGKILL at act n (a write is half done by then), one that gets EIO at act
n, and one that finds the disk full from act n on, for every n. After each: what was there before is
whole (`WritePath.whole`), a failed child ended with one line and left no temporary file, and a
second run resumes to the same end (`WritePath.finished`). Prints one JSON line a path.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.robustness.write_path_cases import cases

MODES = {"k": "killed", "e": "EIO", "f": "disk full"}
FAILED, WRONG = 3, 4


@dataclass
class Faults:
    """The preloaded counter."""

    library: ctypes.CDLL

    def arm(self, folder: Path, act: int, mode: str) -> None:
        """From now on count acts below ``folder``; at number ``act`` do what ``mode`` says."""
        self.library.faults_arm(
            os.fsencode(folder) + b"/", ctypes.c_long(act), ctypes.c_char(mode.encode())
        )

    def count(self) -> int:
        """Acts since then."""
        self.library.faults_count.restype = ctypes.c_long
        return int(self.library.faults_count())


def child(work: Callable[[], None], *, count: Callable[[], int] | None = None) -> tuple[int, int]:
    """Run in a fork; the wait status and, if asked for, a count."""
    hear, tell = os.pipe()
    process = os.fork()
    if process == 0:
        code = 0
        try:
            os.close(hear)
            work()
        except BaseException as error:
            from foreplan.errors import ForeplanError

            code = FAILED if isinstance(error, ForeplanError) else WRONG
            if code == WRONG:
                traceback.print_exc()
        if count is not None:
            os.write(tell, str(count()).encode())
        os._exit(code)
    os.close(tell)
    deadline = time.monotonic() + 120.0
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            raise TimeoutError("a child hangs")
        time.sleep(0.002)
    text = os.read(hear, 64)
    os.close(hear)
    return status, int(text or b"0")


def attempt(name: str, faults: Faults, every: int = 1) -> dict[str, object]:
    """All faults of one path."""
    path = cases()[name]
    with tempfile.TemporaryDirectory(prefix="foreplan-faults-") as parent:
        outside = Path(parent)
        folder = outside / "out"

        def fresh() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (outside / "log").write_text("")
            path.prepare(folder)

        def run(act: int, mode: str) -> Callable[[], None]:
            def work() -> None:
                faults.arm(folder, act, mode)
                path.run(folder)

            return work

        fresh()
        path.run(folder)  # here, so that no child has to import what the command needs
        fresh()
        status, acts = child(run(0, "-"), count=faults.count)
        assert status == 0, f"{name} fails by itself"
        path.finished(folder)
        clean = int((outside / "log").stat().st_size)
        counts = dict.fromkeys(MODES.values(), 0)
        for mode, word in MODES.items():
            for act in range(1, acts + 1, every):
                fresh()
                status, _ = child(run(act, mode))
                where = f"{name}: {word} at act {act} of {acts}"
                died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                ended = os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, FAILED)
                assert died if mode == "k" else ended, f"{where}: status {status}"
                left = [p.name for p in folder.rglob(".*") if p.suffix == ".tmp"]
                assert mode == "k" or not left, f"{where}: left {left}"
                path.whole(folder)
                status, _ = child(run(0, "-"))
                assert status == 0, f"{where}: does not resume"
                path.finished(folder)
                lost = int((outside / "log").stat().st_size) - clean
                assert lost <= path.may_repeat, f"{where}: {lost} measurements made again"
                counts[word] += 1
    return {"path": name, "acts": acts, **counts}


def main() -> int:
    """Run the command; start it anew under the preloaded counter if need be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", action="append", choices=sorted(cases()), help="only this one")
    parser.add_argument("--every", type=int, default=1, help="try every so many acts")
    chosen = parser.parse_args()
    library = os.environ.get("FOREPLAN_FAULTS")
    if library is None:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "faults.so"
            source = Path(__file__).with_name("faults.c")
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], check=True
            )
            environment = os.environ | {
                "LD_PRELOAD": str(made), "FOREPLAN_FAULTS": str(made),
                "OMP_NUM_THREADS": "1",  # a child has only the thread that forked it
            }  # fmt: skip
            again = [sys.executable, "-m", "tests.robustness.write_paths", *sys.argv[1:]]
            return subprocess.run(again, env=environment, check=False).returncode
    faults = Faults(ctypes.CDLL(library))
    for name in chosen.path or cases():
        print(json.dumps(attempt(name, faults, chosen.every)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
