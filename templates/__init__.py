"""The texts that kernels are made of: Jinja2 templates, the headers they include, and the host's machine."""

from __future__ import annotations

from importlib.resources import files


def read_texts(*folders: str) -> dict[str, str]:
    """All files of these folders here, by file name."""
    return {
        item.name: item.read_text("utf-8")
        for folder in folders
        for item in sorted((files(__name__) / folder).iterdir(), key=lambda item: item.name)
        if item.is_file()
    }
