# On a fresh machine: `make demo`, `make test`. Every target creates .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses logical --dist worksteal
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-fast torture lint docs bench clean

# Compare memory rules on smartwatch data: five seeds of small runs with intervals, spectra and ranks, in under five minutes.
demo: $(VENV)/activity
	rm -rf runs/demo
	$(BIN)/muonssm study demo --output runs/demo

# All tests.
test: $(VENV)/dev
	$(PYTEST)

# Under three minutes, for use while working: each behavior once, without the full product of cases.
test-fast: $(VENV)/dev
	$(PYTEST) -m "not slow and not full"

# Kill runs at many more moments than `make test` does, and resume them.
torture: $(VENV)/dev
	MUONSSM_TORTURE=20 $(BIN)/python -m pytest tests/lab/core/test_torture.py tests/lab/core/test_faults.py

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.h csrc/*.cpp tests/csrc/*.cpp
	$(BIN)/mypy

# The documentation site, in site/.
docs: $(VENV)/docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/dev
	$(BIN)/python benchmarks/chunked.py

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first, in the pinned version: everything after it finds it installed.
$(VENV)/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/activity: $(VENV)/core
	$(PIP) --editable ".[activity]"
	touch $@

# flash-linear-attention stays out of the environment: transformers would use it where it is importable, and it needs a GPU.
$(VENV)/dev: $(VENV)/core
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps --upgrade --target $(VENV)/peers fla-core einops
	touch $@

$(VENV)/docs: $(VENV)/core
	$(PIP) --editable ".[docs]"
	touch $@
