# Clean Slate's commands. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
JOBS ?= $(shell expr 2 \* $$(nproc)) # many tests wait for a deadline of theirs
PYTHON := .venv/bin/python
GO_PACKAGES := ./pause ./deviceplugin/... ./runtime/... # not Kubernetes itself, which takes minutes
TESTS := PYTHONPATH=tests $(PYTHON)
.PHONY: help setup demo demo-node test check coverage bench bench-cluster cluster cluster-down test-cluster test-scale test-vllm test-gpu clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup: ## build .venv from pyproject.toml and constraints.txt; nothing to do is instant
	@.ci/setup

demo: setup ## a leaking server on a real Kubernetes cluster (GPUs simulated), and its reset by `kubectl apply`
	@$(PYTHON) demo/cluster_demo.py

demo-node: setup ## the same on one machine, without a cluster: on its idle GPUs, or simulated ones where there are none
	@$(PYTHON) demo/node_demo.py

check: setup ## lint, types, imports, unit and node tests: about a minute, for every save
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	$(PYTHON) -m pytest -n $(JOBS) $(COVERAGE) tests/unit tests/node
	@echo "check: PASSED: lint, types, imports, unit and node tests"

coverage: COVERAGE := --cov=cleanslate --cov-branch --cov-config=pyproject.toml --cov-report=term
coverage: check ## check with branch coverage: three times as long, since every program of every test is measured

test: check test-vllm test-cluster test-scale ## everything that needs no GPU
	@echo "test: PASSED: everything that needs no GPU"

cluster: setup ## start a real Kubernetes cluster with two nodes and simulated GPUs (seconds; the first time it is built)
	@$(TESTS) -m cluster up

cluster-down: setup ## take the cluster down; nothing of it stays but what was built
	@$(TESTS) -m cluster down

test-cluster: setup ## resets, the operator, GPUs, nodes and faults on real clusters, three at a time
	@$(TESTS) -m cluster build
	cd tests/cluster/go && gofmt -d . && test -z "$$(gofmt -l .)" && go vet $(GO_PACKAGES) && go test $(GO_PACKAGES)
	$(PYTHON) -m pytest tests/cluster -m "not vllm and not scale" -n 3 --dist loadfile

test-scale: setup ## 5,000 simulated nodes on a real control plane
	@$(TESTS) -m cluster build --nodes 0
	$(PYTHON) -m pytest tests/cluster -m scale -s

test-vllm: setup ## the program against a real vLLM server (installs its CPU build once: 6 GB, minutes)
	@$(PYTHON) tests/vllm/install.py >/dev/null || [ $$? -eq 77 ]
	@$(TESTS) -m cluster build
	$(PYTHON) -m pytest tests/vllm tests/cluster/test_vllm.py -m vllm -s

test-gpu: ## the program against a real NVIDIA GPU: needs the driver and PyTorch, nothing else
	@.ci/test-gpu

bench: setup ## measure against what people use today and print the table of ratios
	@$(PYTHON) bench/run.py

bench-cluster: setup ## measure resets on the test cluster: time and its parts, API calls, the operator's memory
	@$(TESTS) -m cluster build
	@$(PYTHON) bench/run.py cluster_reset cluster_calls

clean: ## take the cluster down and remove what was made in this folder; the cache under your home stays
	@[ ! -x $(PYTHON) ] || $(TESTS) -m cluster down
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "clean: kept $${CLEANSLATE_BUILD_CACHE:-$$HOME/.cache/cleanslate} (Kubernetes, images, vLLM); remove it by hand if wanted"
