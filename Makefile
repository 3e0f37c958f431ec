# `make demo` and `make test` set up .venv/ by themselves; `make setup` is the step they share.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint docs attack

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/diffrate demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup  # build/site/index.html opens from disk; `make test` builds it too, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: lint
	$(BIN)/python -m pytest

attack: setup  # damaged files and images, kills, interruptions, full disks and wrong flags: about an hour
	PYTHONPATH=tests $(BIN)/python -m attack results/attacks_cpu.json
