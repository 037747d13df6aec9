"""A folder of safetensors becomes one of a rotated, quantized model, file by file.

A tensor of the new model is made of one stored tensor and the factors of a norm, which may lie in another file. So a
file is converted with the memory that its tensors need. A run that was killed leaves complete files, which the next run
keeps. config.json is written last, so no other program loads a folder that is not complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hadagen.errors import StorageError, UsageError, shortened, shown
from hadagen.models.folding import EMBEDDING, HEAD, Folding, Get, Sizes, finite, planned, vocabulary_of
from hadagen.models.json_file import read_json, write_json
from hadagen.models.layers import codes_of
from hadagen.models.output import Output, output
from hadagen.models.scheme import GROUPS, Scheme
from hadagen.models.stored import CONFIG, UNFINISHED, Kind, check_is_whole, checksum_of_files, opened

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SAFETENSORS = ".safetensors"
# Files that are copied, by the ends of names: tokenizers and their code, chat templates, settings of generation.
_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
_TEMPLATES = "additional_chat_templates"  # a folder
# Files about the weights of the original model, which are not copied: of an adapter, of other quantizers and formats.
_OF_WEIGHTS = {
    *(CONFIG, "adapter_config.json", "params.json"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
}
# The files of a model in one file, if it needs another for the scales of activations.
FIRST_OF_TWO, SCALES = "model-00001-of-00002.safetensors", "model-input-scales.safetensors"
# (a folder with the weights in codes, and activations as they are; what returns the folded weight of a name) → scales
# of activations, and other codes and scales of weights, by the names of their tensors
Calibrate = Callable[[Path, Get], dict[str, torch.Tensor]]
Progress = Callable[[Sequence[str], str], Iterable[str]]  # (names, title) → the same names; shows how many are done


class Checkpoint:
    """A model in a folder: config.json, and safetensors in one file or several.

    config: the content of config.json. files: tensor → the file that has it. Raises `UsageError` for a folder that has
    no such model, and `StorageError` for files that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is no folder; download the model and name the folder with its config.json and *.safetensors"
            )
        if (folder / UNFINISHED).exists():
            raise UsageError(f"{folder} is not complete; run the hadagen quantize that began it again")
        self.config = read_json(folder / CONFIG)
        if (folder / ONE_FILE).is_file():
            self.files = dict.fromkeys(self._names(ONE_FILE), ONE_FILE)
        elif (folder / INDEX).exists():
            self.files = self._index()
        else:
            raise UsageError(f"{folder} has neither {ONE_FILE} nor {INDEX}; name a folder with a model in safetensors")
        layers = self.config.get("num_hidden_layers")
        if isinstance(layers, int) and layers > len(self.files):  # before anything is made for each
            raise UsageError(
                f"num_hidden_layers = {shown(layers)}, but {folder} has {len(self.files)} tensors; take both from one "
                "model"
            )

    def _index(self) -> dict[str, str]:
        found = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(found, dict):
            raise StorageError(f"{self.folder / INDEX} has no weight_map; download it again")
        # Values may be of any type, also of one that cannot be a key.
        for file in {each if isinstance(each, str) else id(each): each for each in found.values()}.values():
            is_name = isinstance(file, str) and Path(file).name == file and file.endswith(_SAFETENSORS)
            if not is_name or not (self.folder / file).is_file():
                raise StorageError(f"{self.folder / INDEX} names {shown(file)}, which is not there; download it again")
        return found

    def _names(self, file: str) -> list[str]:
        with opened(self.folder / file) as reader:
            return list(reader.keys())

    def shards(self) -> dict[str, list[str]]:
        """File → its tensors, in the order of the index."""
        found: dict[str, list[str]] = {}
        for name, file in self.files.items():
            found.setdefault(file, []).append(name)
        return dict(sorted(found.items()))

    def targets(self, scheme: Scheme) -> dict[str, str]:
        """File → the file of the new model, which has another one for the scales of activations "fp8-tensor"."""
        has_scales = scheme.activations == "fp8-tensor"
        return {file: FIRST_OF_TWO if has_scales and file == ONE_FILE else file for file in self.shards()}

    def paths(self) -> list[Path]:
        """Its files of tensors."""
        return [self.folder / file for file in self.shards()]

    def get(self, name: str) -> torch.Tensor:
        """A tensor, whose memory is mapped to its file. Raises `StorageError` if it is not there."""
        with self._reader(name) as reader:
            return _of_file(reader.get_tensor, name, self.folder)  # type: ignore[no-any-return]

    def kind(self, name: str) -> Kind:
        """The type and the shape of a tensor."""
        with self._reader(name) as reader:
            part = _of_file(reader.get_slice, name, self.folder)
            return part.get_dtype(), part.get_shape()

    def _reader(self, name: str) -> Any:
        if name not in self.files:
            raise StorageError(f"{self.folder} has no tensor {name}; download the whole model")
        return opened(self.folder / self.files[name])

    def states(self) -> dict[str, list[int]]:
        """File → its size and the time of its last change, by which another model is noticed."""
        found = {file: (self.folder / file).stat() for file in self.shards()}
        return {file: [each.st_size, each.st_mtime_ns] for file, each in found.items()}


