"""The command line as a whole: its help, how it reads its arguments, and what needs no extra."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from command_line import BEST, TINY_TUNE, run, sentence, succeed

import hadagen
from hadagen.cli import options
from hadagen.cli.main import MOVED, main
from hadagen.cli.output import print_table
from hadagen.cli.sentences import TUNE_PACKAGES
from hadagen.problem.problem import Problem, Transform
from hadagen.problem.regimes import BUCKETS_BETWEEN, BUCKETS_OF_LONG_ROWS, ELEMENT_BUCKETS

pytestmark = pytest.mark.usefixtures("machine")


# ---- help ------------------------------------------------------------------------------------------------------------
COMMANDS = {
    "": ["tune", "best", "bench", "bundle", "compile", "report", "emit", "quantize", "eval", "doctor"],
    "bench": ["kernels", "between", "calls"],
    "bundle": ["list", "make", "estimate", "verify", "sign", "show", "merge", "assemble", "export"],
}


@pytest.mark.parametrize("group", COMMANDS)
def test_help_lists_the_commands_of_a_group_and_what_each_does(group: str) -> None:
    _, listed = succeed(*group.split(), "--help").split("Commands:\n")
    assert [line.split()[0] for line in listed.splitlines()] == COMMANDS[group]
    assert "..." not in listed  # each says what it does in one line
    for command in COMMANDS[group]:
        assert succeed(*group.split(), command, "--help").startswith(f"Usage: hadagen {group}".rstrip())


@pytest.mark.parametrize("group", ["", "bundle"])
def test_a_group_without_a_command_shows_its_help(group: str) -> None:
    assert succeed(*group.split()) == succeed(*group.split(), "--help")


def test_bench_times_kernels_where_no_command_is_named() -> None:
    wrong = ("--elements", "many")
    assert run("bench", *wrong).stderr == run("bench", "kernels", *wrong).stderr
    assert run("bench").stderr == run("bench", "kernels").stderr
    assert sentence(run("bench", "nonsense"), 2).startswith("No such command 'nonsense'")


def test_shells_complete_commands() -> None:
    def completed(*words: str) -> list[str]:
        found = ShellComplete(main, {}, "hadagen", "_HADAGEN_COMPLETE").get_completions(list(words), "")
        return [each.value for each in found]

    assert completed() == completed("refine") == COMMANDS[""]
    assert completed("bench") == COMMANDS["bench"]


@pytest.mark.parametrize("old", MOVED)
def test_a_command_that_has_moved_says_where_it_went(old: str) -> None:
    for arguments in ((), ("--help",), ("--n", "2")):
        assert sentence(run(old, *arguments), 2) == f"hadagen {old} has moved; use {MOVED[old]}"
    program, *command = MOVED[old].split()
    if program == "hadagen":
        assert succeed(*command, "--help").startswith(f"Usage: hadagen {command[0]}")


def test_the_version_is_that_of_the_package() -> None:
    assert succeed("--version") == f"hadagen {hadagen.__version__}\n"


def test_a_key_names_what_the_options_do() -> None:
    named = "--problem", "n256-bfloat16-fast-pitched"
    told = "--n", "256", "--dtype", "bfloat16", "--numerics", "fast", "--pitched"
    for command in (("best", "--arch", "sm90", "--rows", "8"), ("emit", "--arch", "sm90", "--space")):
        assert succeed(*command, *named) == succeed(*command, *told)


# ---- wrong usage -----------------------------------------------------------------------------------------------------
KEY = ("best", "--arch", "sm90", "--rows", "8", "--problem")
WRONG = {
    ("nonsense",): "No such command 'nonsense'; see 'hadagen --help'",
    ("--nonsense",): f"{click.NoSuchOption('--nonsense').format_message().rstrip('.')}; see 'hadagen --help'",
    ("best", "--arch", "sm90", "--n", "256"): "Missing option '--rows'; see 'hadagen best --help'",
    (*BEST, "many"): "Invalid value for '--n': 'many' is not a valid integer; see 'hadagen best --help'",
    (
        *BEST,
        "98",
    ): "matrix = 'auto' has no matrices for 98 = 49 · 2^1 elements; pad it to 100, or use blocks of a size that auto",
    (*BEST, "19712"): "n = 19712 takes matrices of the orders 28 and 44, and a kernel takes only one matrix",
    (*BEST, "14336", "--k", "1"): "n = 14336 is not supported; n must be a power of two, and from 2 to 131072",
    (*BEST, "14336", "--k", "12"): "n = 14336 is not supported; n must be 12 times a power of two",
    (*BEST, "14336", "--k", "0"): "order = 0 is not supported; the order of a matrix is from 1 to 428",
    (*BEST, "14336", "--k", "-28"): "--k '-28' is not an order; write a number like 28, or auto",
    (*BEST, "14336", "--k", "many"): "--k 'many' is not an order; write a number like 28, or auto",
    (*BEST, "14336", "--pitched"): "n = 14336 takes a matrix of order 28, and there are no kernels for pitched rows",
    (*BEST, "0"): "n = 0 is not supported",
    (*BEST, "-2"): "n = -2 is not supported",
    (*BEST, "1"): "n = 1 is not supported",
    (*BEST, "262144"): "n = 262144 is not supported",
    (*BEST, "256", "--rows", "0"): "rows = 0 is not supported; give a whole number of rows, at least 1",
    (*BEST, "256", "--rows", "-1"): "rows = -1 is not supported",
    (*BEST, "256", "--dtype", "float8"): "dtype 'float8' is not supported; choose one of float16, bfloat16, float32",
    (*BEST, "256", "--numerics", "so-so"): "numerics 'so-so' is not supported; choose one of accurate, fast",
    (*BEST, "256", "--arch", "sm12"): "arch 'sm12' is not known and no bundle serves it; choose one of sm75, sm80, ",
    (*BEST, "256", "--arch", "hopper"): "arch 'hopper' is not known; choose one of sm75, sm80, ",
    (*BEST, "256", "--device", "0"): "device '0' is no name of a GPU, which is wanted beside an arch; write a name",
    (*KEY, "n256-float32-fast"): "'n256-float32-fast' names no problem; write one such as n4096-float16-fast or",
    (*KEY, "n98-float16-fast"): "matrix = 'auto' has no matrices for 98 = 49 · 2^1 elements; pad it to 100",
    (*KEY, "n256-float16-fast", "--n", "256"): "--problem names all of a problem; leave it out, or --n",
    (*KEY, "n256-float16-fast", "--k", "1"): "--problem names all of a problem; leave it out, or --k",
    (*KEY, "n256-float16-fast", "--signed"): "--problem names all of a problem; leave it out, or --signed",
    (*KEY, "n256-float16-fast", "--pitched"): "--problem names all of a problem; leave it out, or --pitched",
    ("tune", "--problem", "n256-float16-fast", "--dtype", "float16"): "leave it out, or --dtype",
    ("tune", "--problem", "n256-float16-fast", "--contiguous"): "leave it out, or --pitched/--contiguous",
    (*KEY, "n256-float16-fast", "--to", "int8-row"): "--problem names all of a problem; leave it out, or --to",
    (*KEY, "n256-float16-fast", "--round-first"): "--problem names all of a problem; leave it out, or --round-first",
    (*KEY, "n256-float16-to-MXFP4-accurate"): "to = 'MXFP4' is no format; did you mean mxfp4?",
    (*KEY, "n256-float16-to-int8_row-accurate"): "'int8_row' is no format; did you mean int8-row?",
    (*BEST, "256", "--to", "fp8"): "to = 'fp8' is no format; did you mean fp8-group, fp8-row, fp8-tensor or fp8-head?",
    (*BEST, "256", "--to", "mxfp4", "--rule", "Floor"): "rule = 'Floor' does not exist for mxfp4; did you mean floor?",
    (
        *BEST,
        "256",
        "--to",
        "mxfp4",
        "--layout",
        "tiled",
    ): "layout = 'tiled' does not exist for mxfp4; choose one of row-",
    (
        *BEST,
        "256",
        "--to",
        "mxfp4",
        "--columns",
        "300",
    ): "columns = 300 is not supported; rows are a multiple of n = 256",
    (*BEST, "256", "--group", "32"): "columns, group, rule, layout and round_first are those of a format; give to as",
    (*BEST, "256", "--nummerics", "fast"): "No such option '--nummerics'. Did you mean '--numerics'?; see",
    ("tune", "--n", "128", "--to", "fp9-row"): "to = 'fp9-row' is no format; did you mean fp8-row?",
    ("best", "--arch", "sm90", "--rows", "8"): "no problem is named; give --n, or --problem with a key such as n4096",
    ("best", "--n", "256", "--rows", "8"): "this machine has no CUDA device to choose for; name an arch",
    ("emit", "--space", "--n", "98"): "matrix = 'auto' has no matrices for 98 = 49 · 2^1 elements",
    ("emit", "--space", "--n", "4096", "--arch", "sm1"): "arch 'sm1' is not known; choose one of sm75, sm80, ",
    ("emit", "--n", "4096", "--arch", "sm1"): "arch 'sm1' is not known; choose one of sm75, sm80, ",
    ("emit", "--n", "4096", "--knobs", "speed=11"): "knob 'speed' is not known; choose one of chunks, warps,",
    ("emit", "--n", "4096", "--knobs", "warps=3"): "knob warps = 3 is not searched on sm90; choose one of 1, 2,",
    ("emit", "--n", "4096", "--knobs", "warps=x"): "knob warps = 'x' is not searched on sm90; choose one of 1, 2,",
    ("emit", "--n", "4096", "--knobs", "warps=²"): "knob warps = '²' is not searched on sm90; choose one of 1, 2,",
    ("emit", "--n", "4096", "--knobs", "warps"): "--knobs 'warps' is not of the form k=v; write for example",
    ("emit", "--n", "4096", "--knobs", "warps=4,warps=8"): "--knobs sets warps twice, to 4 and 8; give one value",
    ("emit", "--n", "8192", "--knobs", "chunks=1,warps=1"): "a row",
    ("emit", "--n", "4096", "--space", "--knobs", "warps=3"): "knob warps = 3 is not searched on sm90; choose one of",
    ("emit", "--n", "4096", "--json"): "--json is for --space alone, a kernel is text; leave it out or add --space",
    ("tune", "--n", "3"): "matrix = 'auto' has no matrices for 3 = 3 · 2^0 elements",
    ("tune", "--n", "14336", "--pitched"): "there are no kernels for pitched rows with a matrix; leave out --pitched",
    ("tune", "--n", "2-14336"): "--n '2-14336' goes from a matrix of order 1 to one of 28; name each size, or --k",
    ("tune", "--problem", "n4096-signed-float16-fast"): "n4096-signed-float16-fast is not tuned, because kernels with",
    ("tune", "--n", "2-"): "--n '2-' is not a size; write 4096, 128,256 or 2-32768",
    ("tune", "--n", "²"): "--n '²' is not a size; write 4096, 128,256 or 2-32768",
    ("tune", "--n", "64-2"): "--n '64-2' is an empty range; write the smaller size first, as in 2-64",
    ("tune", "--dtype", "int8"): "dtype 'int8' is not supported",
    ("tune", "--numerics", "so-so"): "numerics 'so-so' is not supported",
    ("tune", "--arch", ""): "arch '' is not known; choose one of sm75, sm80, ",
    ("tune", "--arch", "sm1"): "arch 'sm1' is not known; choose one of sm75, sm80, ",
    ("tune", "--db", "mysql://host/db"): "database mysql is not supported; name a file or a postgresql:// URL",
    ("bench", "--n", "6"): "matrix = 'auto' has no matrices for 6 = 3 · 2^1 elements",
    ("bench", "--elements", "1000"): "--elements 1000 is not supported; give powers of two from 8192 to 268435456",
    ("bench", "--elements", "1.5"): "--elements 1.5 is not supported; give powers of two from 8192 to 268435456",
    ("bench", "--elements", "many"): "--elements 'many' is not a size; write for example 65536,1M",
    ("bench", "--elements", "65536.5"): "--elements 65536.5 is not supported; give powers of two from 8192",
    ("bench", "--elements", "1e6"): "--elements '1e6' is not a size; write for example 65536,1M",
}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("--problem n14336-float16-fast", "n14336-k28-float16-fast"),
        ("--problem n14336-signed-float16-fast", "n14336-k28-signed-float16-fast"),
        ("--problem n768-bfloat16-accurate", "n768-k24-bfloat16-accurate"),
        ("--problem n96-k12-float16-fast", "n96-k12-float16-fast"),
        ("--problem n4096-k64-c64-real-float16-fast", "n4096-k64-c64-real-float16-fast"),
        ("--problem n128-bfloat16-to-int8-row-accurate", "n128-bfloat16-to-int8_row_128-accurate"),
        ("--problem n14336-bfloat16-to-fp8-row-fast", "n14336-k28-bfloat16-to-fp8_row_14336-fast"),
        ("--problem n128-bfloat16-to-int8_row_4096-accurate", "n128-bfloat16-to-int8_row_4096-accurate"),
        ("--n 128 --to int8-row --columns 4096", "n128-float16-to-int8_row_4096-accurate"),
        ("--n 128 --to fp8-group --group 64 --rule power_of_two", "n128-float16-to-fp8_group_64_power_of_two-accurate"),
        ("--n 1 --to nvfp4 --columns 64 --layout swizzled", "n1-float16-to-nvfp4_16_swizzled-accurate"),
        ("--n 128 --to fp8-tensor --round-first --signed", "n128-signed-float16-to-fp8_tensor_rounded-accurate"),
        ("--n 14336 --to int8-row", "n14336-k28-float16-to-int8_row_14336-accurate"),
    ],
)
def test_problems_are_spelled_as_calls_are(arguments: str, key: str) -> None:
    asked = arguments.split()
    assert json.loads(succeed("emit", "--space", "--json", *asked))["problem"] == key
    assert json.loads(succeed("best", "--arch", "sm90", "--json", "--rows", "12", *asked)) == json.loads(
        succeed("best", "--arch", "sm90", "--json", "--problem", key, "--rows", _rows_of(asked))
    )


def _rows_of(asked: list[str]) -> str:
    """Rows of n elements for 12 rows of `--columns`."""
    given = dict(pairwise(asked))
    return str(12 * int(given.get("--columns", given.get("--n", 1))) // int(given.get("--n", 1)))


def test_several_formats_are_several_problems() -> None:
    @click.command()
    @options.problems(one_kind=True)
    def command(problems: list[Problem]) -> None:
        click.echo(" ".join(problem.key for problem in problems))

    found = CliRunner().invoke(command, ["--n", "128,256", "--dtype", "bfloat16", "--to", "fp8-row", "--to", "mxfp4"])
    assert found.output.split() == [
        "n128-bfloat16-to-fp8_row_128-accurate",
        "n256-bfloat16-to-fp8_row_256-accurate",
        "n128-bfloat16-to-mxfp4_32-accurate",
        "n256-bfloat16-to-mxfp4_32-accurate",
    ]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert WRONG[arguments] in sentence(run(*arguments), 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "--n", "{}"), "--n '{}' is not a size"),
        (("bench", "--n", "2-{}"), "--n '2-{}' is not a size"),
        (("bench", "--elements", "{}M"), "--elements '{}M' is not a size"),
        (("bench", "--elements", "1.{}"), "--elements '1.{}' is not a size"),
        (("emit", "--n", "64", "--knobs", "warps={}"), "knob warps = '{}' is not searched on sm90"),
        (("tune", "--n", "64", "--only", "warps={}"), "knob warps = '{}' is not searched on sm90"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_has_too_many_digits_for_a_number_is_refused_as_other_values_are(
    arguments: tuple[str, ...], said: str
) -> None:
    many = "9" * 5000
    refused = sentence(run(*(argument.format(many) for argument in arguments)), 2)
    before, _, behind = said.partition("{}")
    assert refused.startswith(before + many[:50])
    assert behind.rpartition("'")[2] in refused
    assert len(refused) < 300


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            (*BEST, "64", option, "{}")
            for option in ("--k", "--dtype", "--numerics", "--to", "--arch", "--rows", "--{}")
        ),
        (*BEST, "64", "--to", "mxfp4", "--rule", "{}"),
        (*BEST, "64", "--to", "mxfp4", "--layout", "{}"),
        (*BEST, "{}"),
        (*KEY, "{}"),
        (*KEY, "n64-float16-to-{}-fast"),
        ("emit", "--n", "64", "--knobs", "{}"),
        ("emit", "--n", "64", "--knobs", "{0}={0},{0}={0}"),
        ("emit", "--n", "64", "--compiler", "{}", "--ptx"),
        ("tune", "--n", "64", "--only", "{}"),
        ("tune", "--n", "64", "--only", "{0}={0}", "--only", "{0}={0}"),
        ("tune", "--db", "{}://host"),
        ("bench", "--elements", "{}"),
        ("{}",),
    ],
    ids=" ".join,
)
def test_a_long_value_is_shortened(arguments: tuple[str, ...]) -> None:
    for long in ("x" * 5000, "x y " * 1250):
        refused = run(*(argument.format(long) for argument in arguments))
        assert refused.exit_code == 2
        assert len(refused.stderr) < 500


@pytest.mark.parametrize("given", ["--trials -1", "--trials 0", "--time-budget -1", "--time-budget nan"])
def test_a_tune_that_would_try_nothing_is_refused(given: str) -> None:
    assert "; give " in sentence(run(*TINY_TUNE, *given.split()), 2)
    assert not options.default_db().exists()


# ---- how sizes are written -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("texts", "sizes"),
    [(["4096"], [4096]), (["2-16", "8,64"], [2, 4, 8, 16, 64]), (["2-32768"], [1 << k for k in range(1, 16)])],
)
def test_sizes_are_parsed(texts: list[str], sizes: list[int]) -> None:
    assert options.parse_sizes(texts) == [Transform(n) for n in sizes]


def test_sizes_with_a_matrix() -> None:
    for asked, orders in (
        ((["14336,96,64", "224-448"],), {64: 1, 96: 12, 224: 28, 448: 28, 14336: 28}),
        ((["14336", "28-112"], "28"), {28: 28, 56: 28, 112: 28, 14336: 28}),
        ((["12-96"],), {12: 12, 24: 24, 48: 48, 96: 12}),
        # A kernel takes some matrices with a part of H.
        ((["384-1536"],), {384: 12, 768: 24, 1536: 48}),
        ((["384-1536"], "12"), {384: 12, 768: 12, 1536: 12}),
        ((["4096"], "4"), {4096: 4}),
    ):
        assert options.parse_sizes(*asked) == [Transform(n, order) for n, order in orders.items()]
    # A kernel with a matrix has an H of order 8 at least, or none.
    assert [options.parse_transform(n).order for n in (2, 4, 12, 24, 48, 96, 392, 1712)] == [
        1,
        1,
        12,
        24,
        48,
        12,
        392,
        428,
    ]


def named(*arguments: str) -> list[str]:
    """The keys of the problems that these options name."""

    @click.command()
    @options.problems()
    def command(problems: list[Problem]) -> None:
        click.echo(" ".join(problem.key for problem in problems))

    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return result.output.split()


def test_by_default_the_problems_with_a_matrix_are_those_with_kernels() -> None:
    kinds = [f"n224-k28-{dtype}-{numerics}" for dtype in ("float16", "bfloat16") for numerics in ("accurate", "fast")]
    assert named("--n", "224") == kinds
    assert named("--n", "224", "--k", "7", "--dtype", "float32") == ["n224-k7-float32-accurate"]
    assert {key.partition("-")[0] for key in named("--n", "224,64", "--contiguous")} == {"n64", "n224"}
    assert "n64-float32-accurate-pitched" in named("--n", "224,64")


def test_one_problem_may_have_a_matrix_and_signs() -> None:
    @click.command()
    @options.problem
    def command(problem: Problem) -> None:
        click.echo(problem.key)

    for arguments, key in (
        ("--n 14336", "n14336-k28-float16-accurate"),
        ("--n 14336 --k auto --signed --numerics fast", "n14336-k28-signed-float16-fast"),
        ("--n 14336 --k 7", "n14336-k7-float16-accurate"),
        ("--n 4096 --signed --pitched", "n4096-signed-float16-accurate-pitched"),
    ):
        assert CliRunner().invoke(command, arguments.split()).output == f"{key}\n"


def test_element_counts_are_parsed() -> None:
    assert options.parse_elements("8M, 64K,1.5M,65536,0.375M") == [1 << 16, 3 << 17, 3 << 19, 1 << 23]
    counts = [*ELEMENT_BUCKETS, *BUCKETS_BETWEEN, *BUCKETS_OF_LONG_ROWS]
    assert options.parse_elements(",".join(map(options.short_count, counts))) == sorted(counts)
    assert [options.short_count(count) for count in (3 << 17, 1 << 20, 5 << 18)] == ["384K", "1M", "1.25M"]


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_numbers_lean_right_and_text_left_without_blanks_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["n", "us", "name"], [(2, 1.25, "longer"), (128, None, "short"), (16, None, None)])
    assert capsys.readouterr().out == "  n    us  name\n  2  1.25  longer\n128     -  short\n 16     -  -\n"


# ---- a bare install --------------------------------------------------------------------------------------------------
# The exit code, stdout and stderr of commands, one after the other in one process.
WITHOUT_EXTRAS = f"""
import contextlib, io, json, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {TUNE_PACKAGES}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
from hadagen.cli.main import main
found = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(command, prog_name="hadagen")
        except SystemExit as end:
            code = end.code or 0
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


