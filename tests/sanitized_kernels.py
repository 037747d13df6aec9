"""Runs kernels of every structure, prologue and format on the emulator as a tune without a GPU does: for a process
under AddressSanitizer, whose emulator is compiled with it. Prints the number of kernels."""

from itertools import chain

import pytest
from arch_spread import plans_on
from spaces import ARCH
from test_prologue_kernels import FAMILIES, knobs_for
from test_quantizing_kernels import CASES, source

from hadagen.compiler.codegen import render
from hadagen.compiler.emulator import EmulationError, compile_host, verify
from hadagen.plan.space import build_plan
from hadagen.problem.problem import Problem
from hadagen.problem.prologues import width_of
from hadagen.tuner import estimate

estimate.ELEMENTS = 1  # no error is measured here, so full tiles and a ragged one are enough

of_structures = [(plan.problem, render(plan)) for plan in plans_on(ARCH)]
behind_prologues = [
    (problem, render(build_plan(problem, knobs_for(problem, wanted), ARCH)))
    for problem, choices in ((Problem.parse(key), choices) for key, choices in FAMILIES.items())
    for wanted in choices
]
of_codes = [(problem, source(problem, **knobs)) for problem, knobs in ((Problem.parse(k), v) for k, v in CASES.items())]
kernels = list(chain(of_structures, behind_prologues, of_codes))
module = compile_host([source for _, source in kernels])
for problem, kernel in kernels:
    estimate._verify(problem, kernel, module)
    if width_of(problem) > 1 and not problem.io.form:
        with pytest.raises(EmulationError, match="in place"):
            verify(problem, kernel, module=module, in_place=True)
print(len(kernels))