def _of_file(get: Callable[[str], Any], name: str, folder: Path) -> Any:
    """Raises `StorageError` for a tensor that is not in the file in which the index has it."""
    try:
        return get(name)
    except SafetensorError as error:
        raise StorageError(f"{folder} has no tensor {name} ({shortened(str(error))}); download it again") from None


# ---- a new checkpoint ------------------------------------------------------------------------------------------------
def convert(
    source: Path,
    folder: Path,
    scheme: Scheme,
    *,
    device: torch.device | str = "cpu",
    progress: Progress = lambda names, title: names,
    calibrate: Calibrate | None = None,
) -> Iterator[tuple[str, bool]]:
    """Write the rotated, quantized model of `source` to a folder. Yields each finished file, and whether it was kept.

    A folder that an earlier call left unfinished is completed, if model and scheme are the same; its files are kept if
    they are as that call wrote them. device: where tensors are rotated and quantized. progress: takes the names of the
    tensors of a file, and the file. calibrate: measures the scales of activations "fp8-tensor", which need it, and
    rounds weights of 4 bits, which are rounded to the nearest without it.

    Raises `UsageError` for a model that cannot be quantized, and a folder that holds anything else; `StorageError` for
    files that cannot be read or written, and a folder to which another process writes.
    """
    stored = Checkpoint(source)
    check_places(stored, folder, scheme, calibrate is not None)
    folding = _folding(stored, scheme, device)
    targets = stored.targets(scheme)
    with writing(stored, folder, folding.scheme, calibrate is not None) as out:
        files: dict[str, str] = {}
        for file, names in stored.shards().items():
            target = targets[file]
            kept = out.kept(target)
            written = kept
            if written is None:
                with out.refusing():
                    made = dict(each for name in progress(names, file) for each in _made(folding, stored, name))
                written = out.save(target, made)
                del made
            files |= dict.fromkeys(written, target)
            yield target, kept is not None
        fold = lambda name: finite(name, folding.fold(name, stored.get))  # noqa: E731
        yield from finish(out, stored, _config(stored, folding), folding.scheme, files, calibrate, fold)


def check_places(stored: Checkpoint, folder: Path, scheme: Scheme, is_calibrated: bool) -> None:
    """Raise `UsageError` for a folder in the model's, and for what a text calibrates without one, or the reverse."""
    _check_calibration(scheme, is_calibrated)
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(stored.folder)):
        raise UsageError(f"{folder} lies in {stored.folder}, the model to quantize; name a folder outside of it")
    if scheme.activations == "fp8-tensor" and SCALES in stored.files.values():
        raise UsageError(f"{stored.folder} has {SCALES}, which quantize writes; rename it, and in {INDEX} too")


@contextmanager
def writing(stored: Checkpoint, folder: Path, scheme: Scheme, is_calibrated: bool) -> Iterator[Output]:
    """The folder of the new model, locked."""
    plan: dict[str, Any] = {"scheme": scheme.to_dict(), "config": stored.config, "files": stored.states()}
    if is_calibrated and scheme.activations != "fp8-tensor":
        plan["is_calibrated"] = True
    names = {*stored.targets(scheme).values(), *dict(_others(stored.folder)), SCALES, INDEX, CONFIG}
    with output(folder, plan, names) as out:
        yield out


