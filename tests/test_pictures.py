"""The pictures of the documents, and the charts of a report: their colors."""

import re
from pathlib import Path

import pytest
import refresh_files as files

from hadagen.report.drawing.charts import ACCENT, COLORS, FAINT, TEXT

DARK_PAGE = "#0d1117"  # of GitHub


def luminance(color: str) -> float:
    """Of a color such as "#0d1117", as WCAG defines it."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrasts(light: str, dark: str) -> float:
    """The smaller contrast of two colors: of one on white, and of the other on the dark page."""
    return min(1.05 / (luminance(light) + 0.05), (luminance(dark) + 0.05) / (luminance(DARK_PAGE) + 0.05))


def filtered(color: str) -> str:
    """What the page makes of a color on a dark page: invert(1) hue-rotate(180deg), as CSS defines them."""
    red, green, blue = (255 - int(color[i : i + 2], 16) for i in (1, 3, 5))
    rows = (-0.574, 1.43, 0.144), (0.426, 0.43, 0.144), (0.426, 1.43, -0.856)
    turned = (round(r * red + g * green + b * blue) for r, g, b in rows)
    return "#" + "".join(f"{min(255, max(0, part)):02x}" for part in turned)


@pytest.mark.parametrize("color", [*COLORS.values(), ACCENT, FAINT, TEXT])
def test_a_chart_is_legible_on_light_and_on_dark_pages(color: str) -> None:
    assert contrasts(color, filtered(color)) > 3


@pytest.mark.parametrize(
    "picture",
    [files.PICTURE, files.SEARCH_PICTURE, files.ACTIVATIONS_PICTURE, files.LAYER_PICTURE],
    ids=lambda path: path.stem,
)
def test_a_picture_is_legible_on_light_and_on_dark_pages(picture: Path) -> None:
    colors = set(re.findall("#[0-9a-f]{6}", picture.read_text(encoding="utf-8")))
    assert len(colors) > 2
    for color in colors:
        assert contrasts(color, color) > 3, color
