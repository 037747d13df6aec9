"""The Makefile, the tests with other releases of PyTorch, and the wheel of a release."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch_releases
import yaml
from running import script
from signing_keys import make_key
from slow import LONGEST, SAMPLED, slow_cases, turn
from sums import NEEDS_GPU_PROPERTY, lines
from torch_releases import Failing, Listed, listed

import conftest
from hadagen.problem.target import known_archs
from hadagen.tuning_db.bundle import Bundle, shipped
from hadagen.tuning_db.signatures import public_keys

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no make had started the tests: it hands its options and variables on."""
    for name in ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)


def commands(target: str, venv: Path, *variables: str) -> str:
    """What make would run."""
    command = ["make", "-n", target, f"VENV={venv}", *variables]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_arch_of_a_tune_may_be_the_name_of_a_gpu(tmp_path: Path) -> None:
    assert commands("tune", tmp_path, "PY=python3", "ARCH=RTX 4090").endswith("tune --arch 'RTX 4090' \n")
    assert commands("tune", tmp_path, "PY=python3").split()[-1] == "tune"


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("tune", {"tune", "nvrtc"}),
        ("test", {"tune", "nvrtc", "fleet", "report", "sign", "test"}),
        ("torch-test", {"tune", "nvrtc", "fleet", "report", "sign", "test"}),
        ("lint", {"tune", "fleet", "report", "sign", "test", "lint"}),
        ("docs", {"docs"}),
        ("site", {"docs"}),
        ("release", {"sign"}),
        ("setup", {"tune", "nvrtc", "fleet", "report", "sign", "test", "lint", "docs"}),
    ],
)
def test_a_target_installs_what_it_needs(target: str, extras: set[str], tmp_path: Path) -> None:
    (found,) = re.findall(r"--constraint ci/constraints\.txt .*'\.\[(.*)\]'", commands(target, tmp_path))
    assert set(found.split(",")) - {"nvcc"} == extras
    assert " install " not in commands(target, tmp_path, "PY=python3")


