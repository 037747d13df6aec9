"""Pages of the site from files outside of docs, and links from pages to such files."""

from __future__ import annotations

import re
from os.path import normpath, relpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:)([^()#\s]+)(#[^()\s]*)?\)")

CODE = re.compile(r"(?s)<pre.*?</pre>|<code>([^<]*)</code>")
WITH_HYPHENS = re.compile(r"(?<!\S)(?=\S*-)\S{1,28}(?!\S)")  # options; what is longer may break where it must


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie outside of docs."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files into links to their pages, and into the file's path if the site has no page of it."""
    folder = Path(page.file.abs_src_path or "").parent

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], Path(normpath(folder / found[2])), found[3] or ""
        if not target.is_relative_to(ROOT) or not target.exists():
            return found[0]  # which MkDocs refuses
        name = target.relative_to(ROOT).as_posix()
        uri = PAGES.get(name, name.removeprefix("docs/"))
        file = files.get_file_from_path(uri)
        if file and file.inclusion.is_included():
            return f"[{text}]({relpath(uri, Path(page.file.src_uri).parent)}{anchor})"
        return f"`{name}`"

    return LINK.sub(link, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keeps words of code on one line, which browsers break after each hyphen."""

    def keep(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        return "<code>" + WITH_HYPHENS.sub(r'<span class="word">\g<0></span>', found[1]) + "</code>"

    return CODE.sub(keep, html)