def finish(
    out: Output,
    stored: Checkpoint,
    config: dict[str, Any],
    scheme: Scheme,
    files: dict[str, str],
    calibrate: Calibrate | None,
    fold: Callable[[str], torch.Tensor],
) -> Iterator[tuple[str, bool]]:
    """Write what a text calibrates, what is copied, and config.json last.

    config: of the new model. files: tensor → the file that has it. fold: returns a tensor of the rotated model.
    """
    if calibrate:
        with out.beside({*files.values()}) as place:
            _complete(place, config, replace(scheme, activations=None), files)  # to measure with
            found = calibrate(place, fold)  # if that fails, another text or device may go on
        for target in sorted({files[name] for name in found if name in files}):
            out.save(target, {name: found.pop(name, tensor) for name, tensor in _read(out.folder / target).items()})
            yield target, False
        if found:
            files |= dict.fromkeys(out.save(SCALES, found), SCALES)
            yield SCALES, False
    for name, path in _others(stored.folder):
        out.copy(path, name)
    _complete(out.folder, config, scheme, files)
    out.finish()


def _check_calibration(scheme: Scheme, is_given: bool) -> None:
    """Raises `UsageError` for a text that nothing is measured with, and for scales without one."""
    if scheme.activations == "fp8-tensor":
        if not is_given:
            raise UsageError(
                "fp8-tensor takes its scales from a text; give both --activations fp8-tensor and --calibrate"
            )
    elif is_given and scheme.weights not in GROUPS:
        raise UsageError(
            f"{scheme.weights} weights and {scheme.activations} activations need no text; leave --calibrate out, or "
            "give --weights int4 or --activations fp8-tensor too"
        )


def _read(path: Path) -> dict[str, torch.Tensor]:
    with opened(path) as reader:
        return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118


def _folding(stored: Checkpoint, scheme: Scheme, device: torch.device | str) -> Folding:
    """How the tensors of a model are rotated. Raises what `convert` raises for a model that cannot be quantized."""
    sizes = Sizes.of(stored.config)
    if sizes is None:
        raise UsageError(
            f"model_type {shown(stored.config.get('model_type'))} has no names that hadagen knows; quantize it by "
            "from_pretrained of transformers, with a HadagenConfig"
        )
    embedding, rows = stored.get(EMBEDDING).shape, vocabulary_of(stored.config)
    if embedding != (rows, sizes.width):
        raise UsageError(
            f"{EMBEDDING} has the shape {[*embedding]}, but {CONFIG} says {[rows, sizes.width]}; take both from one "
            "model"
        )
    if sizes.tied and HEAD in stored.files and not torch.equal(stored.get(HEAD), stored.get(EMBEDDING)):
        sizes = replace(sizes, tied=False)  # as transformers loads it
    check_is_whole({name: stored.kind(name) for name in stored.files}, sizes, stored.config["model_type"])
    return Folding(planned(scheme, sizes), sizes, device)


def _config(stored: Checkpoint, folding: Folding) -> dict[str, Any]:
    """The configuration of the new model, without its quantization_config."""
    config = stored.config | {"tie_word_embeddings": folding.is_tied and not folding.is_untied}
    if not config.get("dtype") and not config.get("torch_dtype"):  # else it would be taken from codes
        config["dtype"] = str(stored.get(EMBEDDING).dtype).removeprefix("torch.")
    return config


def _complete(folder: Path, config: dict[str, Any], scheme: Scheme, files: Mapping[str, str]) -> None:
    """Write what tells transformers of the tensors in `files`."""
    if {*files.values()} != {ONE_FILE}:
        total = sum((folder / file).stat().st_size for file in set(files.values()))
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    scheme = replace(scheme, checksum=checksum_of_files(folder / file for file in set(files.values())))
    write_json(folder / CONFIG, config | {"quantization_config": scheme.to_dict()})


def _made(folding: Folding, stored: Checkpoint, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the new model has in place of a stored tensor."""
    for made in folding.made_of(name):
        tensor = finite(made, folding.fold(made, stored.get))
        module, _, part = made.rpartition(".")
        if part == "weight" and folding.scheme.is_quantized(module):
            for name_of_part, codes in codes_of(module, tensor.float(), folding.scheme.weights).items():
                yield f"{module}.{name_of_part}", codes.cpu()
        else:
            yield made, finite(made, tensor.to("cpu", stored.get(name).dtype).contiguous())


def _others(source: Path) -> Iterator[tuple[str, Path]]:
    """The files besides the weights that a model needs, or its license asks for, by their names in its folder."""
    for path in sorted(source.iterdir()):
        name = path.name
        is_wanted = path.suffix in _COPIED and name not in _OF_WEIGHTS and ".index." not in name
        if (is_wanted or name.upper().startswith(("LICENSE", "NOTICE"))) and path.is_file():
            yield name, path
    for path in sorted((source / _TEMPLATES).glob("*.jinja")):
        if path.is_file():
            yield f"{_TEMPLATES}/{path.name}", path
