# `make help` lists every target. Each installs what it needs into .venv first, once.

PYTHON ?= python3
RESULTS ?= runs/report/rows
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo dev test test-gpu report lint clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(VENV)/.installed ## train a small language model on generated stories and sample from it (under 2 minutes on 2 cores)
	$(BIN)/cs336 train --config configs/demo.json

dev: $(VENV)/.installed-dev ## install what the tests and notebooks need

test: $(VENV)/.installed-dev ## run the CPU test suite (4 to 11 minutes on 2 cores)
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

test-gpu: $(VENV)/.installed-dev ## run the tests that need one CUDA GPU
	$(BIN)/pytest -m gpu -n auto --maxprocesses 8
	$(BIN)/pytest -m 'gpu and timing'

report: $(VENV)/.installed-report ## answer the assignment's questions: with a GPU by measuring what is missing (hours), else from results/
	@if nvidia-smi -L >/dev/null 2>&1; then set -x; $(BIN)/cs336 report writeup --measure --results $(RESULTS) --out runs/report; \
	else set -x; $(BIN)/cs336 report writeup --out runs/report; fi

lint: $(VENV)/.installed-dev ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean: ## delete the environment and the caches; keeps runs/ and data/
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# Only where pip has something to do, so that later runs say nothing.
SAY_INSTALL = @test -e $(VENV)/.installed && echo "Adding to $(VENV) what is missing." \
	|| echo "Installing into $(VENV), this once. It can take a few minutes; PyTorch is the large part of the download."

# Without compiling to bytecode: most of PyTorch's modules are never imported. Those that are get compiled and kept then,
# also where the environment says not to keep it: else each process would compile them again, seconds long.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -q

# A stamp says that what pyproject.toml and constraints.txt ask for is installed; they are its prerequisites.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(SAY_INSTALL)
	$(INSTALL) -e . -c constraints.txt
	touch $@

$(VENV)/.installed-report: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(SAY_INSTALL)
	$(INSTALL) -e '.[report]' -c constraints.txt
	touch $(VENV)/.installed $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(SAY_INSTALL)
	$(INSTALL) -e '.[dev]' -c constraints.txt
	touch $(VENV)/.installed $@
