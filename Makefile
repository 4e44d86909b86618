# PYTHON= picks the interpreter (3.11 to 3.13), PIP_ARGS= passes options to pip, such as an index.
.DEFAULT_GOAL := help
.PHONY: help run repro repro-comm repro-gemm repro-dispatch-gemm repro-gemm-combine repro-moe-layer report
.PHONY: test search test-gpu lint clean
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
READY := .venv/.ready

help: ## list targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-20s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

run: $(READY) ## fused dispatch and GEMM, on whatever hardware is here
	$(BIN)/python -m tilepipe.run +experiment=dispatch_gemm

repro: $(READY) ## every experiment that this machine can run, and what it left out
	$(BIN)/python -m tilepipe.reproduce

repro-comm: $(READY) ## dispatch and combine, the GEMM held out
	$(BIN)/python -m tilepipe.reproduce dispatch combine

repro-gemm: $(READY) ## the grouped GEMM alone
	$(BIN)/python -m tilepipe.reproduce grouped_gemm

repro-dispatch-gemm: $(READY) ## dispatch -> GEMM, fused against unfused, with breakdown
	$(BIN)/python -m tilepipe.reproduce dispatch_gemm

repro-gemm-combine: $(READY) ## GEMM -> combine, fused against unfused, with breakdown
	$(BIN)/python -m tilepipe.reproduce gemm_combine

repro-moe-layer: $(READY) ## a whole layer, fused against its parts and torch's
	$(BIN)/python -m tilepipe.reproduce moe_layer

report: $(READY) ## tables and figures of what lies below outputs/
	$(BIN)/python -m tilepipe.report outputs

test: $(READY) ## all tests that need no GPU
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not gpu and not multi_gpu"

ROUNDS ?= 10
search: $(READY) ## property tests on examples of their own, ROUNDS= times (10) or until one fails
	for _ in $$(seq $(ROUNDS)); do \
	    $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "hypothesis and not gpu and not multi_gpu" \
	        --hypothesis-profile=search || exit; \
	done

test-gpu: $(READY) ## tests that need one NVIDIA GPU
	$(BIN)/python -m pytest -q -m gpu tests/gpu

lint: $(READY) ## formatting, style, import contracts, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

clean: ## remove the environment and caches, keep results
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
