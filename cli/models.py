"""`hadagen quantize` and `hadagen eval`: models with rotated codes of 8 or 4 bits, and what they lose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hadagen.cli import options
from hadagen.cli.output import counted, print_json, print_table, say
from hadagen.cli.sentences import keeping
from hadagen.errors import DeviceError, HadagenError, UsageError, shortened, shown
from hadagen.models.defaults import Default, rotation_for, weights_here
from hadagen.models.scheme import ACTIVATIONS, AUTO, CACHES, GROUPS, ROTATIONS, WEIGHTS, Scheme

if TYPE_CHECKING:
    import torch

    from hadagen.models.evaluate import Figures

CALIBRATION = 16  # windows of 512 tokens, at most
_FOLDER = click.Path(path_type=Path)
_NONE = "none"


def _one_of(values: Iterable[str | None]) -> click.Choice[str]:
    """The values of a scheme, of which None has a name."""
    return click.Choice([_NONE if each is None else each for each in values])


@click.command()
@click.argument("model", type=_FOLDER)
@click.argument("out", type=_FOLDER)
@click.option(
    "--weights",
    type=_one_of((*WEIGHTS, AUTO)),
    default=Scheme.weights,
    show_default=True,
    help="Codes of weights, with a scale for each row; int4 also has a factor for each group of up to 128 elements; "
    "auto has the codes of 8 bits that suit the GPU of this machine.",
)
@click.option(
    "--activations",
    type=_one_of((Scheme.activations, *ACTIVATIONS)),
    default=Scheme.activations,
    show_default=True,
    help="Format of activations; auto has the codes of the weights, int8 for 4 bits, with a scale for each row.",
)
@click.option(
    "--rotation",
    type=_one_of((Scheme.rotation, *ROTATIONS)),
    default=Scheme.rotation,
    show_default=True,
    help="Whole rows as in QuaRot, blocks of up to 128 elements, or heads of a cache alone; auto is quarot for "
    "integers, or blocks where that is not possible, and for fp8 heads with --cache, else none.",
)
@click.option(
    "--cache",
    type=_one_of((*CACHES, Scheme.cache)),
    default=_NONE,
    show_default=True,
    help="Codes of keys and values in the cache of transformers.",
)
@click.option("--seed", type=int, default=Scheme.seed, show_default=True, help="Seed of random signs.")
@click.option(
    "--ignore",
    multiple=True,
    metavar="LAYER",
    help="Do not quantize a layer, such as down_proj or model.layers.0.mlp.down_proj; may be given several times.",
)
@click.option(
    "--calibrate",
    type=_FOLDER,
    metavar="FILE",
    help="Text in UTF-8, for the scales of fp8-tensor, and to round weights of 4 bits by GPTQ.",
)
@click.option("--device", default="cpu", show_default=True, help="Where to rotate and quantize, such as cuda.")
def quantize(
    model: Path,
    out: Path,
    weights: str,
    activations: str,
    rotation: str,
    cache: str,
    seed: int,
    ignore: tuple[str, ...],
    calibrate: Path | None,
    device: str,
) -> None:
    """Rotate and quantize a model.

    MODEL is a folder with config.json and *.safetensors. OUT is a new folder,
    which transformers and vLLM load with hadagen. The memory of one file of a
    Llama-like MODEL is enough, and the same command continues a run that was
    killed. Other models are in memory as a whole.
    """
    from hadagen.models.checkpoint import Checkpoint, convert
    from hadagen.models.folding import Sizes

    if weights == AUTO:
        weights = _chosen("weights", weights_here())
    ignored = (*Scheme.ignore, *ignore)
    scheme = Scheme(weights, _name(activations), _name(rotation), seed, ignored, cache=_name(cache))
    place = _device(device)
    stored = Checkpoint(model)
    measure = None
    if calibrate:
        from hadagen.models.evaluate import check_vocabulary

        tokens = _tokens(model, calibrate, CALIBRATION)
        check_vocabulary(tokens, stored.config.get("vocab_size"))
        measure = partial(_calibrated, tokens, place, scheme)
    with keeping(), _calculating(place):
        if Sizes.of(stored.config):
            files = convert(model, out, scheme, device=place, progress=counted, calibrate=measure)
        else:
            from hadagen.integrations.transformers_folder import convert_any

            files = convert_any(model, out, scheme, device=place, calibrate=measure)
        for file, is_kept in files:
            say(f"{file}: {'kept' if is_kept else 'written'}", err=True)
    if rotation == AUTO:
        _say_rotation(Checkpoint(out).config["quantization_config"])
    before, after = (sum(size for size, _ in each.states().values()) for each in (stored, Checkpoint(out)))
    say(f"{out} has {after / 1e6:.0f} MB of weights, in place of {before / 1e6:.0f} MB")


@click.command("eval")
@click.argument("model", type=_FOLDER)
@click.option("--text", type=_FOLDER, required=True, help="Text to predict, in UTF-8.")
@click.option("--against", type=_FOLDER, help="Model to compare with, such as the one that was quantized.")
@click.option("--windows", type=click.IntRange(1), help="Use only the first windows of 512 tokens.")
@click.option("--device", help="Where to run, such as cuda.  [default: the GPU if there is one]")
@options.as_json
def evaluate(
    model: Path, text: Path, against: Path | None, windows: int | None, device: str | None, as_json: bool
) -> None:
    """Measure how well a model predicts a text.

    Prints the perplexity of MODEL, a folder with safetensors and
    tokenizer.json. It is exp of the mean loss, which --json gives too; of a bad
    model it may be too large for a number, or not a number. With --against,
    prints that of the other model too, and the share of positions at which both
    find the same next token most likely.
    """
    import torch

    from hadagen.models.checkpoint import Checkpoint
    from hadagen.models.evaluate import measured

    place = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    folders = [*filter(None, (against, model))]
    for folder in folders:
        Checkpoint(folder)  # raises what is wrong with it
    tokens = _tokens(model, text, windows)
    rows: list[dict[str, Any]] = []
    expected: Figures | None = None
    for folder in folders:
        loaded = _loaded(folder, place)
        with _calculating(place, Exception):
            found = measured(loaded, tokens, partial(counted, doing=folder.name))
        del loaded
        agreement = None if expected is None else found.agreement(expected)
        measures = {"loss": found.loss, "perplexity": found.perplexity, "same_top": agreement}
        rows.append({"model": str(folder), **measures})
        expected = found
    if as_json:
        # JSON has neither NaN nor infinities.
        known = [{name: None if _is_no_number(each) else each for name, each in row.items()} for row in rows]
        print_json({"windows": len(tokens), "tokens": tokens.numel(), "rows": known})
        return
    headers = ["model", "perplexity", *(["same first choice"] if against else [])]
    cells = [[row["model"], _perplexity(row), _percent(row["same_top"])] for row in rows]
    print_table(headers, [each[: len(headers)] for each in cells])


def _chosen(name: str, found: Default) -> str:
    """The value of a default. Says what it is, and why."""
    say(f"{name} {found.value or _NONE}: {found.why}", err=True)
    return found.value or _NONE


def _say_rotation(stored: dict[str, Any]) -> None:
    """Say which rotation a model got by default, and why."""
    options = (rotation_for(stored["weights"], is_foldable, bool(stored["cache"])) for is_foldable in (True, False))
    found = next(each for each in options if each.value == stored["rotation"])
    _chosen("rotation", found)


def _name(given: str) -> str | None:
    return None if given == _NONE else given


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _perplexity(row: dict[str, Any]) -> str:
    """Such as 12.345, 1.23e+09, e^9210.34 where float64 ends, inf or nan."""
    if math.isfinite(row["loss"]) and not math.isfinite(row["perplexity"]):
        return f"e^{row['loss']:.2f}"
    return f"{row['perplexity']:.3f}" if row["perplexity"] < 1e7 else f"{row['perplexity']:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _tokens(model: Path, text: Path, most: int | None) -> torch.Tensor:
    from hadagen.models.evaluate import read_windows

    return read_windows(model, text, most)


def _calibrated(
    tokens: torch.Tensor,
    device: torch.device,
    scheme: Scheme,
    folder: Path,
    fold: Callable[[str], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What a scheme takes from a text, by the names of tensors, for `convert`."""
    from hadagen.models.evaluate import input_scales
    from hadagen.models.gptq import round_weights

    model, found = _loaded(folder, device), dict[str, Any]()
    with _calculating(device, Exception):
        if scheme.weights in GROUPS:
            found |= round_weights(model, tokens, fold, partial(counted, doing="rounding"))
        if scheme.activations == "fp8-tensor":
            found |= input_scales(model, tokens, partial(counted, doing="calibrating"))
    return found


