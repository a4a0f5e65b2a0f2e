# Two commands do everything on a fresh machine:
#   make demo   makes the environment and runs the seed scenarios in the sim lane
#   make test   makes the environment and runs the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint env clean

demo: env
	$(BIN)/faultlab run scenarios/seed

test: env
	$(BIN)/python -m pytest -n 2

lint: env
	$(BIN)/ruff check .
	$(BIN)/mypy

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
