# Every target sets up what it needs in .venv: Python 3.11+, a C++17 compiler and git are enough.
PYTHON ?= python3
VENV := .venv
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(SCRIPTS)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
WORKERS ?= auto

# What Python has compiled is kept, whatever the environment says: else every process compiles torch, JAX and the rest
# anew, which takes longer than to import them.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode

.NOTPARALLEL:
.PHONY: help demo test test-slow test-all test-thorough test-oldest test-newest test-pure
.PHONY: lint bench gpu docs wheel sanitize sanitize-short fuzz mutate notes clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/experiments ## an indexer that learns to fetch, networks pruned, a picture and tables (two minutes, mostly set-up)
	$(BIN)/sparsetopk demo --out out

# XLA optimises as always. Of the two ways to emit the loops that it has fused, this one compiles in half the time, and
# in half of that again where LLVM does not optimise machine code: most tests compile for longer than they compute. The
# thousands of rows of test_batches ask for its optimisations; those over shards, in `make test-slow`, for all that
# users have.
test test-slow: export XLA_FLAGS += --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0
# What XLA has compiled is kept for the next run, found by the program that it was compiled from.
test test-slow: export JAX_COMPILATION_CACHE_DIR ?= $(abspath $(VENV))/xla

test: $(VENV)/dev ## test the library
	$(BIN)/python -m pytest -m 'not slow' -n $(WORKERS) --dist worksteal

test-slow: $(VENV)/dev ## test the rest: experiments, site, explorer, packages, processes, what takes long
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal

test-all: test test-slow sanitize-short ## run all tests

test-thorough: $(VENV)/dev ## test the library with new draws, and many more
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -m 'not slow' -n $(WORKERS) --dist worksteal

FOR_TESTS := pytest pytest-xdist hypothesis scipy flatbuffers

test-oldest: CONSTRAINTS := --constraint constraints-oldest.txt
test-newest: CONSTRAINTS :=
test-oldest: ## test the library with the oldest frameworks, in an environment of its own (gigabytes)
test-newest: ## test it with the newest
test-oldest test-newest: test-%:
	$(PYTHON) -m venv build/$*
	build/$*/bin/python -m pip install --quiet $(CONSTRAINTS) --upgrade '.[jax,torch]' $(FOR_TESTS)
	build/$*/bin/sparsetopk info
	build/$*/bin/python -m pytest -m 'not slow' -n $(WORKERS) --dist worksteal

PURE := -C wheel.cmake=false -C wheel.py-api=py3
TABLE := operators derivatives conventions values selection smoothness errors

test-pure: ## test the operators of all front-ends without the compiled core, as installed where none is built
	$(PYTHON) -m venv build/pure
	build/pure/$(SCRIPTS)/python -m pip install --quiet --constraint constraints.txt $(PURE) '.[jax,torch]' $(FOR_TESTS)
	build/pure/$(SCRIPTS)/python -m pytest -m 'not slow' -n $(WORKERS) --dist worksteal $(TABLE:%=tests/test_%.py)

mutate: $(VENV)/dev $(VENV)/build ## break the maths and the kernels in 27 ways, and see that the tests notice (some minutes)
	$(BIN)/python tests/mutations.py

lint: $(VENV)/dev ## check style (ruff, clang-format) and types (mypy, strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*.?pp tests/native/*.?pp)
	$(BIN)/mypy

BENCHMARKS := torch_operators numpy_operators applications pruning jax_operators scale

bench: $(VENV)/dev ## time the operators against the hard ones, as ratios in one run, into benchmarks/results (10 minutes)
	for name in $(BENCHMARKS); do \
	  $(BIN)/python benchmarks/$$name.py --json benchmarks/results/$${name%_operators}.json || exit 1; \
	done

gpu: $(VENV)/dev ## test the Triton kernels on the GPU that is here, and time them
	$(BIN)/python -m pytest -n 0 --device cuda tests/test_triton.py tests/test_triton_long.py
	$(BIN)/sparsetopk bench --device cuda --json bench.json

docs: $(VENV)/docs ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

wheel: $(VENV)/build ## build sdist and wheels, audit them, and run the quick tests on each, installed in a clean environment
	rm -rf dist
	$(BIN)/python -m build --sdist --wheel --outdir dist .
	$(BIN)/python -m build --wheel $(PURE) --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m abi3audit --strict --verbose dist/*-abi3-*.whl
	$(if $(filter Linux,$(shell uname)),$(BIN)/python -m auditwheel show dist/*-abi3-*.whl)
	$(BIN)/python tests/packages.py dist build/installed

SANITIZERS ?= address,undefined,float-cast-overflow
SEED ?= 1

EFFORT ?= 1

sanitize: $(VENV)/build ## fuzz the kernels under the sanitizers of the compiler (a few minutes, mostly to compile)
	$(BIN)/cmake -S . -B build/$@-$(SANITIZERS) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_BUILD_TYPE=None -DSPARSETOPK_SANITIZE=$(SANITIZERS)
	$(BIN)/cmake --build build/$@-$(SANITIZERS) -j 2
	build/$@-$(SANITIZERS)/fuzz $(SEED) $(EFFORT)

sanitize-short: ## the same for a few seconds; and threads, under theirs
	$(MAKE) sanitize EFFORT=0.02
	$(MAKE) sanitize EFFORT=0 SANITIZERS=thread

SECONDS ?= 600

fuzz: $(VENV)/dev ## draw operators, settings and rows at random, on every path, against an oracle; SECONDS=, SEED=
	$(BIN)/python tests/fuzz.py --seconds $(SECONDS) $(if $(filter command line,$(origin SEED)),--seed $(SEED))

notes: $(VENV)/python ## what the changelog says of this version, for its release
	mkdir -p build
	$(BIN)/python .github/notes.py $(if $(filter tag,$(GITHUB_REF_TYPE)),$(GITHUB_REF_NAME)) > build/notes.md

clean: ## remove everything that the other targets made
	rm -rf $(VENV) build dist out docs/_build docs/measured docs/auto_gallery .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	touch $@

# Tools that the others bring in only while they build.
$(VENV)/build: constraints.txt | $(VENV)/python
	$(PIP) build cmake ninja twine abi3audit auditwheel
	touch $@

# An editable install, which compiles the core; then extras add what they need beside it. The file of the same name
# records that it is up to date.
$(VENV)/core: $(SOURCES) | $(VENV)/python
	$(PIP) --editable .
	touch $@

$(VENV)/dev $(VENV)/docs $(VENV)/experiments: $(VENV)/%: $(VENV)/core
	$(PIP) 'sparsetopk[$*]'
	touch $@ $(VENV)/experiments # of which the others have everything
