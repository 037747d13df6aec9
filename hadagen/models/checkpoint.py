"""A folder of safetensors becomes one of a rotated, quantized model, file by file.

A tensor of the new model is made of one stored tensor and the factors of a norm, which may lie in another file. So a
file is converted with the memory that its tensors need. Each file is written in another place and then renamed, so a
run that was killed leaves complete files, which the next run keeps.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hadagen.errors import StorageError, UsageError, shortened, shown
from hadagen.models.folding import EMBEDDING, HEAD, Folding, Sizes, finite, planned
from hadagen.models.layers import codes_of
from hadagen.models.scheme import Scheme
from hadagen.models.stored import CONFIG, UNFINISHED, Kind, check_is_whole, checksum_of_files, opened, reading
from hadagen.tuning_db.atomic_file import atomic_file, unwritable

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
# The files of a model in one file, if it needs another for the scales of activations.
FIRST_OF_TWO, SCALES = "model-00001-of-00002.safetensors", "model-input-scales.safetensors"
# (a folder with the weights in codes, and activations as they are) → the scales, by the names of their tensors
Calibrate = Callable[[Path], dict[str, torch.Tensor]]
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
        if (folder / ONE_FILE).exists():
            self.files = dict.fromkeys(self._names(ONE_FILE), ONE_FILE)
        elif (folder / INDEX).exists():
            self.files = self._index()
        else:
            raise UsageError(f"{folder} has neither {ONE_FILE} nor {INDEX}; name a folder with a model in safetensors")

    def _index(self) -> dict[str, str]:
        found = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(found, dict):
            raise StorageError(f"{self.folder / INDEX} has no weight_map; download it again")
        for file in sorted(set(map(str, found.values()))):
            if Path(file).name != file or not (self.folder / file).is_file():
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `UsageError` if the file is missing, and `StorageError` if it holds none."""
    if not path.exists():
        raise UsageError(f"{path} is not there; name a folder with a whole model")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StorageError(f"{path} holds no JSON ({error}); get the file again") from None
    if not isinstance(found, dict):
        raise StorageError(f"{path} holds no JSON object; get the file again")
    return found


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

    A folder that an earlier call left unfinished is completed, if model and scheme are the same. device: where tensors
    are rotated and quantized. progress: takes the names of the tensors of a file, and the file. calibrate: measures the
    scales of activations "fp8-tensor", which need it.

    Raises `UsageError` for a model that cannot be quantized, and a folder that holds anything else; `StorageError` for
    files that cannot be read or written.
    """
    if (scheme.activations == "fp8-tensor") != (calibrate is not None):
        raise UsageError("fp8-tensor takes its scales from a text; give both --activations fp8-tensor and --calibrate")
    stored = Checkpoint(source)
    folding = _folding(stored, scheme, device)
    if folder.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{folder} lies in {source}, the model to quantize; name a folder outside of it")
    _begin(folder, {"scheme": folding.scheme.to_dict(), "config": stored.config, "files": stored.states()})
    files: dict[str, str] = {}
    for file, names in stored.shards().items():
        path = folder / (FIRST_OF_TWO if calibrate and file == ONE_FILE else file)
        is_kept = path.exists()
        if not is_kept:
            _save(path, {name: each for made in progress(names, file) for name, each in _made(folding, stored, made)})
        with opened(path) as reader:
            files |= dict.fromkeys(reader.keys(), path.name)
        yield path.name, is_kept
    _copy_others(source, folder)
    config = _config(stored, folding)
    if calibrate:
        _complete(folder, config, replace(folding.scheme, activations=None), files)  # to measure with
        with reading(folder):
            scales = calibrate(folder)
        _save(folder / SCALES, scales)
        files |= dict.fromkeys(scales, SCALES)
        yield SCALES, False
    _complete(folder, config, folding.scheme, files)
    (folder / UNFINISHED).unlink()
    for left in folder.glob(".hadagen-*"):  # of runs that were killed
        shutil.rmtree(left, ignore_errors=True)


def _folding(stored: Checkpoint, scheme: Scheme, device: torch.device | str) -> Folding:
    """How the tensors of a model are rotated. Raises what `convert` raises for a model that cannot be quantized."""
    sizes = Sizes.of(stored.config)
    if sizes.tied and HEAD in stored.files and not torch.equal(stored.get(HEAD), stored.get(EMBEDDING)):
        sizes = replace(sizes, tied=False)  # as transformers loads it
    scheme = planned(scheme, sizes)
    check_is_whole({name: stored.kind(name) for name in stored.files}, sizes, stored.config["model_type"])
    return Folding(scheme, sizes, device)


def _config(stored: Checkpoint, folding: Folding) -> dict[str, Any]:
    """The configuration of the new model, without its quantization_config."""
    config = stored.config | {"tie_word_embeddings": folding.sizes.tied and not folding.is_untied}
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
            codes, scales = codes_of(tensor.float(), folding.scheme.weights)
            yield made, codes.cpu()[..., None]
            yield f"{made}_scale", scales.cpu()
        else:
            yield made, finite(made, tensor.to("cpu", stored.get(name).dtype).contiguous())


def _begin(folder: Path, plan: Mapping[str, Any]) -> None:
    """Make the folder, or find it as a call with the same plan left it."""
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a new folder")
    if UNFINISHED in found:
        if read_json(folder / UNFINISHED) != plan:
            raise UsageError(
                f"{folder} has files of another model or with other options; give the same, or name a new folder"
            )
    elif found:
        raise UsageError(f"{folder} is not empty; name a new folder")
    else:
        write_json(folder / UNFINISHED, plan)


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with atomic_file(path) as new:
        mode = new.stat().st_mode
        try:
            save_file(tensors, new, {"format": "pt"})
        except SafetensorError as error:
            raise unwritable(path, error) from error
        new.chmod(mode)  # safetensors makes files that only their owner reads


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object to a file, which is complete or not there."""
    with atomic_file(path) as new:
        new.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _copy_others(source: Path, folder: Path) -> None:
    """Copy the tokenizer, the settings of generation, and the license."""
    for path in sorted(source.iterdir()):
        is_wanted = path.suffix in _COPIED or path.name.upper().startswith(("LICENSE", "NOTICE"))
        if is_wanted and path.is_file() and path.name not in (CONFIG, INDEX) and ".index." not in path.name:
            with atomic_file(folder / path.name) as new:
                shutil.copyfile(path, new)
