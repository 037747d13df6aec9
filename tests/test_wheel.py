"""The wheel of a release: every file of every room is in it, nothing else is, and its bundles are signed; and with
PyTorch and click alone it works."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from signing_keys import make_key

from hadagen.target import known_archs
from hadagen.tuning_db.bundle import Bundle, shipped
from hadagen.tuning_db.signatures import public_keys

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"hadagen": "hadagen", "templates": "hadagen/templates", "tuning_db": "hadagen/tuning_db", "cli": "hadagen/cli"}
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
# All that a bare install has, for lack of NumPy or Jinja2; the others are what importing PyTorch needs.
BARE = ("torch", "torchgen", "functorch", "click")
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
    assert wheel.stat().st_size <= 21_000_000
    assert wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    needed = [line.split(": ", 1)[1] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    always = {line for line in needed if "extra ==" not in line}
    assert {line.partition(">=")[0] for line in always} == {"click", "torch"}


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
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(" is not installed; install it with: pip install 'hadagen[tune]'\n")


def test_a_checkout_that_is_not_installed_is_whole() -> None:
    """Python started in a checkout finds ./hadagen first, whatever is installed."""
    program = "import hadagen.tuning_db.bundle as bundle; print(len(bundle.shipped()))"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(len(known_archs())), "")
