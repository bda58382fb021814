# Every target sets itself up: it needs a python3 (3.10 or newer) with venv, and pip's index.

PYTHON ?= python3
TORCH ?=
TEST_ARGS ?=
DEMO_RANKS ?= 2
DEMO_ARGS ?=
SOAK_ARGS ?=
CASES ?= 200
SEED ?= 0
CASE ?=
MUTANTS_ARGS ?=
PARTS ?=
DEMO_DIR := build/demo

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install
BASE := .venv/base-done

# Exits 0 where the virtual environment holds a torch that the project supports.
HAS_TORCH := $(PY) -c 'from importlib.metadata import version; \
	assert (2, 11) <= tuple(map(int, version("torch").split(".")[:2])) <= (2, 15)' 2> /dev/null

.PHONY: help setup test test-rest test-all test-cuda gpu lint types format docs tables demo soak fuzz golden clients mutants dist clean FORCE

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Variables: TORCH=torch==2.11.0  PYTHON=python3.12  TEST_ARGS='-k layout'"
	@echo "             DEMO_RANKS=4  DEMO_ARGS='--steps 50'  CASES=200 SEED=0 (of fuzz)"
	@echo "             MUTANTS_ARGS='-k gathers -j 2'  GOLDEN_ARGS=--write"

# say TEXT, then run a command, then its seconds
TIMED = timed() { echo "setup: $$1"; shift; local begun=$$SECONDS; "$$@"; \
	echo "       $$((SECONDS - begun)) s"; }; timed

# torch goes first and stays as it is: left to the resolver, it could become another build of
# several gigabytes. With TORCH given, pip is asked every time and answers at once if it is there.
$(BASE): pyproject.toml $(if $(TORCH),FORCE)
	@test -x .venv/bin/pip || { $(TIMED) "a virtual environment in .venv" $(PYTHON) -m venv .venv; }
	@if [ -n "$(TORCH)" ] || ! $(HAS_TORCH); then $(TIMED) \
		"$(or $(TORCH),torch==2.13.0), the largest part: 0.2 GB to download for CPUs, 3 GB for CUDA" \
		$(PIP) --quiet --progress-bar on "$(or $(TORCH),torch==2.13.0)"; fi
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
		> .venv/torch-constraint.txt
	@$(TIMED) "shardc and its libraries, 50 MB" \
		$(PIP) --quiet --constraint .venv/torch-constraint.txt --editable .
	@mkdir -p .venv/types/shardc
	@ln -sfn ../../../passes ../../../runtime .venv/types/shardc/
	@touch $@

# Libraries that only a part of the targets needs, an extra each.
.venv/%-done: $(BASE)
	@$(TIMED) "libraries of '$*'$(COST_$*)" \
		$(PIP) --quiet --constraint .venv/torch-constraint.txt --editable '.[$*]'
	@touch $@

COST_lint := , 60 MB on disk
COST_test := , 0.8 GB on disk
COST_docs := , 0.2 GB on disk

setup: $(BASE) .venv/lint-done .venv/test-done .venv/docs-done  ## Create .venv with torch, the project and its tools

# A file's tests run in one of two processes: much of a test is one rank that compiles.
PYTEST = $(PY) -m pytest --numprocesses auto --maxprocesses 2 --dist loadfile

test: .venv/test-done  ## Run the tests, each behaviour at least once
	$(PYTEST) -m 'not thorough' $(TEST_ARGS)

test-rest: .venv/test-done  ## Run what `make test` leaves out (tests/thorough.toml says why)
	$(PYTEST) -m thorough $(TEST_ARGS)

test-all: .venv/test-done  ## Run all tests
	$(PYTEST) $(TEST_ARGS)

# It keeps a CUDA build of its own for each version of torch, beside .venv.
test-cuda:  ## Rehearse training steps on CUDA without a GPU (5 GB the first time, for each TORCH)
	$(if $(TORCH),SHARDC_CUDA_TORCH=$(patsubst torch==%,%,$(TORCH))) $(PYTHON) tests/cuda $(TEST_ARGS)

lint: .venv/lint-done  ## Check style, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tests/prose.py shardc passes runtime
	$(MAKE) --no-print-directory types

types: .venv/lint-done  ## Check types only
	$(PY) -m mypy | sed 's#^\.venv/types/shardc/##'

format: .venv/lint-done  ## Format the code, and fix what ruff can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# mkdocstrings reads the source from one folder, laid out as Python imports it.
docs: .venv/docs-done  ## Build the documentation into build/docs
	@rm -rf build/api && mkdir -p build/api/shardc
	@cd build/api/shardc && ln -s ../../../shardc/* ../../../passes ../../../runtime .
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

clients: .venv/test-done  ## Run other codebases' loops by FSDP2 and by shardc, and compare, minutes
	PYTHONPATH=tests $(PY) -m clients $(CLIENTS_ARGS)

tables: .venv/test-done  ## Write the tables of the docs, minutes
	$(PY) benchmarks/tables.py --write
	$(PY) benchmarks/libraries.py --write
	$(PY) docs/write_options.py
	PYTHONPATH=tests $(PY) -m operations --write

demo: $(BASE)  ## Train a small language model on two ranks, a few minutes
	@$(if $(findstring --resume,$(DEMO_ARGS)),,rm -rf $(DEMO_DIR))
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node $(DEMO_RANKS) \
		examples/train_lm.py --checkpoint-dir $(DEMO_DIR) --expect-loss-below 2.2 $(DEMO_ARGS)

soak: $(BASE)  ## Kill and resume ranks at random (SOAK_ARGS='--steady compiled': no kills)
	$(PY) tests/soak.py $(SOAK_ARGS)

fuzz: .venv/test-done  ## Train random models sharded and unsharded and compare them
	PYTHONPATH=tests $(PY) -m fuzz $(if $(CASE),--case '$(CASE)',--cases $(CASES) --seed $(SEED))

gpu:  ## Run what only a GPU can say (PARTS='smoke numerics'; needs torch, installs nothing)
	$(PYTHON) benchmarks/gpu $(PARTS)

golden: .venv/test-done  ## Compare graphs and plans of small models with those that are kept
	PYTHONPATH=tests $(PY) -m golden $(GOLDEN_ARGS)

mutants: .venv/test-done  ## Put in small bugs one at a time: tests must notice each
	$(PY) tests/mutants/run.py $(MUTANTS_ARGS)

dist: $(BASE)  ## Build the wheel and the sdist, and train with the wheel in a fresh environment
	$(PIP) --quiet build
	@rm -rf build/lib dist
	$(PY) -m build
	$(PY) tests/wheel.py dist

clean:  ## Remove build products and caches, keep .venv
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
