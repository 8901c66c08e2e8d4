# make demo    train on real digits, on one device and then on all, and compare the bits
# make test    lint, types, golden bits, and all tests that need no GPU
# make test-all  the same with the tests marked full: the whole cross product, and real launchers
# make lowest  tests of jobs and commands with the oldest releases that pyproject.toml allows
# make matrix  the fast tests with every installed Python, and the lowest, pinned and newest PyTorch
# make release-check  build all distributions in dist, and try them as a user would with each of these
#              Pythons: every install command of the docs, the README, the demo, a job, the site
# make ecosystem  scripts of other libraries, plain and with onefold; writes docs/reference/works-with.md
# make launchers  real launchers, and files for clusters checked by the packages of those clusters
# make golden  small runs on simulated devices, compared with the bits in tests/golden.json
# make mutants plant faults in the source, and check that make test finds each of them; takes hours
# make venv    create the environment for a first look, and for development
# make docs    build the site in build/docs without running its pages, for writers; no network
# make docs-check  the same, after running the code of all pages; fails on a difference
# make links   check every external link of the site; needs a network
# make bench   all benchmarks in a separate environment: results as JSON, and the figure
# make gpu     tests, demo and a short benchmark on one GPU, with the packages of PYTHON; installs nothing
#              (RESULTS=DIR: folder of the results; DEVICE=cpu: try it without a GPU)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
BENCH_BIN := $(BENCH_VENV)/bin
LOWEST_VENV := .venv-lowest
ECOSYSTEM_VENV := .venv-ecosystem
LAUNCHERS_VENV := .venv-launchers
RESULTS := benchmarks/results
JOBS := packages/onefold-jobs
OF_TESTS := demo,dev,transformers,loggers,s3-server
OF_JOBS := digits,images,report,tables,text,loggers,augment,tune,export
comma := ,
# Installs into the environment of the stamp that is being made; SAY lists downloads with sizes.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
INSTALL = $(@D)/bin/python -m pip --disable-pip-version-check install --progress-bar off --constraint constraints.txt
SAY = | sed -En 's/^ *(Downloading|Using cached|Processing .*\/([^/]*\.whl)$$) */  \2/p'

# Seed of the order of the tests, random by default and printed at the end: make test SEED=7
SEED ?= $(shell echo $$RANDOM)

.PHONY: demo test test-all lowest matrix matrix-one release-check ecosystem launchers golden mutants lint venv docs docs-check links bench bench-venv gpu clean

demo: $(VENV)/demo.stamp
	$(BIN)/onefold demo

# The golden bits come first: if they differ, no further test is needed.
# Three workers, because many tests wait for processes of their own.
test: lint golden $(VENV)/test.stamp
	$(BIN)/pytest --numprocesses 3 --dist loadgroup --randomly-seed=$(SEED)

lowest: $(LOWEST_VENV)/lowest.stamp
	$(LOWEST_VENV)/bin/pytest --numprocesses 2 --dist loadgroup tests/cli tests/jobs

# Each combination has an environment of its own, which is kept for the next time.
PYTHONS := 3.11 3.12 3.13 3.14
MATRIX_PYTHON ?= $(foreach version,$(PYTHONS),$(shell python$(version) -c "" 2>/dev/null && echo python$(version)))
MATRIX_TORCH ?= lowest pinned newest
MATRIX_ENV = .venv-matrix-$(notdir $(PYTHON))-$(TORCH)
lowest_torch = torch==$(shell sed -n 's/^ *"torch>=\(.*\)",/\1/p' pyproject.toml).*
pinned_torch = $(shell cat constraints.txt)
newest_torch = torch
MISSING = $(if $(filter file,$(origin MATRIX_PYTHON)),$(filter-out $(MATRIX_PYTHON:python%=%),$(PYTHONS)))
SAY_MISSING = @test -z '$(MISSING)' || echo 'Not tried, because not on PATH: Python $(MISSING) (uv python install $(MISSING))'
matrix:
	$(SAY_MISSING)
	@$(foreach python,$(MATRIX_PYTHON),$(foreach torch,$(MATRIX_TORCH),$(MAKE) --no-print-directory matrix-one PYTHON=$(python) TORCH=$(torch) &&)) true

matrix-one:
	$(PYTHON) -m venv $(MATRIX_ENV)
	$(MATRIX_ENV)/bin/python -m pip install --progress-bar off '$($(TORCH)_torch)' $(SAY)
	$(MATRIX_ENV)/bin/python -m pip install --progress-bar off $(call both,$(OF_TESTS),$(OF_JOBS)) $(SAY)
	$(MATRIX_ENV)/bin/pytest --numprocesses 2 -m "not processes and not full and not gpu" tests

release-check:
	$(SAY_MISSING)
	$(firstword $(MATRIX_PYTHON)) tests/release.py $(MATRIX_PYTHON)
	$(SAY_MISSING)

ecosystem: $(ECOSYSTEM_VENV)/ecosystem.stamp
	$(ECOSYSTEM_VENV)/bin/python -m ecosystem

launchers: $(LAUNCHERS_VENV)/launchers.stamp
	$(LAUNCHERS_VENV)/bin/pytest -m "full and not gpu" tests/launcher/test_launch_files.py tests/launcher/test_real_launchers.py

golden: $(VENV)/dev.stamp
	$(BIN)/python -m tests.golden

mutants: $(VENV)/test.stamp
	$(BIN)/python -m tests.mutants

test-all: lint golden $(VENV)/test.stamp
	$(BIN)/pytest --numprocesses 2 --dist loadgroup -m "not gpu"
	$(MAKE) ecosystem launchers

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

venv: $(VENV)/dev.stamp