def _loaded(folder: Path, device: torch.device) -> Any:
    """The model of a folder, by transformers. Raises `UsageError` for a folder that transformers cannot load."""
    import transformers

    from hadagen.integrations.transformers import HadagenConfig
    from hadagen.models.json_file import read_json
    from hadagen.models.stored import CONFIG

    if read_json(folder / CONFIG).get("quantization_config"):
        HadagenConfig()  # raises the reason if transformers would not know it
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = "float32" if device.type == "cpu" else "auto"  # CPUs multiply 16-bit types slowly
    options = {"dtype": dtype, "trust_remote_code": False, "local_files_only": True, "output_loading_info": True}
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    try:
        model, found = load(folder, **options)
        if missing := sorted(found["missing_keys"]):  # which transformers fills with random numbers
            raise UsageError(f"{folder} has no tensor {missing[0]}; download the whole model")
    except HadagenError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"transformers cannot load {folder} ({shortened(reason, 200)}); name a folder that it loads"
        ) from error
    with _calculating(device):
        return model.to(device)


@contextmanager
def _calculating(device: torch.device, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """Around what PyTorch calculates, for which memory may be too small. kind: of the errors that it may raise."""
    try:
        yield
    except HadagenError:
        raise
    except (MemoryError, kind) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DeviceError(
            f"PyTorch cannot calculate this on {device} ({shortened(reason, 200)}); use another --device, or one with "
            "more memory"
        ) from error


def _device(name: str) -> torch.device:
    import torch

    try:
        place = torch.device(name)
        torch.empty(1, device=place).item()  # which the device meta has not
    except (RuntimeError, AssertionError):
        raise UsageError(
            f"device {shown(name)} is not here; leave --device out, or name one that PyTorch finds"
        ) from None
    return place
