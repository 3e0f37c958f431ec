# `make demo` and `make test` set up .venv/ by themselves; `make setup` is the step they share.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

LOWEST := .venv-lowest
LOWEST_PYTHON ?= $(or $(shell python3.10 -c '' 2> /dev/null && echo python3.10),$(PYTHON))

.PHONY: setup demo test lint docs attack test-lowest dist-check load

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

# Files of tests share two processes, but for those that kill and starve processes themselves, and for the sweep over
# models, of which the last test counts what all the others saw.
ALONE := tests/attack tests/test_portions.py tests/backbones tests/test_sweep.py
SHARED := -n 2 --dist loadfile $(addprefix --ignore=,$(ALONE))

test: lint
	$(BIN)/python -m pytest $(SHARED)
	$(BIN)/python -m pytest $(ALONE)

attack: setup  # damaged files and images, kills, interruptions, full disks and wrong flags: about an hour
	PYTHONPATH=tests $(BIN)/python -m attack results/attacks_cpu.json

load: setup  # 200,000 images, 10,000 forward passes, two minutes of requests: about half an hour
	PYTHONPATH=tests $(BIN)/python -m attack.load results/load_cpu.json

# The tests on the lowest version of every dependency, in an environment of their own.
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest $(SHARED)
	$(LOWEST)/bin/python -m pytest $(ALONE)

$(LOWEST)/.installed: pyproject.toml
	test -x $(LOWEST)/bin/python || $(LOWEST_PYTHON) -m venv $(LOWEST)
	sed -n '/^dependencies = /,/^]/s/^ *"\(.*\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(LOWEST)/lowest.txt --editable '.[test]'
	touch $@

dist-check: setup  # wheel and sdist, each installed and used outside of this folder
	.ci/dist-check $(BIN)/python
