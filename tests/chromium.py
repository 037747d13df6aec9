"""Opens a page in Chromium, without a window and without a network."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--dump-dom",
    # Of the page's own clock, which stands still while the page computes, however busy the machine is.
    "--virtual-time-budget=10000",
)
SECONDS = 120  # until it is ended, many times what a page takes


def find_chromium() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Opened(NamedTuple):
    """A page after its scripts ran. said: what it wrote to the console, a line each. dom: its elements, as HTML."""

    title: str
    said: list[str]
    picture: Path
    dom: str


def open_page(page: Path, folder: Path, *, width: int = 1200, height: int = 4300, dark: bool = False) -> Opened:
    """Draws the page in a window of this size, in pixels; files go to `folder`. Fails the test if it is not drawn."""
    program, picture = find_chromium(), folder / "page.png"
    assert program, "no Chromium; install it, such as with: apt-get install chromium"
    ours = f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}", f"--screenshot={picture}"
    scheme = ("--blink-settings=preferredColorScheme=0",) * dark
    done = subprocess.run(
        [program, *_OPTIONS, *ours, *scheme, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    shutil.rmtree(folder / "profile", ignore_errors=True)
    assert picture.exists(), done.stderr
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, "the page has no title"
    return Opened(title[1], re.findall(r'CONSOLE[:(][^"]*"(.*)", source:', done.stderr), picture, done.stdout)


def colored_pixels(picture: Path, color: str) -> list[tuple[int, int]]:
    """The pixels (x, y) of exactly this color, such as "#0072b2"."""
    from PIL import Image

    wanted = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
    with Image.open(picture) as opened:
        image = opened.convert("RGB")
        width, pixels = image.width, image.tobytes()
    found, start = [], pixels.find(bytes(wanted))
    while start >= 0:
        if start % 3 == 0:
            found.append((start // 3 % width, start // 3 // width))
        start = pixels.find(bytes(wanted), start + 1)
    return found
