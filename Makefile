# make demo    train on real digits, on one device and then on all, and compare
# make test    lint, types and every test that needs no GPU
# make test-all  the same with those marked full: the whole cross product, and real launchers
# make lowest  the tests of jobs and commands with the oldest releases that pyproject.toml allows
# make ecosystem  scripts of other libraries in an environment of their own, plain and with onefold; writes docs/reference/works-with.md
# make golden  small runs on simulated devices, whose bits are in tests/golden.json
# make mutants plants faults in the source one at a time, and asks whether make test finds each; takes hours
# make venv    the environment for a first look, and for development
# make docs    the site in build/docs, without running the pages: for writers; no network
# make docs-check  the same, after running what the pages show; fails where they differ
# make links   asks for every address outside of the site; needs a network
# make bench   all benchmarks, in an environment of their own: results as data, and the picture
# make gpu     tests, demo and a short benchmark on one GPU, with what PYTHON has: nothing is installed;
#              RESULTS=DIR says where the results go, DEVICE=cpu tries it without a GPU

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
BENCH_BIN := $(BENCH_VENV)/bin
LOWEST_VENV := .venv-lowest
ECOSYSTEM_VENV := .venv-ecosystem
RESULTS := benchmarks/results
JOBS := packages/onefold-jobs
OF_JOBS := digits,images,report,tables,text,loggers,augment,export
comma := ,
# Into the environment in which the stamp lies that is being made; says what comes, with its size.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
INSTALL = $(@D)/bin/python -m pip --disable-pip-version-check install --progress-bar off --constraint constraints.txt
SAY = | sed -En 's/^ *(Downloading|Using cached|Processing .*\/([^/]*\.whl)$$) */  \2/p'

# Of the order of the tests; drawn, and said at the end, unless it is given: make test SEED=7
SEED ?= $(shell echo $$RANDOM)

.PHONY: demo test test-all lowest ecosystem golden mutants lint venv docs docs-check links bench bench-venv gpu clean

demo: $(VENV)/demo.stamp
	$(BIN)/onefold demo

# The golden bits first: what they find needs no further tests.
# Two workers, as most of the tests that take time start processes of their own.
test: lint golden $(VENV)/test.stamp
	$(BIN)/pytest --numprocesses 2 --dist loadgroup --randomly-seed=$(SEED)

lowest: $(LOWEST_VENV)/lowest.stamp
	$(LOWEST_VENV)/bin/pytest --numprocesses 2 --dist loadgroup tests/cli tests/jobs

ecosystem: $(ECOSYSTEM_VENV)/ecosystem.stamp
	$(ECOSYSTEM_VENV)/bin/python -m ecosystem

golden: $(VENV)/dev.stamp
	$(BIN)/python -m tests.golden

mutants: $(VENV)/test.stamp
	$(BIN)/python -m tests.mutants

test-all: lint golden $(VENV)/test.stamp
	$(BIN)/pytest --numprocesses 2 --dist loadgroup -m "not gpu"
	$(MAKE) ecosystem

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: $(VENV)/dev.stamp

SPHINX = $(BIN)/sphinx-build --fail-on-warning --keep-going --jobs auto
docs: $(VENV)/docs.stamp
	$(SPHINX) --builder html --doctree-dir build/doctrees docs build/docs

docs-check: $(VENV)/docs.stamp
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
	$(BENCH_BIN)/python benchmarks/scaling.py --output $(RESULTS)/scaling.json
	$(BENCH_BIN)/python benchmarks/shards.py --output $(RESULTS)/shards.json
	$(BENCH_BIN)/python benchmarks/shards.py --accumulation --output $(RESULTS)/accumulation.json
	$(BENCH_BIN)/python benchmarks/picture.py

DEVICE := cuda:0
gpu: RESULTS := runs/gpu
gpu:
	$(PYTHON) -m tests.gpu --results $(RESULTS) --device $(DEVICE)

# torch first and by itself: with the pinned build in place nothing pulls in a larger one.
$(VENV)/torch.stamp $(BENCH_VENV)/torch.stamp $(LOWEST_VENV)/torch.stamp $(ECOSYSTEM_VENV)/torch.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onefold needs Python 3.11 or later; say which: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(@D)
	@echo 'Installing torch into $(@D):'
	@$(INSTALL) torch $(SAY)
	@touch $@

# Both distributions, each editable; the first argument has extras of onefold, the second of its jobs.
both = --editable '.[$(1)]' --editable '$(JOBS)[$(2)]'

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml $(JOBS)/pyproject.toml
	@echo 'Installing onefold[demo] and onefold-jobs into $(@D):'
	@$(INSTALL) --editable '.[demo]' --editable $(JOBS) $(SAY)
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	@echo 'Installing onefold[dev] and onefold-jobs[images] into $(@D):'
	@$(INSTALL) $(call both,dev,images) $(SAY)
	@touch $@

# What single guides and jobs need, and their tests.
$(VENV)/test.stamp: $(VENV)/dev.stamp
	@echo 'Installing onefold[transformers,loggers] and onefold-jobs[$(OF_JOBS)] into $(@D):'
	@$(INSTALL) $(call both,transformers$(comma)loggers,$(OF_JOBS)) $(SAY)
	@touch $@

# torch stays the one of constraints.txt: older releases have no small build on PyPI.
$(LOWEST_VENV)/lowest.stamp: $(LOWEST_VENV)/torch.stamp pyproject.toml $(JOBS)/pyproject.toml
	@$(INSTALL) uv $(SAY)
	@VIRTUAL_ENV=$(@D) $(@D)/bin/uv pip install --resolution lowest-direct --constraint constraints.txt $(call both,demo$(comma)dev$(comma)transformers$(comma)loggers,$(OF_JOBS))
	@touch $@

# uv, because pip cannot leave out a requirement of a library.
$(ECOSYSTEM_VENV)/ecosystem.stamp: $(ECOSYSTEM_VENV)/torch.stamp pyproject.toml ecosystem/requirements.txt ecosystem/overrides.txt
	@$(INSTALL) uv $(SAY)
	@VIRTUAL_ENV=$(@D) $(@D)/bin/uv pip install --constraint constraints.txt --overrides ecosystem/overrides.txt --editable . --requirement ecosystem/requirements.txt
	@touch $@

$(VENV)/docs.stamp: $(VENV)/test.stamp
	@echo 'Installing onefold[docs] into $(@D):'
	@$(INSTALL) --editable '.[docs]' $(SAY)
	@touch $@

$(BENCH_VENV)/bench.stamp: $(BENCH_VENV)/torch.stamp pyproject.toml $(JOBS)/pyproject.toml
	@echo 'Installing onefold[bench] and onefold-jobs into $(@D):'
	@$(INSTALL) --editable '.[bench]' --editable $(JOBS) $(SAY)
	@touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(LOWEST_VENV) $(ECOSYSTEM_VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
