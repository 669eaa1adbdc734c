# Each target works alone on a fresh machine with Python 3.11 or newer: it makes .venv and installs what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check format clean

demo: $(VENV)/.run
	rm -rf xret-demo
	$(BIN)/xret demo --out xret-demo

test: $(VENV)/.test
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf .build && $(BIN)/pip install --quiet --no-deps --no-build-isolation --target .build/site .
	cd .build/site && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p xret

format: $(VENV)/.dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf $(VENV) .build build dist *.egg-info

$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip setuptools
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/pip install --quiet --editable '.[test,dev]'
	touch $@
