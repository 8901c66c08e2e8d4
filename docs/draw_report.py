"""Trains the digits of docs/try.md, and takes the picture of their report.

    python -m docs.draw_report [--output docs/do/report.png]

Run from the root of a checkout; needs Chromium and Pillow. The file keeps the lines that the
command printed of score and fingerprint. `tests/test_docs.py` compares them with those that
docs/try.md shows for the same command, so that page and picture are of one run.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.execute import ROOT, environment
from PIL import Image
from PIL.PngImagePlugin import PngInfo

__all__ = ["COMMAND", "LINES", "main"]

OUTPUT = ROOT / "docs" / "do" / "report.png"
COMMAND = "onefold train classify --data digits --model lenet --epochs 10 --devices 2 --name digits"
LINES = re.compile(r"^(Best|Fingerprint): (.*)$", re.MULTILINE)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1100, 760
"""Size of the window in CSS pixels; the picture has twice as many in each direction."""


def main() -> None:
    """Train, and take the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="a PNG file")
    output: Path = parser.parse_args().output
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} was found: install Chromium")
    with tempfile.TemporaryDirectory() as folder:
        printed = trained(Path(folder))
        picture = Path(folder) / "report.png"
        page = (Path(folder) / "runs/digits/report.html").as_uri()
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
        options += [f"--window-size={WIDTH},{HEIGHT}", "--force-device-scale-factor=2"]
        options += ["--blink-settings=preferredColorScheme=1", f"--screenshot={picture}"]
        subprocess.run([browser, *options, page], check=True, capture_output=True, timeout=120)
        save(picture, printed, output)
    print(*(f"{name}: {text}" for name, text in printed.items()), output, sep="\n")


def trained(folder: Path) -> dict[str, str]:
    """Train below the folder; returns the lines that name score and fingerprint."""
    command = [sys.executable, "-m", *shlex.split(COMMAND)]
    done = subprocess.run(
        command, cwd=folder, env=environment(), check=True, capture_output=True, text=True
    )
    return dict(LINES.findall(done.stdout + done.stderr))


def save(picture: Path, printed: dict[str, str], output: Path) -> None:
    """Write the picture with few colors, and with the lines that belong to it."""
    notes = PngInfo()
    for name, text in printed.items():
        notes.add_text(name, text)
    colors = Image.open(picture).convert("RGB").quantize(256)
    colors.save(output, pnginfo=notes, optimize=True)


if __name__ == "__main__":
    main()