SPHINX = $(BIN)/sphinx-build --fail-on-warning --keep-going --jobs auto
docs: $(VENV)/docs.stamp
	$(SPHINX) --builder html --doctree-dir build/doctrees docs build/docs

docs-check: $(VENV)/docs.stamp $(VENV)/test.stamp
	$(BIN)/python -m docs.execute
	$(MAKE) docs
	$(SPHINX) --builder markdown --tag markdown --doctree-dir build/doctrees-markdown docs build/docs

links: $(VENV)/docs.stamp
	$(SPHINX) --builder linkcheck --doctree-dir build/doctrees docs build/links

bench-venv: $(BENCH_VENV)/bench.stamp

bench: $(BENCH_VENV)/bench.stamp
	$(BENCH_BIN)/python benchmarks/exchange.py --output $(RESULTS)/exchange.json
	$(BENCH_BIN)/python benchmarks/overhead.py --output $(RESULTS)/overhead.json
	$(BENCH_BIN)/python benchmarks/start.py --output $(RESULTS)/start.json
	$(BENCH_BIN)/python benchmarks/checkpoint.py --output $(RESULTS)/checkpoint.json
	$(BENCH_BIN)/python benchmarks/recording.py --output $(RESULTS)/recording.json
	$(BENCH_BIN)/python benchmarks/training.py --output $(RESULTS)/training.json
	$(BENCH_BIN)/python benchmarks/limit.py --output $(RESULTS)/limit.json
	$(BENCH_BIN)/python benchmarks/scaling.py --output $(RESULTS)/scaling.json
	$(BENCH_BIN)/python benchmarks/shards.py --output $(RESULTS)/shards.json
	$(BENCH_BIN)/python benchmarks/shards.py --accumulation --output $(RESULTS)/accumulation.json
	$(BENCH_BIN)/python benchmarks/picture.py

DEVICE := cuda:0
gpu: RESULTS := runs/gpu
gpu:
	$(PYTHON) -m tests.gpu --results $(RESULTS) --device $(DEVICE)

# torch is installed first and alone: then no other package pulls in a larger build.
$(VENV)/torch.stamp $(BENCH_VENV)/torch.stamp $(LOWEST_VENV)/torch.stamp $(ECOSYSTEM_VENV)/torch.stamp $(LAUNCHERS_VENV)/torch.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onefold requires Python 3.11 or later: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(@D)
	@echo 'Installing torch into $(@D):'
	@$(INSTALL) torch $(SAY)
	@touch $@

# Both distributions, editable; the arguments are the extras of onefold and of onefold-jobs.
both = --editable '.[$(1)]' --editable '$(JOBS)[$(2)]'

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml $(JOBS)/pyproject.toml
	@echo 'Installing onefold[demo] and onefold-jobs into $(@D):'
	@$(INSTALL) --editable '.[demo]' --editable $(JOBS) $(SAY)
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	@echo 'Installing onefold[dev] and onefold-jobs[images] into $(@D):'
	@$(INSTALL) $(call both,dev,images) $(SAY)
	@touch $@

$(VENV)/lint.stamp: $(VENV)/dev.stamp
	@echo 'Installing onefold[lint] into $(@D):'
	@$(INSTALL) --editable '.[lint]' $(SAY)
	@touch $@

# Requirements of individual guides and jobs, and of their tests.
$(VENV)/test.stamp: $(VENV)/dev.stamp
	@echo 'Installing onefold[$(OF_TESTS)] and onefold-jobs[$(OF_JOBS)] into $(@D):'
	@$(INSTALL) $(call both,$(OF_TESTS),$(OF_JOBS)) $(SAY)
	@touch $@

# torch stays pinned: older releases have no small build.
$(LOWEST_VENV)/lowest.stamp: $(LOWEST_VENV)/torch.stamp pyproject.toml $(JOBS)/pyproject.toml
	@$(INSTALL) uv $(SAY)
	@VIRTUAL_ENV=$(@D) $(@D)/bin/uv pip install --resolution lowest-direct --constraint constraints.txt $(call both,demo$(comma)dev$(comma)transformers$(comma)loggers,$(OF_JOBS))
	@touch $@

# Kept apart, because these packages require many others.
$(LAUNCHERS_VENV)/launchers.stamp: $(LAUNCHERS_VENV)/torch.stamp pyproject.toml $(JOBS)/pyproject.toml
	@$(INSTALL) $(call both,dev,images) 'ray[train]' skypilot dstack kubeflow-trainer-api kubeflow-training $(SAY)
	@touch $@

# uv, because pip cannot ignore a library's requirement.
$(ECOSYSTEM_VENV)/ecosystem.stamp: $(ECOSYSTEM_VENV)/torch.stamp pyproject.toml ecosystem/requirements.txt ecosystem/overrides.txt
	@$(INSTALL) uv $(SAY)
	@VIRTUAL_ENV=$(@D) $(@D)/bin/uv pip install --constraint constraints.txt --overrides ecosystem/overrides.txt --editable . --requirement ecosystem/requirements.txt
	@touch $@

$(VENV)/docs.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo 'Installing onefold[docs] into $(@D):'
	@$(INSTALL) --editable '.[docs]' $(SAY)
	@touch $@

$(BENCH_VENV)/bench.stamp: $(BENCH_VENV)/torch.stamp pyproject.toml $(JOBS)/pyproject.toml
	@echo 'Installing onefold[bench] and onefold-jobs into $(@D):'
	@$(INSTALL) --editable '.[bench]' --editable $(JOBS) $(SAY)
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(LOWEST_VENV) $(ECOSYSTEM_VENV) $(LAUNCHERS_VENV) .venv-matrix-* build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
