# Two commands for a new machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
# The versions CI uses. `make test CONSTRAINTS=` takes what pip finds.
CONSTRAINTS ?= constraints.txt

.PHONY: demo test install lint types unit bench clean

demo: install
	$(BIN)/sleepbackends demo

test: install lint types unit

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) examples/sleepbackends-zstd/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) \
		--editable '.[$(EXTRAS)]' --editable examples/sleepbackends-zstd
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy
	$(BIN)/mypy examples/sleepbackends-zstd

unit: install
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest examples/sleepbackends-zstd

bench: install
	$(BIN)/python benchmarks/host_spool.py
	$(BIN)/python benchmarks/orchestrator_overhead.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
