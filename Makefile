# make run: the main job.  make test: lint, format, types and tests.  Each installs what it needs, once.
PYTHON ?= python3
TORCH ?= # a release other than the pinned one, in an environment of its own: make test TORCH=2.15.0
TESTS ?= tests # what make test runs
VENV := .venv$(if $(strip $(TORCH)),-torch$(strip $(TORCH))-$(notdir $(PYTHON)))
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
PINS := $(VENV)/constraints.txt
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
# editable_mode: a path file, which type checkers read; they do not run the import hook of the default
EDITABLE := --config-settings editable_mode=compat --editable
XDIST := --numprocesses 2 --dist worksteal
GAN := $(PY) -m experiments fit --config configs/gan/mixture.yaml
WASSERSTEIN := --model.loss wasserstein --model.penalty.weight 1
CONFIGS := $(patsubst configs/%.yaml,%,$(sort $(wildcard configs/*/*.yaml)))
# sinusoid compares with sinusoid_joint, which runs first
RESULTS ?= maml/sinusoid_joint $(filter-out maml/sinusoid_joint,$(CONFIGS))
BENCH ?= --jobs 2 # options of python -m experiments.benchmarks
OPINFO ?= # options of python -m tests.test_opinfo: --only sin atan2, --samples 6 of each, --resume
MUTANTS ?= # options of python -m tests.mutants: --only curvature meta/tasks.py, --number 200, --seed 1, --resume

.DEFAULT_GOAL := help
.PHONY: help env run gan results smoke bench bench-full lint test test-full test-device opinfo mutants size docs docs-serve dist clean
.DELETE_ON_ERROR:

help:
	@echo "make run    train MAML and its baseline on sinusoids; ends with a table and pictures"
	@echo "make gan    train a GAN with each gradient penalty in turn; ends with one table of them all, and pictures"
	@echo "make results  every config: tables and times in runs/results.txt, pictures in docs/images; an hour on one core"
	@echo "make smoke  every experiment for a few seconds"
	@echo "make bench  hoglib beside torch by hand, and beside other libraries that are installed; a table and a picture in minutes"
	@echo "make bench-full  installs the other libraries into .venv, and measures everything; half an hour on two cores"
	@echo "make lint   lint, format check, types, layers of imports"
	@echo "make test   the same, and the tests; with TORCH=2.15.0 the tests on that release, and its row of docs/versions.md"
	@echo "make test-full  the same with all cases of each test; twice as long"
	@echo "make opinfo  torch's own samples of its operators through every derivative; half an hour on two cores"
	@echo "make mutants  small changes of hoglib's code, and whether a test fails; an hour for 200 on two cores"
	@echo "make test-device  the tests of a GPU, on a simulated one"
	@echo "make size   lines of code of hoglib, experiments and tests, by package"
	@echo "make docs   the documentation site, in build/site; a broken link or reference is an error"
	@echo "make docs-serve  the same at http://127.0.0.1:8000, built again when a page changes"
	@echo "make dist   wheel and source distribution, checked, and the wheel installed beside torch alone"
	@echo "make clean  remove the environment and caches (runs/ stays)"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("hoglib: expected Python 3.11 or newer, got " + sys.version.split()[0] + "; name another one with make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) (once; one to three minutes)"
	@$(PYTHON) -m venv $(VENV)
	@sed '$(if $(strip $(TORCH)),s/^torch==.*/torch==$(strip $(TORCH))/; s/^setuptools==.*/setuptools<82/)' constraints.txt > $(PINS)
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint $(PINS) 'setuptools>=77'
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint $(PINS) --no-build-isolation $(EDITABLE) '.[experiments,dev,docs]'
	@touch $@

env: $(READY)

run: $(READY)
	@$(PY) -m experiments fit --config configs/maml/sinusoid_joint.yaml
	@$(PY) -m experiments fit --config configs/maml/sinusoid.yaml

gan: $(READY)
	@$(GAN) --model.penalty null
	@$(GAN) --model.penalty.kind r1
	@$(GAN) --model.penalty.kind r2
	@$(GAN) --model.penalty.kind zero_centred --model.penalty.weight 0.01
	@$(GAN) --model.penalty.kind dragan --model.penalty.weight 1
	@$(GAN) --model.penalty.kind wgan_gp $(WASSERSTEIN)
	@$(GAN) --model.penalty.kind wgan_gp --model.penalty.options.one_sided true $(WASSERSTEIN)
	@$(GAN)

results: $(READY)
	@set -e; for result in $(RESULTS); do \
		start=$$(date +%s); $(PY) -m experiments fit --config configs/$$result.yaml; \
		run=$$(ls -td runs/$$result/version_* | head -1); \
		{ echo "== $$result, $$(( $$(date +%s) - start )) s"; cat $$run/table.txt || true; } >> runs/results.txt 2> /dev/null; \
		sed -n "s|^# \(docs/images/.*\) is its \(.*\)|$$run/\2 \1|p" configs/$$result.yaml | xargs -r cp; done

smoke: $(READY)
	@set -e; for config in $$(find configs/smoke -name '*.yaml' | sort); do \
		echo "== $$config"; $(PY) -m experiments fit --config $$config; done

bench: $(READY)
	@$(PY) -m experiments.benchmarks --device auto $(BENCH)

bench-full: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint $(PINS) --constraint constraints-peers.txt --no-build-isolation $(EDITABLE) '.[peers]'
	@$(PY) -m experiments.benchmarks --full --device auto $(BENCH)

lint: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/basedpyright --project pyproject.toml
	@$(VENV)/bin/lint-imports

# lint and types are those of the pinned release: torch's annotations differ between releases
test: $(if $(strip $(TORCH)),$(READY),lint)
ifeq ($(strip $(TORCH)),)
	@$(PY) -m pytest --quiet $(XDIST) $(CASES) $(TESTS)
else
	@$(PY) -m tests.versions --tests $(TESTS) --options="$(XDIST) $(CASES)"
endif

test-full: CASES := -m ''
test-full: test

opinfo: $(READY)
	@$(PY) -m tests.test_opinfo $(OPINFO)

mutants: $(READY)
	@OMP_NUM_THREADS=1 $(PY) -m tests.mutants $(MUTANTS)

test-device: $(READY)
	@$(PY) -m pytest -p tests.device.plugin -p no:cacheprovider -m gpu -q tests

size: $(READY)
	@$(PY) -m tests.size

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "build/site/index.html"

docs-serve: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve --strict

# README.md's code runs where torch is and nothing else, not even NumPy; twine 6.1 is the first that reads SPDX licences
dist:
	@rm -rf dist build/tools build/alone
	@$(PYTHON) -m venv build/tools
	@build/tools/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build 'twine>=6.1' 'readme_renderer[md]'
	@build/tools/bin/python -m build
	@build/tools/bin/python -m twine check --strict dist/*
	@$(PYTHON) -m venv build/alone
	@build/alone/bin/python -m pip install --quiet --disable-pip-version-check torch==$(or $(strip $(TORCH)),$(PINNED)) dist/*.whl
	@sed -n '/^```python/,/^```$$/{/^```/d;p}' README.md > build/readme.py
	@cd build && alone/bin/hoglib check && alone/bin/python readme.py

clean:
	rm -rf .venv .venv-torch* build dist hoglib.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
