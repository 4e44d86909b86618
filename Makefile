# PYTHON= picks the interpreter (3.11 to 3.13), PIP_ARGS= passes options to pip, such as an index.
.DEFAULT_GOAL := help
.PHONY: help run test test-gpu lint clean
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
READY := .venv/.ready

help: ## list targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-8s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

run: $(READY) ## fused dispatch and GEMM, on whatever hardware is here
	$(BIN)/python -m tilepipe.run +experiment=dispatch_gemm

test: $(READY) ## all tests that need no GPU
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not gpu and not multi_gpu"

test-gpu: $(READY) ## tests that need one NVIDIA GPU
	$(BIN)/python -m pytest -q -m gpu tests/gpu

lint: $(READY) ## formatting, style, import contracts, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

clean: ## remove the environment and caches, keep results
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
