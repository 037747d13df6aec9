"""Laws on a GPU, for every kernel that is shipped for it; `laws.py` says which."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import broken_laws

from hadagen.gpu import driver
from hadagen.gpu.driver import DoesNotFit
from hadagen.problem.trial import Kernel
from hadagen.runtime.choose.device import cuda_device
from hadagen.tuning_db.bundle import Bundle

pytestmark = pytest.mark.gpu


BUNDLES = Path(__file__).resolve().parent.parent / "tuning_db" / "bundles"


def shipped() -> Bundle:
    target = cuda_device(0)
    path = BUNDLES / f"{target.arch if target else ''}.db"
    if not path.exists():
        pytest.skip(f"no kernels are shipped for {torch.cuda.get_device_name()}")
    return Bundle.open(path)


def load(kernel: Kernel) -> driver.LoadedKernel:
    return driver.load(kernel.cubin, kernel.entry, kernel.launch)


def test_every_shipped_kernel_keeps_the_laws(figure: Callable[[str, Any], None]) -> None:
    bundle = shipped()
    torch.cuda.init()
    stream = torch.cuda.current_stream().cuda_stream
    broken: dict[str, list[str]] = {}
    checked = too_large = 0
    for problem in bundle.problems():
        for digest in sorted({entry.kernel for entry in bundle.entries(problem) if entry.compiled}):
            try:
                kernel = load(bundle.kernel(digest))
            except DoesNotFit:  # of another GPU of this arch
                too_large += 1
                continue
            if found := broken_laws(kernel, problem, torch.device("cuda"), stream):
                broken[f"{problem.key} {digest:.12}"] = found
            checked += 1
            driver.unload(kernel)
    figure(
        "laws",
        {
            "gpu": torch.cuda.get_device_name(),
            "bundle": bundle.digest,
            "kernels": checked,
            "problems": len(bundle.problems()),
            "too_large": too_large,
            "broken": broken,
        },
    )
    assert broken == {}
    assert checked
