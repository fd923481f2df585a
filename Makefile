# One command for people and for continuous integration alike. `make` alone lists the targets.
#
# Every target sets up what it needs: a virtual environment in .venv with the pinned packages of requirements/dev.txt and
# kvsched itself, editable. Set-up runs once, and again when requirements/dev.txt or pyproject.toml changes.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint soak bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## replay a generated workload, under a minute, and say what to look at
	$(BIN)/kvsched demo

test: lint ## lint, then every test but the soak runs
	$(BIN)/python -m pytest

lint: $(STAMP) ## ruff with every rule on, mypy strict
	$(BIN)/ruff check
	$(BIN)/mypy

soak: $(STAMP) ## the long runs of the state machines
	$(BIN)/python -m pytest -m soak

bench: $(STAMP) ## speed and size, one JSON line for each size
	$(BIN)/kvsched bench step --running 32 256 1024 4096 --json
	$(BIN)/kvsched bench prefix --tokens 12000 128000 --page-size 16 --json
	$(BIN)/kvsched bench admission --json
	$(BIN)/kvsched bench evict --json

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "kvsched needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo absent)." >&2; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
