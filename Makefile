# make demo    train on real digits, on one device and then on all, and compare
# make test    lint, types and every test that needs no GPU
# make venv    the environment that tests, examples and benchmarks need
# make bench   the benchmarks, against a plain loop and DistributedDataParallel

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test lint venv bench clean

demo: $(VENV)/demo.stamp
	$(BIN)/onefold demo

# Two workers, as most of the tests that take time start processes of their own.
test: lint $(VENV)/dev.stamp
	$(BIN)/pytest --numprocesses 2 --dist loadgroup

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: $(VENV)/dev.stamp

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/exchange.py
	$(BIN)/python benchmarks/training.py

# torch first and by itself: with the pinned build in place nothing pulls in a larger one.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onefold needs Python 3.11 or later; say which: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --requirement constraints.txt
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(PIP) install --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
