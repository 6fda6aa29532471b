# Ballast: the commands a user and a contributor need.  `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ballast-setup
AGAIN = $(MAKE)
# Four workers also on two cores: many tests wait for processes. `make test WORKERS=0` runs one at a time.
WORKERS ?= 4
DIST := loadgroup
# Unit tests wait for nothing, and each worker imports everything: one a core. They share no cluster that would
# keep them together, and a file costs the scheduler less than its tests; `make test` draws more random examples.
test-unit coverage-unit: WORKERS = logical --maxprocesses=8
test-unit coverage-unit: DIST := loadfile
UNIT = -m "not api and not processes and not e2e and not slow and not nightly" --hypothesis-profile=quick
# What proves again, on more cases or by another way, what other tests prove. Files that ARGS names are run whole.
DAILY = -m "not nightly"
# Without a limit of restarts, a run whose worker is lost waits for ever.
pytest_with = $(BIN)/python -m pytest --numprocesses=$(1) --dist=$(DIST) --no-loadscope-reorder --max-worker-restart=0 $(if $(CI),--durations=25)
PYTEST = $(call pytest_with,$(WORKERS))
ARGS ?=

export OMP_NUM_THREADS ?= 1
# Tests start hundreds of Python processes; where no bytecode is kept, each of them compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help docs setup demo test test-cuda test-nightly test-unit test-api test-e2e e2e-nodes bench reproduce coverage coverage-unit chaos check format generate clean

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

# Both at once: one waits for downloads, the other for the compiler. A Python that is too old is told by the first.
setup: ## install the locked Python packages into .venv and build the local control plane (once)
	@( "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || exit 0; \
	PYTHONPATH=localcluster exec "$(PYTHON)" -m ballast_localcluster.setup ) & \
	trap "kill $$! 2>/dev/null || true" EXIT; MAKEFLAGS= $(AGAIN) --silent $(STAMP); wait $$!

$(STAMP): pyproject.toml $(wildcard */pyproject.toml) uv.lock scripts/setup-python
	@scripts/setup-python "$(PYTHON)" "$(VENV)"
	@touch $@

demo: setup ## run the whole story on a local cluster (ARGS="--output json")
	@$(BIN)/ballast demo $(ARGS)

# The demo's GPUs are emulated by time, and it waits for half of its own: after the others, beside a single worker
# of tests that compute and start nothing (`make test BESIDE=`: alone).
DEMO := tests/e2e/test_demo_story.py
BESIDE := tests/policies
test: setup ## run every test but those of each night
ifeq ($(findstring tests/,$(ARGS)),)
	@failed=0; \
	$(PYTEST) $(DAILY) $(addprefix --ignore=,$(DEMO) $(BESIDE)) $(ARGS) || failed=1; \
	$(call pytest_with,$(if $(filter 0,$(WORKERS)),0,2)) $(DAILY) $(ARGS) $(DEMO) $(BESIDE) || { [ $$? -eq 5 ] || failed=1; }; \
	exit $$failed
else
	@$(PYTEST) $(ARGS)
endif

test-nightly: setup ## run every test, with new random examples and more of them (half an hour)
	@$(MAKE) --no-print-directory test DAILY= ARGS="--hypothesis-profile=nightly $(ARGS)"

test-unit: $(STAMP) ## run the fast tests: no cluster, no processes, nothing marked slow; less than a minute
	@$(PYTEST) $(UNIT) $(ARGS)

test-api: setup ## run the tests on a real API server
	@$(PYTEST) -m "api and not nightly" $(ARGS)

test-e2e: setup ## run the product's promises on a local cluster with process nodes
	@$(BIN)/python -m pytest $(ARGS) tests/e2e

# The tests of curves, moves and checkpoints on a GPU. Pods of several ranks would need a GPU for each of them.
CUDA_TESTS ?= tests/trainer/loop/test_same_curve.py tests/trainer/loop/test_rebalance.py tests/trainer/loop/test_evaluation.py \
	tests/trainer/loop/test_asynchronous.py tests/trainer/layers/test_precision.py tests/trainer/checkpoints
test-cuda: $(STAMP) ## run the trainer's tests on this machine's GPU over NCCL; its ranks may share one; into out/cuda/CARD.xml
	@nvidia-smi --list-gpus
	@card=$$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | tr -c '[:alnum:]\n' -); \
	BALLAST_TEST_DEVICE=cuda $(PYTEST) $(DAILY) --junitxml=out/cuda/$$card.xml $(ARGS) $(CUDA_TESTS)

e2e-nodes: setup ## run the chart, images and trainers on real kubelets (root; containerd, buildah; a quarter of an hour)
	@$(BIN)/python -m ballast_localcluster.setup --kubelets
	@BALLAST_PATIENCE=$${BALLAST_PATIENCE:-3} $(BIN)/python -m pytest -k real $(ARGS) tests/localcluster/test_real_nodes.py tests/e2e/test_real_kubelets.py tests/e2e/test_demo_story.py

bench: $(STAMP) ## run the quick benchmarks, each within a minute, against the last release's cost (others: benchmarks/)
	@$(BIN)/python benchmarks/compare.py $(ARGS)

PAGES = lab/benchmarks/planning/published_page.py lab/benchmarks/simulator/published_page.py lab/benchmarks/prices/page.py \
	benchmarks/trainer/published_page.py
reproduce: $(STAMP) ## make the published figures again and judge them, and their pages (an hour and more; ARGS="--data FOLDER")
	@$(BIN)/ballast reproduce --all $(ARGS)
	@for page in $(PAGES); do $(BIN)/python $$page || exit 1; done
	@git diff --exit-code -- lab/docs || { echo "pages of published figures differ: commit them"; exit 1; }

SEED ?= 1
FAULTS ?= 200
chaos: $(if $(findstring --real,$(ARGS)),setup,$(STAMP)) ## let seeded faults loose on the operator's loops and shorten what fails (SEED=1 FAULTS=200; ARGS=--real: on processes)
	@$(BIN)/python -m tests.chaos --seed $(SEED) --faults $(FAULTS) $(ARGS)

coverage: setup ## run the tests (ARGS="tests/policies") and print which lines they do not reach
	@$(PYTEST) $(DAILY) --cov --cov-report=term:skip-covered --cov-report=html:out/coverage $(ARGS)

coverage-unit: $(STAMP) ## run the fast tests and print how much of each module they reach, lines and branches
	@$(PYTEST) $(UNIT) --cov --cov-report=term:skip-covered $(ARGS)

check: $(STAMP) ## format, lint, types, import contracts, generated files, documentation
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory generate
	@git diff --exit-code -- crds charts docs || { echo "generated files differ: commit the result of 'make generate'"; exit 1; }
	@$(MAKE) --no-print-directory docs
	@scripts/longest

format: $(STAMP) ## format, and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(STAMP) ## build the documentation site into out/site; a broken link or an orphan page is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

generate: $(STAMP) ## write the custom resource definitions, the chart's copies, references
	@$(BIN)/python scripts/generate_docs.py

clean: ## remove the environment (the control plane stays in the user's cache)
	rm -rf $(VENV)
