"""The site of the documents: each link of a page leads somewhere, and so does each entry of the menu."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="the site needs the docs extra")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """All that the site is made of, without the files of other kinds to which its pages link."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("data", "__pycache__"))
    for folder in ("docs", "docs/site"):
        (tmp_path / folder / "__pycache__").mkdir()
        (tmp_path / folder / "__pycache__" / "hooks.cpython-311.pyc").touch()
    for page in ROOT.glob("*.md"):
        shutil.copy(page, tmp_path)
    for name in ("tests", "ci", "examples", "CITATION.cff"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs" / "data").symlink_to(ROOT / "docs" / "data")
    return tmp_path


def build(tree: Path) -> subprocess.CompletedProcess[str]:
    config = tree / "docs" / "site" / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--config-file={config}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_links_lead_to_pages_of_the_site(tree: Path) -> None:
    done = build(tree)
    assert done.returncode == 0, done.stderr
    site = tree / "build" / "site"
    assert 'href="quickstart.html"' in (site / "index.html").read_text()  # README.md has docs/quickstart.md
    assert 'href="../contributing.html"' in (site / "internals" / "architecture.html").read_text()
    assert "<code>tests/test_kills.py</code>" in (site / "reliability.html").read_text()
    published = {path.suffix for path in site.rglob("*") if path.is_file()}
    assert published <= {".css", ".gz", ".html", ".js", ".json", ".map", ".png", ".svg", ".xml"}
    commands = (site / "commands.html").read_text()
    assert '<code>hadagen emit <span class="word">--n</span> 4096</code>' in commands  # no line ends after its hyphens


def test_a_dead_link_or_a_page_without_an_entry_is_an_error(tree: Path) -> None:
    dead = ("nowhere.md", "security.md#nowhere", "../README.md#nowhere", "../nowhere.py", "assets/nowhere.svg")
    with (tree / "docs" / "tuning.md").open("a", encoding="utf-8") as page:
        page.write("".join(f"\n[link]({target})\n" for target in dead))
    (tree / "docs" / "another.md").write_text("# Another\n", encoding="utf-8")
    done = build(tree)
    assert done.returncode
    assert done.stderr.count("'tuning.md' contains a link") == len(dead)
    assert "another.md" in done.stderr
