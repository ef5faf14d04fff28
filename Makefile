# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One worker per core; a worker that runs dry takes tests from the other.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: setup test test-slow test-all demo lint

setup: $(STAMP)

# torch goes first: the pinned version is what keeps CUDA builds off machines without a GPU.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

test: setup
	$(PYTEST) -m "not slow and not gpu"

test-slow: setup
	$(PYTEST) -m "slow and not gpu"

test-all: test test-slow

demo: setup
	$(BIN)/python recipes/quickstart.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
