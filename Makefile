# `make demo` and `make test` work on a fresh machine with Python 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# One thread a process: with several processes on few cores, more threads are many times slower.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Modules are compiled when they are first imported, not all of them when they are installed.
INSTALL := install --no-compile

# Something of every room; the whole of privacy but what is marked slow.
FAST := tests/vector tests/optimizers tests/privacy tests/tasks tests/secure tests/config/test_methods.py tests/test_rooms.py \
	tests/test_randomness.py tests/algorithms/test_methods_transcriptions.py tests/data/test_data_batches.py \
	tests/data/test_data_partition.py tests/data/test_data_records.py tests/gradients/test_gradients_clipping.py \
	tests/engine/test_states.py tests/engine/test_csprng.py tests/federation/test_federation.py \
	tests/fetching tests/deploy/test_messages.py
RESULTS := results-002 results-002-scratch results-004 results-000 results-003

.PHONY: help setup demo deploy-demo test test-fast test-long lint docs bench torture results results-small $(RESULTS) clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; about two minutes)…"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(INSTALL) -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@$(PIP) $(INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Adding what the tests need…"
	@$(PIP) $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(VENV)/.installed-dev $(VENV)/.bench-resolves  ## the environment of the tests, and nothing else

demo: $(VENV)/.installed  ## set everything up and train a small model on real data
	@$(BIN)/tacit run recipes/quickstart.yaml

deploy-demo: $(VENV)/.installed  ## a server and three clients of a real federation, on this machine
	@$(PIP) install -c constraints.txt -e '.[flower]'
	@$(BIN)/python recipes/federation/demo.py runs/deploy-demo

# The benchmarks' environment is not built by the tests, but it is resolved, so that it cannot rot unseen.
$(VENV)/.bench-resolves: $(VENV)/.installed-dev pyproject.toml bench/constraints.txt bench/requirements.txt
	@echo "Asking whether the benchmarks' environment can be built (once; about half a minute)…"
	@$(PIP) install --dry-run --ignore-installed -c bench/constraints.txt -e '.[transformers]' \
		-r bench/requirements.txt
	@touch $@

test: $(VENV)/.installed-dev $(VENV)/.bench-resolves lint  ## lint, types and all tests but the longest
	@$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not long' tests src

test-fast: $(VENV)/.installed-dev  ## the quick tests of the core, in under two minutes
	@$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow' $(FAST)

test-long: $(VENV)/.installed-dev  ## the longest tests: clients, server and twenty Ray workers, killed in mid-round
	@$(ONE_THREAD) $(BIN)/python -m pytest -m long tests
	@$(ONE_THREAD) TACIT_RAY_KILLS=20 $(BIN)/python -m pytest -k random_moments tests/engine/test_ray.py

lint: $(VENV)/.installed-dev  ## ruff and mypy --strict
	@$(BIN)/ruff check src tests bench docs/making
	@$(BIN)/ruff format --check src tests bench docs/making
	@$(BIN)/mypy

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "Adding what the site is built with…"
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs  ## the documentation as a site, in build/docs; warnings are errors
	@$(ONE_THREAD) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open build/docs/index.html"

# The peers live in an environment of their own, never in the user's. Torch first: a peer must not pick it.
.venv-bench/.installed: pyproject.toml bench/constraints.txt bench/requirements.txt
	@echo "Setting up .venv-bench (once; about three minutes)…"
	@test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python -m pip --disable-pip-version-check -q install \
		torch==$$(sed -n 's/^torch==//p' bench/constraints.txt)
	@.venv-bench/bin/python -m pip --disable-pip-version-check -q install -c bench/constraints.txt \
		-e '.[transformers]' -r bench/requirements.txt
	@touch $@

bench: .venv-bench/.installed  ## speed and memory against peers (about half an hour; best on a quiet machine)
	@.venv-bench/bin/python bench/simulation.py
	@.venv-bench/bin/python bench/gradients.py
	@.venv-bench/bin/python bench/privacy.py
	@.venv-bench/bin/python bench/large.py
	@.venv-bench/bin/python bench/speech.py

SECONDS ?= 3600
SEED ?= 0
torture: $(VENV)/.installed-dev  ## break runs for an hour (SECONDS=…, SEED=…) and count what held
	@$(ONE_THREAD) $(BIN)/python tests/faults/torture.py --seconds $(SECONDS) --seed $(SEED)

results: $(RESULTS) results-small  ## all comparisons of docs/results.md (days on two cores; each has a target)

# What a committed cell of docs/results/ says is not run again; the same command goes on where it was stopped.
$(RESULTS): results-%: $(VENV)/.installed-dev  ## (results-002, results-004, …) one of the papers' headlines
	@$(ONE_THREAD) $(BIN)/python docs/making/results.py $*

results-small: $(VENV)/.installed-dev  ## the small comparisons of docs/results.md (about two hours on two cores)
	@test -e runs/small-003-seed || $(BIN)/tacit pretrain recipes/small/003/seed.yaml --out runs/small-003-seed
	@for part in example-level client-level not-private large large-sgd speech-noise speech-optimizers \
		speech-cohort; do $(BIN)/tacit run recipes/small/results-$$part.yaml || exit 1; done
	@$(BIN)/tacit compare runs/results-example-level --picture docs/results-example-level.png
	@$(BIN)/tacit compare runs/results-client-level --metric personal_accuracy \
		--picture docs/results-client-level.png
	@for alpha in 0.1 0.6; do $(BIN)/tacit compare runs/results-not-private/*alpha=$$alpha* \
		--picture docs/results-not-private-$$alpha.png; done

clean:  ## remove the environments and caches (runs stay)
	rm -rf $(VENV) .venv-bench build/docs .mypy_cache .ruff_cache .pytest_cache