def test_a_bare_install_chooses_kernels_and_names_the_extra_for_the_rest(sample: Path) -> None:
    refused = ["tune"], ["emit", "--n", "2"], ["bundle", "make", "--db", str(sample)]
    commands = [*BEST, "256", "--inplace", "--json"], ["bundle", "verify", str(sample)], ["doctor", "--json"], *refused
    script = [sys.executable, "-c", WITHOUT_EXTRAS, json.dumps(commands)]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True)
    best, verified, doctor, *others = json.loads(done.stdout)
    assert json.loads(best[1])["match"] == "same-arch"
    assert verified[0] == doctor[0] == 0
    checks = {check["name"]: check for check in json.loads(doctor[1])["checks"]}
    assert (
        "is not installed; install it with: pip install '.[tune]' in a checkout of hadagen"
        in checks["tune extra"]["says"]
    )
    assert checks["tune extra"]["state"] == "missing"
    assert checks["emulator"]["says"].startswith("it cannot be tried without the tune")
    assert "untried" not in {checks[name]["state"] for name in ("nvrtc", "nvcc")}  # a call may compile
    for code, _, said in others:
        assert code == 1
        assert said.startswith("hadagen: the Python package ")
        assert said.endswith("is not installed; install it with: pip install '.[tune]' in a checkout of hadagen\n")