def test_make_alone_lists_every_target_within_80_columns() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert all(len(line) < 80 for line in listed)
    phony = re.findall(r"(?m)^\.PHONY: ([a-z -]+)$", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert {line.split()[0] for line in listed} == set(" ".join(phony).split())


@pytest.mark.parametrize(
    ("ends", "passes"),
    [
        ("echo '9 new trials (9 ok)'", True),
        ("kill -SEGV $$", False),
        ("exit 1", False),
        ("echo '9 new trials (8 ok, 1 wrong_answer)'", False),
    ],
)
def test_a_change_does_not_land_if_a_tune_fails(ends: str, passes: bool, tmp_path: Path) -> None:
    """ends: how the tune ends."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    script(tmp_path / "bin" / "chromium")
    script(tmp_path / "bin" / "make", 'echo "$1" >> made', f'case "$1" in tune) {ends};; esac')
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == passes, done.stderr
    made = (tmp_path / "made").read_text().split()
    assert made[:3] == ["lint", "site", "tune"]
    assert ("test" in made) == passes


def test_a_release_needs_a_key() -> None:
    command = ["make", "release", "PY=python3", "RELEASE=/nonexistent"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "a release needs the private key that signs its bundles: make release KEY=key.pem" in done.stderr


def test_what_is_installed_is_not_installed_again_but_in_another_checkout(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(shutil.which("true") or "")
    (tmp_path / "made").write_text(f"{ROOT}\n")
    for stamp in ("builds", "has-docs"):
        (tmp_path / stamp).touch()
    assert " install " not in commands("docs", tmp_path)
    assert " install " in commands("test", tmp_path)
    assert "venv" not in commands("test", tmp_path).replace(str(tmp_path), "")
    (tmp_path / "made").write_text("/elsewhere\n")
    assert "-m venv --clear" in commands("docs", tmp_path)


@pytest.mark.parametrize("target", ["test", "long-test"])
def test_long_files_come_first(target: str, tmp_path: Path) -> None:
    assert all((ROOT / "tests" / file).exists() for file in LONGEST)
    assert sorted([LONGEST[1], "test_plan.py", LONGEST[0]], key=turn) == [*LONGEST[:2], "test_plan.py"]
    assert "--dist loadfile --no-loadscope-reorder" in commands(target, tmp_path, "PY=python3")


@pytest.mark.parametrize("name", SAMPLED)
def test_every_slow_test_exists(name: str) -> None:
    file, function = name.split("::")
    assert re.search(rf"(?m)^def {function}\(", next(ROOT.glob(f"*/{file}")).read_text())


def test_one_of_so_many_cases_is_no_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLED, "a::b", 2)
    monkeypatch.setitem(SAMPLED, "a::c", 0)
    assert slow_cases(["a::b[/]", "x/a::b[1]", "a::d", "a::b[2]", "a::c"]) == {1, 4}


def test_every_slow_test_runs_in_one_of_the_checks_of_a_change(tmp_path: Path) -> None:
    """`nvrtc-test` runs its files as a whole, and `long-test` the slow tests of all others."""
    test, long_test, nvrtc_test = (
        commands(target, tmp_path, "PY=python3") for target in ("test", "long-test", "nvrtc-test")
    )
    assert "-m 'not slow'" in test
    assert "-m slow" in long_test
    assert "slow" not in nvrtc_test
    assert set(re.findall(r"--ignore=(\S+)", long_test)) == set(re.findall(r"tests/test_\w+\.py", nvrtc_test))
    of_a_change = (ROOT / ".ci" / "run").read_text()
    assert all(f"make {target}" in of_a_change for target in ("test", "long-test", "nvrtc-test"))


# ---- the end of a run of tests ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("jobs", ["0", "2"])
def test_the_last_lines_say_what_ran_and_what_comes_next(jobs: str) -> None:
    """Tests of a kernel and of a GPU, in one process or two."""
    chosen = "infinity_comes_out_as_nan_where or gpu_laws or (a_row_grants_nothing and gpu)"
    files = "tests/test_emulator.py", "tests/test_gpu_laws.py", "tests/test_imports.py"
    command = [sys.executable, "-m", "pytest", f"-n{jobs}", "-pno:cacheprovider", "--next=make x", f"-k{chosen}"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    counted, ran, skipped, following = done.stdout.splitlines()[-4:]
    assert "4 passed, 1 skipped" in counted
    assert ran == "Kernels that ran on the CPU, in the emulator: 3."
    assert skipped == "Tests that need a GPU: 1 skipped. On a machine with a GPU, run: make gpu-test"
    assert following == "Next: make x."


def test_the_last_lines_say_what_to_do_about_failures_and_nothing_after_an_interruption() -> None:
    of_gpu = SimpleNamespace(user_properties=[(NEEDS_GPU_PROPERTY, True)])
    other = SimpleNamespace(user_properties=[], keywords={"gpu": 1})
    stats = {"passed": [of_gpu, of_gpu, other], "failed": [other]}
    ran = ["Tests that need a GPU: 2 passed."]
    assert list(lines(stats, 1, 0, "make x")) == [*ran, "To run only the tests that failed, add: PYTEST=--last-failed"]
    assert list(lines(stats, 2, 0, "make x")) == ran


def test_a_part_of_the_tests_is_not_summed_up(tmp_path: Path) -> None:
    for target in ("test", "long-test", "gpu-test"):
        assert "--next 'make " in commands(target, tmp_path, "PY=python3")
        assert "--next" not in commands(target, tmp_path, "PY=python3", "PYTEST=tests/test_plan.py")


# ---- other releases of PyTorch ---------------------------------------------------------------------------------------
TESTS = """
import pytest

def test_right():
    pass

@pytest.mark.parametrize("text", ["a::b", "[c]"])
def test_text(text):
    assert "{}" not in text
"""
IDS = {"tests/test_x.py::test_right", "tests/test_x.py::test_text[a::b]", "tests/test_x.py::test_text[[c]]"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one file of tests, and two releases that are "installed" without a download."""

    def install(environment: Path, release: str) -> str:
        python = environment / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
        python.chmod(0o755)
        return "it cannot be installed" if release == "0.9" else ""

    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(TESTS.replace("{}", "z"), encoding="utf-8")
    monkeypatch.setattr(torch_releases, "ROOT", tmp_path)
    monkeypatch.setattr(torch_releases, "listed", lambda: Listed(("1.0", "2.0"), ("test_x.py",), ()))
    monkeypatch.setattr(torch_releases, "_install", install)
    monkeypatch.setattr(sys, "argv", ["torch_releases.py", "--jobs=0", f"--folder={tmp_path / 'torch'}"])
    return tmp_path


def test_all_releases_run_all_tests_and_leave_nothing(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert torch_releases.main() == 0
    said = capfd.readouterr().out
    assert all(f"PyTorch {release}: all tests pass" in said for release in ("1.0", "2.0"))
    assert list((project / "torch").iterdir()) == []


def test_a_release_that_cannot_be_installed_is_a_failure(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_releases, "listed", lambda: Listed(("0.9",), ("test_x.py",), ()))
    assert torch_releases.main() == 1
    assert "PyTorch 0.9: it cannot be installed" in capfd.readouterr().out


def test_tests_that_fail_or_do_not_run_are_failures(project: Path) -> None:
    environment = project / "torch" / "1.0"
    torch_releases._install(environment, "1.0")
    assert torch_releases._collected() == IDS
    assert torch_releases._test(environment, IDS, 0) == ""
    more = {*IDS, "tests/test_x.py::Group::test_more[1]"}
    assert torch_releases._test(environment, more, 0) == "1 tests do not run, such as tests.test_x.Group::test_more[1]"
    (project / "tests" / "test_x.py").write_text(TESTS.replace("{}", "c"), encoding="utf-8")
    assert torch_releases._test(environment, IDS, 0) == "1 of 3 tests fail"


def test_entries_of_the_list_name_tests_and_releases() -> None:
    entries = [
        Failing("tests/test_x.py::test_text[*]", ("1.0",), ""),
        Failing("tests/test_x.py::test_right*", ("1.1",), ""),
        Failing("tests/test_x.py::test_text[?]", ("1.0",), ""),
    ]
    assert [[each.covers(test) for test in sorted(IDS)] for each in entries[::2]] == [[False, True, True], [False] * 3]
    assert list(Listed(("1.0",), (), tuple(entries)).faults(IDS)) == [
        "tests/test_x.py::test_right* is said to fail with 1.1, which is none of the listed releases",
        "tests/test_x.py::test_text[?] is listed as failing, and there is no such test",
    ]
    assert all((torch_releases.ROOT / "tests" / file).exists() for file in listed().files)


def test_a_listed_test_that_passes_is_an_error(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[Any] = []
    item: Any = SimpleNamespace(nodeid="tests/x.py::t", add_marker=marks.append, get_closest_marker=lambda name: None)
    monkeypatch.setattr(conftest, "failing_here", lambda: [Failing("tests/x.py::*", ("1.0",), "a reason")])
    conftest.pytest_collection_modifyitems(request.config, [item])
    ((mark,),) = [marks]
    assert (mark.name, mark.kwargs) == ("xfail", {"reason": "a reason", "strict": True})


def test_documents_name_the_tested_releases() -> None:
    pinned = re.findall(r"^torch==(.*)$", (ROOT / "ci" / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    minors = sorted((release.rsplit(".", 1)[0] for release in (*listed().releases, *pinned)), key=minor)
    tested = f"with PyTorch {', '.join(minors[:-1])} and {minors[-1]},"
    assert tested in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def minor(release: str) -> int:
    return int(release.split(".")[1])


# ---- the version -----------------------------------------------------------------------------------------------------
def version(folder: Path) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "setuptools_scm"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_version_is_of_the_tag_in_archives_too_and_a_copy_has_one(tmp_path: Path) -> None:
    checkout, archive, copy = (tmp_path / name for name in ("checkout", "archive", "copy"))
    for folder in (checkout, archive, copy):
        folder.mkdir()
    for name in ("pyproject.toml", ".gitattributes", ".git_archival.txt"):
        shutil.copy(ROOT / name, checkout)
        shutil.copy(ROOT / name, copy)

    def git(*arguments: str) -> None:
        person = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *person, *arguments], cwd=checkout, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    assert version(checkout).startswith("0.1.dev1+g")
    git("tag", "v1.2.3")
    git("archive", f"--output={tmp_path / 'a.tar'}", "HEAD")
    shutil.unpack_archive(tmp_path / "a.tar", archive)
    assert (version(checkout), version(archive), version(copy)) == ("1.2.3", "1.2.3", "0.0")
    git("commit", "--allow-empty", "-m", "b")
    assert version(checkout).startswith("1.2.4.dev1+g")


def test_the_citation_has_what_its_format_requires() -> None:
    """https://github.com/citation-file-format/citation-file-format: the required keys, in the version of the schema."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert all(isinstance(citation[key], str) and citation[key] for key in ("message", "title"))
    assert all(author["name"] for author in citation["authors"])
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nlicense = "{citation["license"]}"\n' in project
    assert citation["type"] == "software"


def test_a_version_of_the_changelog_fits_a_screen() -> None:
    _, *versions = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## [")
    assert versions
    assert all(len(each.splitlines()) <= 50 for each in versions)


# ---- the wheel -------------------------------------------------------------------------------------------------------
ROOMS = {"hadagen": "hadagen", "templates": "hadagen/templates", "tuning_db": "hadagen/tuning_db", "cli": "hadagen/cli"}
# All that a bare install has, for lack of NumPy or Jinja2; the others are what importing PyTorch needs.
BARE = ("torch", "torchgen", "functorch", "click", "pynvml")
OF_TORCH = ("typing_extensions", "sympy", "mpmath", "networkx", "filelock", "fsspec")

SMOKE = """
import sys, torch, hadagen
from hadagen.compat.fast_hadamard_transform import hadamard_transform, hadamard_transform_28N, hadamard_transform_ref
from hadagen.compat.hadacore import hadacore_transform

for m in (8, 12):
    x = torch.randn(3, m, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(hadamard_transform(x), hadamard_transform_ref(x))
    hadamard_transform(x).sum().backward()
z = torch.randn(3, 64)
torch.testing.assert_close(hadacore_transform(hadacore_transform(z.clone())), z)
assert hadagen.hadamard_transform(z, inplace=True) is z
r = hadagen.Rotation(112, signs=[1, -1] * 56)
torch.testing.assert_close(r.inverse(r(torch.ones(112))), torch.ones(112))
torch.testing.assert_close(hadamard_transform_28N(z, 0.5, exact=False).norm(), hadamard_transform_28N(z).norm() / 2)
call = torch.compile(lambda x: hadagen.hadamard_transform(x * 2, 0.5) + 1, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(call(z), hadagen.hadamard_transform(z) + 1)
best = hadagen.best_config({"n": 4096, "dtype": "float16"}, 1024, arch="sm90")
assert best.kernel and best.match is hadagen.Match.SAME_ARCH, best
assert not {"optuna", "jinja2", "click", "sqlalchemy", "alembic", "pydantic", "yaml", "rich"} & set(sys.modules)
print("python", sys.version.split()[0], "torch", torch.__version__, "hadagen", hadagen.__version__)
"""


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_key(tmp_path_factory.mktemp("key"))


@pytest.fixture(scope="module")
def wheel(key: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as a release builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    names = {"PY": sys.executable, "KEY": key[0], "RELEASE": folder / "source", "DIST": folder}
    command = ["make", "release", *(f"{name}={value}" for name, value in names.items())]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("hadagen-*.whl")
    return wheel


@pytest.fixture(scope="module")
def bare(wheel: Path) -> Path:
    """A directory to import from, where the wheel is unpacked beside PyTorch and click."""
    site = wheel.parent / "site"
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in (*BARE, *OF_TORCH):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:  # PyTorch's parts vary with its version
            path = Path(spec.origin)
            path = path.parent if path.name == "__init__.py" else path
            (site / path.name).symlink_to(path)
    return site


def python(site: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that sees the standard library and `site` alone: no site-packages, no variables, no tree."""
    program = f"import sys; sys.path.insert(0, {str(site)!r})\n{program}"
    home = str(site.parent / "home")
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=site.parent,
        env={"HOME": home, "XDG_DATA_HOME": home, "XDG_CACHE_HOME": home, "PATH": ""},
    )


def hadagen(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(site, "from hadagen.cli.main import main; main(prog_name='hadagen')", *arguments)


def test_every_file_of_every_room_is_in_the_wheel(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {
        str(Path(directory) / path.relative_to(ROOT / room))
        for room, directory in ROOMS.items()
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_bundles_of_a_release_are_signed(bare: Path, key: tuple[Path, Path]) -> None:
    """And hold what those of the repository hold."""
    signers = public_keys(str(key[1]))
    for path in shipped().values():
        bundle = Bundle.open(bare / "hadagen" / "tuning_db" / "bundles" / path.name)
        (signature,) = bundle.signatures
        assert signature.is_of(bundle.statement)
        assert [signature.signer] == signers
        assert (bundle.digest, Bundle.open(path).signatures) == (Bundle.open(path).digest, ())


def test_the_wheel_is_small_and_for_every_platform(wheel: Path) -> None:
    assert wheel.stat().st_size <= 28_000_000
    assert wheel.name == f"hadagen-{version(ROOT)}-py3-none-any.whl"
    with ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    needed = [line.split(": ", 1)[1] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    always = {line for line in needed if "extra ==" not in line}
    assert {line.partition(">=")[0] for line in always} == {"click", "nvidia-ml-py", "torch"}


def test_a_bare_install_transforms_compiles_and_chooses(bare: Path) -> None:
    done = python(bare, SMOKE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("python ")


def test_a_bare_install_looks_up_and_inspects(bare: Path) -> None:
    best = hadagen(bare, "best", "--arch", "sm90", "--n", "4096", "--dtype", "float16", "--rows", "1024", "--json")
    assert best.returncode == 0, best.stderr
    assert json.loads(best.stdout)["match"] == "same-arch"
    listed = hadagen(bare, "bundle", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    listed_bundles = json.loads(listed.stdout)["bundles"]
    assert {each["arch"] for each in listed_bundles} == set(known_archs())
    bundle = next(each for each in listed_bundles if each["arch"] == "sm75")
    assert Path(bundle["path"]).is_relative_to(bare)
    for action in ("show", "verify"):
        done = hadagen(bare, "bundle", action, bundle["path"])
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize("command", [("tune", "--arch", "sm90"), ("emit", "--n", "8"), ("emit", "--n", "8", "--space")])
def test_what_tunes_names_the_extra_it_needs(command: tuple[str, ...], bare: Path) -> None:
    done = hadagen(bare, *command)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.endswith(" is not installed; install it with: pip install '.[tune]' in a checkout of hadagen\n")


def test_a_checkout_that_is_not_installed_is_whole() -> None:
    """Python started in a checkout finds ./hadagen first, whatever is installed."""
    program = "import hadagen.tuning_db.bundle as bundle; print(len(bundle.shipped()))"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(len(known_archs())), "")
