# make demo   set up, then train, attack and report on embedded data
# make test   set up, then run the tests
# make check  lint and types
# make docs   the documentation site, in site/
# make bench  the benchmarks of benchmarks/, as ratios

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUNS ?= runs

.PHONY: demo test check docs bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/pflsec train --algo fedrep --rounds 10 --capture-rounds last --capture-clients 0,1,2,3 --victims 1 \
	    --name demo --runs-dir $(RUNS)
	$(BIN)/pflsec attack dlg,ig --restarts 2 --runs-dir $(RUNS)
	$(BIN)/pflsec report --runs-dir $(RUNS)

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n auto

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.ready
	for script in benchmarks/bench_*.py; do $(BIN)/python -m benchmarks.$$(basename $$script .py) || exit 1; done

clean:
	rm -rf $(VENV) build dist site *.egg-info
