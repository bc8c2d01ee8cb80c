# Clean Slate's commands. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
JOBS ?= $(shell expr 2 \* $$(nproc)) # many tests wait for a deadline of theirs
PYTHON := .venv/bin/python
.PHONY: help setup demo test check bench test-vllm test-gpu clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: ## build .venv from pyproject.toml and constraints.txt; nothing to do is instant
	@.ci/setup

demo: setup ## make a real mess, show it, reset it, show the node clean (simulated GPUs where there are none)
	@$(PYTHON) demo/run.py

check: setup ## lint, types, imports, unit and node tests: about a minute, for every save
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	$(PYTHON) -m pytest -n $(JOBS) $(COVERAGE) tests/unit tests/node
	@echo "check: PASSED: lint, types, imports, unit and node tests"

# Measuring coverage takes a third more time: the fast part goes without.
test: COVERAGE := --cov=cleanslate --cov-branch --cov-config=pyproject.toml --cov-report=term
test: check test-vllm ## everything that needs no GPU: check and test-vllm
	@echo "test: PASSED: everything that needs no GPU"

test-vllm: setup ## the program against a real vLLM server (installs its CPU build once: 6 GB, minutes)
	@$(PYTHON) tests/vllm/install.py >/dev/null || [ $$? -eq 77 ]
	$(PYTHON) -m pytest tests/vllm -m vllm -s

test-gpu: ## the program against a real NVIDIA GPU: needs the driver and PyTorch, nothing else
	@.ci/test-gpu

bench: setup ## measure against what people use today and print the table of ratios
	@$(PYTHON) bench/run.py

clean: ## remove what was made in this folder (.venv, caches); the cache under your home stays
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "clean: kept $${CLEANSLATE_BUILD_CACHE:-$$HOME/.cache/cleanslate} (built libraries, vLLM); remove it by hand if wanted"
