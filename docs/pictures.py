"""Draw the pictures of ``docs/assets`` anew: three from notebooks, one of a report in Chromium.

``python docs/pictures.py [NAME ...]`` (default all); a few minutes. Needs ``chromium`` and
what ``make test`` installs.
"""

from __future__ import annotations

import base64
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
#: The notebook, and words of the title of the one cell that draws the picture.
FROM_NOTEBOOKS = {
    "linear": ("2_predictor", "predicted (solid) and roofline"),
    "bits": ("4_serving", "Bits by layer"),
    "bubbles": ("5_bubbles", "before: {before.name}"),
}
#: Commands in a folder of their own that end with ``report.html``, and the picture's height.
FROM_COMMANDS = {
    "report": (
        "foreplan plan serving -m llama-2-13b -d 2xl4,1xa10 "
        "-w batch=32,prompt_tokens=512,new_tokens=64,min_average_bits=8 -o plan.json && "
        "foreplan report plan.json -o report.html",
        1284,
    ),
}


def draw(notebook: str, words: str) -> bytes:
    """Execute a notebook and return what the cell with these words shows."""
    path = ROOT / "notebooks" / f"{notebook}.ipynb"
    document = nbformat.read(path, as_version=4)
    NotebookClient(document, timeout=600, resources={"metadata": {"path": path.parent}}).execute()
    (cell,) = (c for c in document.cells if c.cell_type == "code" and words in c.source)
    (image,) = (o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {}))
    return base64.b64decode(image)


def look(commands: str, height: int) -> bytes:
    """Run commands and return their report as a browser of 1200 pixels shows it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["bash", "-euc", commands], cwd=folder, check=True)
        subprocess.run(
            [
                shutil.which("chromium") or "chromium", "--headless", "--no-sandbox",
                "--disable-gpu", "--hide-scrollbars", f"--window-size=1200,{height}",
                "--screenshot=seen.png", "report.html",
            ],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
        return (Path(folder) / "seen.png").read_bytes()


def main(names: list[str]) -> None:
    """Draw the pictures named, or all."""
    for name in names or [*FROM_NOTEBOOKS, *FROM_COMMANDS]:
        made = draw(*FROM_NOTEBOOKS[name]) if name in FROM_NOTEBOOKS else look(*FROM_COMMANDS[name])
        file = ASSETS / f"{name}.png"
        # Flat colours: a palette is a third of the size and looks the same.
        Image.open(io.BytesIO(made)).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
            file, optimize=True
        )
        print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
