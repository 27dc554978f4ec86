# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint bench clean

# LongHorn, plain against Muon, by the paper's recipe on smartwatch data, shortened to fit five minutes.
demo: $(VENV)/activity
	rm -rf runs/demo
	$(BIN)/muonssm compare watch --set training.epochs=8 --set training.snapshots=true --output runs/demo

test: $(VENV)/dev
	$(BIN)/python -m pytest

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev
	$(BIN)/python benchmarks/chunked.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first, in the pinned version: whatever follows finds it installed and asks for no other.
$(VENV)/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/activity: $(VENV)/core
	$(PIP) --editable ".[activity]"
	touch $@

$(VENV)/dev: $(VENV)/core
	$(PIP) --editable ".[dev]"
	touch $@
