# make help lists the targets. `demo` and `test` prepare everything themselves.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

JOBS ?= $(shell nproc)
export JOBS
VENV_PYTHON := .venv/bin/python
CPP_FILES = $$(find csrc tests -name '*.h' -o -name '*.cpp')

# For `bench`, `bench-host` and `gpu-test`: what to run, and further arguments.
BENCH ?=
ARGS ?=
# For `soak`: how long a random program runs, and from which seed (random when empty).
SOAK_STEPS ?= 10000000
VMM_SEED ?=

.PHONY: help
help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: demo
demo: build ## three models in three pools under one limit, on the GPU or on host memory
	@$(VENV_PYTHON) -m torch_vmm demo $(ARGS)

.PHONY: test
test: ## everything that CI checks
	@scripts/bootstrap cpp
	@# While torch comes: that waits for the network and the disk, and takes one core.
	@scripts/bootstrap test & coming=$$!; built=0; trap 'kill $$coming; exit 130' INT TERM; scripts/cpp_tests build asan || built=$$?; wait $$coming; exit $$built
	@$(MAKE) --no-print-directory lint
	@scripts/build_extension $(VENV_PYTHON)
	@for variant in asan tsan; do scripts/cpp_tests build $$variant; done
	@for variant in asan tsan; do scripts/cpp_tests run $$variant; done
	@$(VENV_PYTHON) -m pytest tests/python tests/api --timeout=600 -n $$(($(JOBS) + 1)) --dist loadfile $(ARGS)
	@$(VENV_PYTHON) -m tests.standin -m tests.standin.suite --third-of-api $(ARGS)

.PHONY: test-newest
test-newest: ## the Python tests on host memory under the newest torch, in a venv under build/ (gigabytes)
	@scripts/bootstrap demo
	@scripts/test_newest $(ARGS)

.PHONY: build
build: ## the extension, in place, for .venv
	@scripts/bootstrap demo
	@scripts/build_extension $(VENV_PYTHON)

.PHONY: tools
tools: ## what tests and linters need, in .venv
	@scripts/bootstrap test

.PHONY: format
format: tools ## format C++ and Python
	@.venv/bin/clang-format -i $(CPP_FILES)
	@.venv/bin/ruff check --fix --quiet .
	@.venv/bin/ruff format .

.PHONY: lint
lint: tools ## clang-format, ruff, mypy, clang-tidy
	@.venv/bin/clang-format --dry-run --Werror $(CPP_FILES)
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@scripts/cpp_tests configure plain
	@$(VENV_PYTHON) scripts/clang_tidy.py

.PHONY: cpp-test
cpp-test: tools ## C++ tests, plain: the quickest way
	@scripts/cpp_tests build plain
	@scripts/cpp_tests run plain $(ARGS)

.PHONY: asan
asan: tools ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/cpp_tests build asan
	@scripts/cpp_tests run asan $(ARGS)

.PHONY: tsan
tsan: tools ## C++ tests with threads, under ThreadSanitizer
	@scripts/cpp_tests build tsan
	@scripts/cpp_tests run tsan $(ARGS)

.PHONY: adapter-test
adapter-test: tools ## the GPU suite without a GPU, on a stand-in for CUDA over host memory (tests/standin)
	@scripts/build_extension $(VENV_PYTHON)
	@$(VENV_PYTHON) -m tests.standin -m tests.standin.suite $(ARGS)

.PHONY: gpu-test
gpu-test: ## the GPU suite, with the Python at hand (PYTHON=python3); fetches nothing
	@scripts/at_hand -m pytest tests/gpu $(ARGS)

.PHONY: gpu-test-beside
gpu-test-beside: ## the same, its files in six processes side by side, what needs the GPU alone at the end
	@scripts/at_hand -m tests.side_by_side $(ARGS)

.PHONY: gpu2-test
gpu2-test: ## the suite for two GPUs: peers, NCCL, DDP, FSDP2
	@scripts/at_hand -m pytest tests/gpu2 $(ARGS)

.PHONY: bench
bench: ## benchmarks on the GPU, with the Python at hand; BENCH="hot_path workloads"
	@scripts/at_hand -m benchmarks $(BENCH) $(ARGS)

.PHONY: bench-host
bench-host: ## the benchmarks that make sense on host memory
	@scripts/at_hand -m benchmarks $(BENCH) --device cpu $(ARGS)

.PHONY: soak
soak: tools ## the random programs, and sixteen threads under moving limits, for SOAK_STEPS steps (10^7) each
	@scripts/cpp_tests build plain
	@for program in stream_program random_program moving_limits; do \
	  VMM_STEPS=$(SOAK_STEPS) $(if $(VMM_SEED),VMM_SEED=$(VMM_SEED)) build/cpp-plain/$${program}_test --gtest_filter='*FreshSeed' || exit 1; \
	done

.PHONY: minors
minors: ## compile the adapter against the headers of every supported torch
	@scripts/bootstrap demo
	@$(VENV_PYTHON) scripts/check_torch_minors.py $(ARGS)

.PHONY: dist
dist: build ## dist/: the sources, and a wheel for the torch in .venv (version +torchX.Y)
	@$(VENV_PYTHON) setup.py --quiet sdist
	@$(VENV_PYTHON) -m pip --quiet wheel --no-build-isolation --no-deps --no-index --wheel-dir dist .

.PHONY: clean
clean: ## remove what was built; .venv stays
	@rm -rf build dist *.egg-info torch_vmm/_C.*.so torch_vmm/_C.*.json
