# Two commands for a new machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev
# The versions CI uses. `make test CONSTRAINTS=` takes what pip finds.
CONSTRAINTS ?= constraints.txt

EXAMPLES := $(addprefix examples/sleepbackends-,limited memfd zstd)

# What the tests need of the system, beside a C compiler: a browser for the status page, and
# Intel's Level Zero loader.
SYSTEM_PACKAGES ?= chromium libze1

.PHONY: demo test system-packages install lint types docs unit packaging release sbom bench clean

demo: install
	$(BIN)/sleepbackends demo

test: system-packages install lint types docs unit

# Installs what is missing where that can be done, and says what is missing where it cannot.
system-packages:
	@.ci/system-packages $(SYSTEM_PACKAGES)

install: $(VENV)/installed

# The native libraries are compiled when the package is installed.
NATIVE := hatch_build.py $(wildcard sleepbackends/_native/*.[ch])

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) $(NATIVE) $(addsuffix /pyproject.toml,$(EXAMPLES))
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) \
		--editable '.[$(EXTRAS)]' $(addprefix --editable ,$(EXAMPLES))
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy
	set -e; for example in $(EXAMPLES); do $(BIN)/mypy $$example; done

# The site, in build/site. Strict: a warning, a dead link or a page left out of the menu fails it.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

unit: install
	$(BIN)/python -m pytest
	set -e; for example in $(EXAMPLES); do $(BIN)/python -m pytest $$example; done

# Slow: every Python that this machine has, every extra, pipx.
packaging: install
	$(BIN)/python -m pytest tests/packaging -m 'slow or not slow'

# What is uploaded, in dist/: sdist, wheel, and a list of what the wheel brings.
release: install
	rm -rf dist build/released
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv --without-pip build/released
	$(BIN)/python -m pip --python build/released install --quiet dist/*.whl
	$(MAKE) sbom OF=build/released OUT=dist/sleepbackends.cdx.json

# cyclonedx-py finds the version of the package itself only where it is not dynamic.
sbom:
	version="$$($(OF)/bin/python -c 'import sleepbackends; print(sleepbackends.__version__)')" \
		&& sed "s/^dynamic = .*/version = \"$$version\"/" pyproject.toml > $(OF)/pyproject.toml
	$(BIN)/cyclonedx-py environment $(OF) --pyproject $(OF)/pyproject.toml --mc-type library \
		--output-reproducible --output-file $(OUT)

bench: install
	$(BIN)/python benchmarks/host_spool.py
	$(BIN)/python benchmarks/orchestrator_overhead.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
