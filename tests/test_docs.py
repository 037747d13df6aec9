"""The documents: their numbers are those of the committed data, and what they name is there."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from command_line import succeed

ROOT = Path(__file__).resolve().parent.parent


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


refresh = load_script("refresh")


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README and measured tables in which hadagen is everywhere twice as fast as its peers."""
    names = ("OURS", "PEERS", "PICTURE", "README", "CALLS", "PERFORMANCE", "SEARCH", "SEARCH_PAGE", "SEARCH_PICTURE")
    for name in names:
        monkeypatch.setattr(refresh, name, tmp_path / Path(getattr(refresh, name)).name)
    (tmp_path / "README.md").write_text(f"before\n{refresh.BEGIN}\nold\n{refresh.END}\nafter\n")
    blocks = (refresh.CALLS_BEGIN, refresh.CALLS_END), (refresh.PITCHED_BEGIN, refresh.PITCHED_END)
    text = "\n".join(f"{begin}\n{refresh.NO_DATA}\n{end}" for begin, end in blocks)
    (tmp_path / "performance.md").write_text(f"a\n{text}\nb\n")
    (tmp_path / "search.md").write_text(f"a\n{refresh.SEARCH_BEGIN}\n{refresh.NO_DATA}\n{refresh.SEARCH_END}\nb\n")
    cells = [(n, elements, cache) for n in (128, 32768) for _, elements, cache in refresh.REGIMES]
    write_table(
        refresh.OURS,
        [
            {
                "numerics": numerics,
                "pitched": pitched,
                "kernel": "0a1b",
                "copy_us": 1.0,
                "us": 1 / speed,
                **cell(*place),
            }
            for numerics, pitched, speed in (("fast", 0, 1.0), ("accurate", 0, 0.5), ("fast", 1, 0.1))
            for place in cells
        ],
    )
    write_table(
        refresh.PEERS,
        [
            {"kernel": kernel, "copy_us": 1.0, "us": 2.0, **cell(*place)}
            for kernel in ("hadacore", "fast-hadamard-transform")
            for place in cells
        ],
    )
    return tmp_path


def cell(n: int, elements: int, cache: str) -> dict[str, object]:
    return {"dtype": "float16", "destination": "in-place", "n": n, "elements": elements, "cache": cache}


