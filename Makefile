# Each target works alone on a fresh machine with Python 3.11 or newer: it makes .venv and installs what is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# setuptools warns of every editable installation
PIP := PYTHONWARNINGS=ignore $(BIN)/pip install --quiet

.PHONY: demo test foreign check docs dist format clean

# It resumes where it was stopped.
demo: $(VENV)/.run
	$(BIN)/xret demo --out xret-demo

# A process a core, each with one thread: torch would start as many threads as there are cores in every one of them.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal --durations 10

# Stores, exports, scores and the server, read by programs of others; PGHOST, PGUSER and the like name a PostgreSQL.
foreign: $(VENV)/.foreign
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m foreign --numprocesses auto --dist worksteal -rs tests/foreign tests/heads/retrieval/test_onnx.py tests/heads/retrieval/test_serve.py

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	rm -rf .build build && $(PIP) --no-deps --no-build-isolation --target .build/site .
	cp tests/support/typed_program.py .build/site
	cd .build/site && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p xret -m typed_program
	cd .build/site && PYTHONPATH=. ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache

# Of the built package: in the repository the tools would walk through the tests, too.
docs: $(VENV)/.docs
	rm -rf .build build && $(PIP) --no-deps --no-build-isolation --target .build/site .
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.build/site $(BIN)/mkdocs build --site-dir .build/html

# The archives for PyPI; the wheel is built from the source archive, and says its version outside the repository.
dist: $(VENV)/.dev
	rm -rf dist .build build && $(BIN)/python -m build --outdir dist .
	$(PIP) --no-deps --target .build/wheel dist/*.whl
	cd .build/wheel && ../../$(BIN)/python -P -m xret.cli --version

format: $(VENV)/.dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf $(VENV) .build build dist *.egg-info

$(VENV)/.run: pyproject.toml
	@echo "Installing xret and PyTorch into $(VENV), which takes some minutes."
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools
	$(PIP) --editable .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) --editable '.[test]'
	touch $@

# CLIP_benchmark without what it depends on, which its recall does not need, and embedding-reader, which wants an older
# pandas and reads by a newer one; packages of Node where npm is.
$(VENV)/.foreign: $(VENV)/.test tests/foreign/package.json
	$(PIP) --editable '.[test,foreign]'
	$(PIP) --no-deps clip-benchmark==1.6.2 embedding-reader==1.8.1
	mkdir -p $(VENV)/node && cp tests/foreign/package.json $(VENV)/node
	! command -v npm >/dev/null || npm install --prefix $(VENV)/node --ignore-scripts --no-package-lock --no-audit --no-fund --silent
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(PIP) --editable '.[docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) --editable '.[test,dev]'
	touch $@
