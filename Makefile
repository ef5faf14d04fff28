# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup test test-all demo lint

setup: $(STAMP)

# torch goes first: the pinned version is what keeps CUDA builds off machines without a GPU.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: setup
	$(BIN)/python -m pytest -m "not gpu"

demo: setup
	$(BIN)/python recipes/quickstart.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
