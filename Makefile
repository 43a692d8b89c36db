# `make help` lists the targets. Each target sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
VLLM_TESTS ?= tests/e2e/vllm
STAMP := $(VENV)/.installed
PROTOS := $(wildcard protos/kvstore/v1/*.proto)

.PHONY: help setup demo demo-trace test e2e-vllm check format protos bench peers clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(STAMP) ## Make .venv with everything that demo, tests and checks need

$(STAMP): pyproject.toml setup.py $(wildcard kvstore/*/*.c)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f kvstore/model/_checksum*.so
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,torch,nixl]'
	@touch $(STAMP)

demo: $(STAMP) ## Run the main job on this machine: two nodes, three workers, one scheduler
	$(BIN)/kvstore demo

test: $(STAMP) ## Run all tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

e2e-vllm: $(STAMP) ## Run the tests with the real vLLM; makes its environment first (VLLM_TESTS: which tests)
	KVSTORE_VLLM_PYTHON=$$($(BIN)/python tests/e2e/vllm/side_environment.py) && export KVSTORE_VLLM_PYTHON && \
	$(BIN)/python -m pytest -m vllm --durations=0 $(VLLM_TESTS)

check: $(STAMP) ## Format check, lint, types, import rules, proto drift, tests found
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=bench $(BIN)/mypy $(filter-out bench/peers.py,$(wildcard bench/*.py))
	MYPYPATH=bench $(BIN)/mypy bench/peers.py
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check
	found=$$($(BIN)/python -m pytest --collect-only -qq) || { echo "$$found"; exit 1; }

format: $(STAMP) ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(STAMP) ## Generate kvstore/rpc/v1 from protos/
	$(BIN)/python protos/generate.py

peers: $(STAMP) ## Make the environments of the stores that bench/peers.py compares with (KVSTORE_PEERS: where)
	$(BIN)/python bench/peers/environments.py

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