def write_table(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_the_readme_and_the_picture_are_up_to_date() -> None:
    assert refresh.outdated() == [], "run: make docs"


def test_refresh_writes_numbers_and_picture_once(documents: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the docs extra")
    assert refresh.outdated() == ["README.md", "speed.svg", "performance.md"]
    with pytest.raises(SystemExit, match=r"README.md, speed.svg, performance.md: out of date"):
        refresh.main(["--check"])
    refresh.main([])
    assert refresh.outdated() == []
    refresh.main(["--check"])
    readme = (documents / "README.md").read_text()
    assert readme.startswith(f"before\n{refresh.BEGIN}\n![")
    assert readme.endswith(f"{refresh.END}\nafter\n")
    worst = "float16, n = 128, 64 K elements, in-place, hot"
    assert f"| `accurate` / HadaCore | 1.00 | 1.00 | 0 of 6 cells | 1.00: {worst} |" in readme
    assert f"| `fast` / fast-hadamard-transform | 2.00 | 2.00 | 0 of 6 cells | 2.00: {worst} |" in readme
    performance = (documents / "performance.md").read_text()
    assert "| 64 K elements, in L2: fast | – | 0.10 | – | – | – | – | – | 0.10 |" in performance
    assert "| 64 K elements, in L2: hadagen, fast | – | 1.00 | – | – | – | – | – | 1.00 |" in readme
    picture = (documents / "speed.svg").read_bytes()
    ElementTree.fromstring(picture)
    refresh.main([])
    assert (documents / "speed.svg").read_bytes() == picture


def test_one_odd_time_of_a_copy_changes_nothing(documents: Path) -> None:
    times, table = refresh.read_times(refresh.OURS, refresh.PEERS), refresh.OURS.read_text()
    refresh.OURS.write_text(table.replace("0a1b,1.0,", "0a1b,1.4,", 1))
    assert refresh.OURS.read_text() != table
    assert refresh.read_times(refresh.OURS, refresh.PEERS) == times


def test_a_changed_table_outdates_both(documents: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the docs extra")
    refresh.main([])
    refresh.OURS.write_text(refresh.OURS.read_text().replace("2.0", "2.5"))
    assert refresh.outdated() == ["README.md", "speed.svg"]


def test_the_cost_of_calls(documents: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the docs extra")
    refresh.main([])
    data = {"gpu": "NVIDIA H100", "python": "3.12.1", "torch": "2.11.0", "tensor": "[64, 128] float16"}
    refresh.CALLS.write_text(json.dumps({**data, "us": {"in place": 4.56, "out of place": 7}, "ms": {"first": 31.4}}))
    assert refresh.outdated() == ["performance.md"]
    refresh.main([])
    assert refresh.outdated() == []
    text = (documents / "performance.md").read_text()
    begin = f"a\n{refresh.CALLS_BEGIN}\nOn a NVIDIA H100, with Python 3.12.1 and PyTorch 2.11.0, for a [64, 128]"
    assert text.startswith(begin)
    assert "| in place | 4.6 |\n| out of place | 7.0 |\n" in text
    assert "| once in a process | ms |\n| --- | ---: |\n| first | 31 |\n" in text
    (documents / "performance.md").write_text("no markers")
    with pytest.raises(SystemExit, match=r"performance.md has no .* put the two markers back"):
        refresh.outdated()


def test_the_curves_of_searches(documents: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs the docs extra")
    refresh.main([])
    assert not refresh.SEARCH_PICTURE.exists()
    curves = {"hadagen": [0.5] * 59 + [0.99], "random": [0.4] * 59 + [0.9]}
    theirs = {"pso": [0.45] * 59 + [0.95]}
    data = {
        "environment": {"gpu": "NVIDIA H100", "driver": "580", "nvcc": "13.0"},
        "versions": {"optuna": "5.0", "kernel_tuner": "1.5"},
        "seeds": 20,
        "problems": [{"name": "n8-float16-fast", "variants": 300, "budget": 60}],
        "hadagen": {name: {"curve": curve, "at_budget": [curve[-1]]} for name, curve in curves.items()},
        "kernel_tuner": {name: {"curve": curve, "at_budget": [curve[-1]]} for name, curve in theirs.items()},
        "kernel_tuner_others": {"mls": 0.9312},
    }
    refresh.SEARCH.write_text(json.dumps(data))
    assert refresh.outdated() == ["search.md", "search.svg"]
    refresh.main([])
    assert refresh.outdated() == []
    text = refresh.SEARCH_PAGE.read_text()
    assert "| evaluations | hadagen | random | Kernel Tuner: pso |" in text
    assert "| 40 | 0.500 | 0.400 | 0.450 |\n| **budget** | 0.990 | 0.900 | 0.950 |" in text
    assert "| n8-float16-fast | 300 | 60 | 0.990 | 0.900 | 0.950 |" in text
    assert "after the budget: mls 0.931." in text
    ElementTree.fromstring(refresh.SEARCH_PICTURE.read_bytes())
    refresh.SEARCH.write_text(json.dumps({**data, "seeds": 10}))
    assert refresh.outdated() == ["search.md", "search.svg"]


def test_a_comparison_without_recordings_or_kernel_tuner_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("compare_search")
    monkeypatch.setattr("sys.argv", ["compare_search.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"holds no recordings .* make them with hadagen record"):
        script.main()
    (tmp_path / "a.jsonl.gz").touch()
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Kernel Tuner is not installed; install it with: pip install kernel-tuner"):
        script.main()


def test_without_a_table_there_is_nothing_to_refresh(documents: Path) -> None:
    refresh.OURS.unlink()
    with pytest.raises(SystemExit, match="is missing; make it with hadagen bundle export"):
        refresh.main([])
    (documents / "README.md").write_text("no markers")
    with pytest.raises(SystemExit, match="put the two markers back"):
        refresh.outdated()


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{page}.md" for page in ("architecture", "performance", "search", "compat")),
    ],
)
def test_what_a_document_names_is_there(name: str) -> None:
    text = (ROOT / name).read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert ((ROOT / name).parent / link).exists(), link
    for target in re.findall(r"^make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for command in set(
        re.findall(r"\bhadagen ([a-z]+)\b(?! =)", "\n".join(re.findall(r"`[^`]+`|^hadagen.*$", text, re.M)))
    ):
        assert "Usage: " in succeed(command, "--help")


def test_the_architecture_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    modules = [path.stem for path in (ROOT / "hadagen").glob("*.py") if path.stem != "__init__"]
    rooms = [path.parent.name for path in (ROOT / "hadagen").glob("*/__init__.py")]
    missing = [name for name in [*modules, *rooms, "cli", "templates", "tuning_db"] if f"`{name}`" not in text]
    assert not missing
