"""The pictures of the documents: their colors."""

import re
from pathlib import Path

import pytest
import refresh_files as files

DARK_PAGE = "#0d1117"  # of GitHub


def luminance(color: str) -> float:
    """Of a color such as "#0d1117", as WCAG defines it."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(
    "picture", [files.PICTURE, files.SEARCH_PICTURE, files.ACTIVATIONS_PICTURE], ids=lambda path: path.stem
)
def test_a_picture_is_legible_on_light_and_on_dark_pages(picture: Path) -> None:
    colors = set(re.findall("#[0-9a-f]{6}", picture.read_text(encoding="utf-8")))
    assert len(colors) > 2
    for color in colors:
        own = luminance(color) + 0.05
        assert min(1.05 / own, own / (luminance(DARK_PAGE) + 0.05)) > 3, color
