# Everything needs only make and a Python of 3.11 or newer: `make demo`, `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_READY := $(VENV)/.ready-run
TEST_READY := $(VENV)/.ready-test
RECIPE_OF_VENV := pyproject.toml constraints.txt

# Compiled modules are kept, or every process of the tests compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Four tests at a time, as many mostly wait; one of them is mypy. No quote that needs a shell: it would keep a signal to
# make to itself.
PYTEST_OPTIONS := -n 4 --dist loadgroup --no-loadscope-reorder --durations=10

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo style lint test test-full dist map fuzz chaos clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN_READY) ## train CartPole-v1 to a mean return of 475 with IMPALA on two actor processes
	$(BIN)/echelon train impala CartPole-v1 --actors 2 --envs-per-actor 32 --until-return 475 --minutes 5

style: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style ## ruff and mypy
	$(BIN)/mypy

test: style ## every check CI runs: ruff, mypy, pytest without the long runs
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) -m 'not full'

test-full: style ## the same checks and the long runs too
	$(BIN)/python -m pytest $(PYTEST_OPTIONS)

dist: $(RUN_READY) ## build the wheel, dist/echelon-VERSION-py3-none-any.whl
	rm -rf build  # otherwise modules that no longer exist get into the wheel
	$(BIN)/pip wheel --disable-pip-version-check -q --no-deps -w dist .

map: $(RUN_READY) ## sizes, modules behind train, files one step walks through, mode switches, repeated class names
	$(BIN)/python benchmarks/map.py

fuzz: $(TEST_READY) ## mutated messages, run folders, command lines and TCP clients (benchmarks/fuzz.py has the options)
	$(BIN)/python benchmarks/fuzz.py frames
	$(BIN)/python benchmarks/fuzz.py cli
	$(BIN)/python benchmarks/fuzz.py sockets
	$(BIN)/python benchmarks/fuzz.py folders

chaos: $(TEST_READY) ## inflict FAULTS seeded faults on runs of every kind: make chaos FAULTS=300 SEED=1
	$(BIN)/python benchmarks/chaos.py --faults $(or $(FAULTS),100) --seed $(or $(SEED),1)

clean: ## remove the virtual environments, caches and builds; runs/ stays
	rm -rf $(VENV) .venv-peers build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: unpinned, another package's wish for it can bring gigabytes of CUDA libraries.
$(RUN_READY): $(RECIPE_OF_VENV)
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no '$(PYTHON)'. Install Python 3.11 or newer, or name one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Echelon needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	    "Install one and name it: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: the venv module is missing." \
	    "Install it (Debian, Ubuntu: apt install python3-venv) and run make again." >&2; exit 1; }
	@echo "[1/3] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] torch, pinned by constraints.txt (the big one: minutes on a slow line)"
	@$(BIN)/pip install --disable-pip-version-check -c constraints.txt torch
	@echo "[3/3] echelon and what it needs"
	@$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e .
	@touch $@

# Without --no-deps, nes-py (20 s of compiling) also installs gym and pyglet, which Echelon does not use.
$(TEST_READY): $(RUN_READY)
	@echo "[test] the tools and environments of the tests"
	@$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[test]'
	@command -v g++ >/dev/null || { echo "[test] no g++: the tests of Super Mario Bros are skipped"; exit 0; }; \
	  $(BIN)/pip install --disable-pip-version-check -q -c constraints.txt --no-deps nes-py gym-super-mario-bros
	@touch $@
