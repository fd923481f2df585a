# One command for people and for continuous integration alike. `make` alone lists the targets.
#
# Every target sets up what it needs: a virtual environment in .venv with the pinned packages of requirements/ and kvsched
# itself, editable. `make serve` needs requirements/serve.txt alone, everything else requirements/dev.txt. Set-up runs once,
# and again when a list or pyproject.toml changes. `make test-hosts` alone has an environment of its own, .venv-hosts: vLLM pins
# other versions of what the tests use.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SERVE_STAMP := $(VENV)/.serve-installed
HOSTS := .venv-hosts
HOSTS_STAMP := $(HOSTS)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# What `make serve` can be told: make serve PORT=8001 MODEL=some/directory PAGE_SIZE=16 POOL_TOKENS=32768
export PORT MODEL PAGE_SIZE POOL_TOKENS

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve demo test test-hosts lint soak bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

serve: $(SERVE_STAMP) ## a server with a real language model on the CPU, and a page to watch it: PORT, MODEL, PAGE_SIZE, POOL_TOKENS
	@PYTHONPATH=examples $(BIN)/python -m reference_server

demo: $(STAMP) ## replay a generated workload, under a minute, and say what to look at
	$(BIN)/kvsched demo

test: lint ## lint, then every test but the soak runs
	$(BIN)/python -m pytest

test-hosts: $(HOSTS_STAMP) ## kvsched inside vLLM and transformers: four minutes, and 2 GB to fetch the first time
	KVSCHED_HOSTS=1 $(HOSTS)/bin/python -m pytest -W default tests/hosts

lint: $(STAMP) ## ruff with every rule on, mypy strict
	$(BIN)/ruff check
	$(BIN)/mypy

soak: $(STAMP) ## the long runs: state machines, many clients, the default model
	$(BIN)/python -m pytest -m soak

bench: $(STAMP) ## speed and size, one JSON line for each size
	$(BIN)/kvsched bench step --running 32 256 1024 4096 --json
	$(BIN)/kvsched bench prefix --tokens 12000 128000 --page-size 16 --json
	$(BIN)/kvsched bench admission --json
	$(BIN)/kvsched bench evict --json

clean: ## remove the environment and everything that was built
	rm -rf $(VENV) $(HOSTS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Both lists go into one environment; the shorter one is part of the longer.
$(STAMP): requirements/dev.txt requirements/dev-no-deps.txt $(SERVE_STAMP)
	$(PIP) -r requirements/dev.txt
	$(PIP) --no-deps -r requirements/dev-no-deps.txt
	@touch $@

# vLLM's own pins contradict ours, and its warnings are not ours to fail on.
$(HOSTS_STAMP): requirements/hosts.txt requirements/hosts-no-deps.txt pyproject.toml
	$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/hosts.txt
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/hosts-no-deps.txt
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(SERVE_STAMP): requirements/serve.txt requirements/serve-no-deps.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "kvsched needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo absent)." >&2; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || echo "Setting up $(VENV): about 300 MB to fetch, a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/serve.txt
	$(PIP) --no-deps -r requirements/serve-no-deps.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
