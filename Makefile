# Everything a developer runs. Needs Python >= 3.10, make and a C++ compiler; the rest is set up on first use.

PYTHON ?= python3
VENV ?= .venv
# On the command line, PY=python3 skips the set-up and uses an interpreter that has hadagen and its extras already.
PY = $(abspath $(VENV))/bin/python
JOBS = 2
ARCH = sm90
# More options for the program that `make tune` or `make test` runs.
TUNE =
PYTEST =

# The environment is complete when its interpreter runs and its stamp says all that is needed: that it was made for this
# checkout and, where there is no CUDA toolkit, that it holds the compiler from wheels.
STAMP := $(VENV)/installed
NEEDED := $(CURDIR) $(if $(shell command -v nvcc 2>/dev/null),,nvcc)
PRESENT := $(shell $(PY) -c '' 2>/dev/null && cat $(STAMP) 2>/dev/null)
comma := ,
EXTRAS := tune,test,lint,docs$(if $(filter nvcc,$(NEEDED)),$(comma)nvcc)

ifneq ($(origin PY),command line)
SETUP := $(STAMP)
ifneq ($(filter-out $(PRESENT),$(NEEDED)),)
.PHONY: $(STAMP)
endif
endif

PIP := $(PY) -m pip --disable-pip-version-check
TYPED := build/typecheck

.DEFAULT_GOAL := help
.PHONY: help setup tune test gpu-test lint typecheck format docs wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

setup: $(SETUP) ## make the environment; every other target does this by itself

$(STAMP): pyproject.toml ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit(sys.executable + " is older than Python 3.10; use: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --constraint ci/constraints.txt setuptools
	$(PIP) install --quiet --constraint ci/constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	@echo '$(NEEDED)' > $@

tune: $(SETUP) ## tune all problems for ARCH=sm90; narrower with TUNE='--n 4096'
	$(PY) -m hadagen.cli tune --arch $(ARCH) $(TUNE)

test: $(SETUP) ## run the tests; those that need a GPU are skipped where there is none
	$(PY) -m pytest -n $(JOBS) --dist loadfile $(PYTEST)

gpu-test: $(SETUP) ## run every test that needs a GPU, and fail where there is none
	$(PY) -m pytest -m gpu --require-gpu $(PYTEST)

lint: $(SETUP) typecheck ## check style, types and the import table
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pytest -q tests/test_imports.py

# The rooms of the top level stand inside hadagen once installed; the type checker sees them through links.
typecheck: $(SETUP) ## check types only
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/hadagen
	@ln -s $(CURDIR)/hadagen/* $(CURDIR)/cli $(CURDIR)/templates $(CURDIR)/tuning_db $(TYPED)/hadagen
	cd $(TYPED) && $(PY) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p hadagen

format: $(SETUP) ## rewrite the Python files in the house style
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: $(SETUP) ## bring the numbers and pictures of the documents up to date with docs/data
	$(PY) docs/refresh.py

wheel: $(SETUP) ## build dist/*.whl
	rm -rf build/lib build/bdist.*
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove all that make made, the environment too
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
