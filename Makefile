# Each target works alone on a fresh machine with Python 3.11 or newer: it makes .venv and installs what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# setuptools warns of every editable installation
PIP := PYTHONWARNINGS=ignore $(BIN)/pip install --quiet

.PHONY: demo test check format clean

demo: $(VENV)/.run
	rm -rf xret-demo
	$(BIN)/xret demo --out xret-demo

# A process a core, each with one thread: torch would start as many threads as there are cores in every one of them.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --durations 10

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf .build build && $(PIP) --no-deps --no-build-isolation --target .build/site .
	cp tests/support/typed_program.py .build/site
	cd .build/site && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p xret -m typed_program
	cd .build/site && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache

format: $(VENV)/.dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf $(VENV) .build build dist *.egg-info

$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools
	$(PIP) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) --editable '.[test,dev]'
	touch $@
