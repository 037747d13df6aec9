"""Makes the picture of a report in the documents: what Chromium shows of the page of the shipped bundle.

python docs/picture_report.py     # needs pip install '.[report]', and Chromium on PATH
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from refresh_files import DOCS, OURS

PICTURE = DOCS / "assets" / "report.png"
WIDTH, HEIGHT = 1200, 1245  # pixels: down to the charts of the speed over n
COLORS = 128  # which keeps the file small


def main() -> None:
    from PIL import Image

    with TemporaryDirectory() as folder:
        page, picture = Path(folder, "report.html"), Path(folder, "report.png")
        subprocess.run([sys.executable, "-m", "hadagen.cli", "report", OURS, "-o", page], check=True)
        page.write_text(page.read_text(encoding="utf-8").replace(str(OURS), OURS.name), encoding="utf-8")
        shown = "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"
        ours = f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}"
        subprocess.run(["chromium", *shown, *ours, page.as_uri()], check=True, capture_output=True, timeout=120)
        with Image.open(picture) as image:
            image.convert("RGB").quantize(COLORS).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
