# Every target sets up what it needs in .venv: Python 3.11+, a C++17 compiler and git are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
WORKERS ?= auto

.NOTPARALLEL:
.PHONY: help demo test lint bench docs wheel sanitize clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/experiments ## draw Fig. 1 of the paper and print a small table (two minutes, mostly set-up)
	$(BIN)/sparsetopk demo --out out

test: $(VENV)/dev ## run all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/dev ## check style (ruff) and types (mypy, strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev ## time the operators against the hard ones, as ratios in one run
	$(BIN)/python benchmarks/torch_operators.py
	$(BIN)/python benchmarks/numpy_operators.py
	$(BIN)/python benchmarks/applications.py
	$(BIN)/python benchmarks/pruning.py
	$(BIN)/python benchmarks/jax_operators.py
	$(BIN)/python benchmarks/scale.py

docs: $(VENV)/docs ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

wheel: $(VENV)/build ## build sdist and wheel, and run the quick tests on each, installed in a clean environment
	rm -rf dist
	$(BIN)/python -m build --sdist --wheel --outdir dist .
	$(BIN)/python tests/packages.py dist build/installed

SANITIZERS ?= address,undefined,float-cast-overflow

sanitize: $(VENV)/build ## fuzz the kernels under the sanitizers of the compiler (a few minutes, mostly to compile)
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_BUILD_TYPE=None -DSPARSETOPK_SANITIZE=$(SANITIZERS)
	$(BIN)/cmake --build build/sanitize -j 2
	build/sanitize/fuzz

clean: ## remove everything that the other targets made
	rm -rf $(VENV) build dist out docs/_build docs/measured docs/auto_gallery .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python:
	$(PYTHON) -m venv $(VENV)
	touch $@

# Tools that the others bring in only while they build.
$(VENV)/build: constraints.txt | $(VENV)/python
	$(PIP) build cmake ninja
	touch $@

# An editable install, which compiles the core; then extras add what they need beside it. The file of the same name
# records that it is up to date.
$(VENV)/core: $(SOURCES) | $(VENV)/python
	$(PIP) --editable .
	touch $@

$(VENV)/dev $(VENV)/docs $(VENV)/experiments: $(VENV)/%: $(VENV)/core
	$(PIP) 'sparsetopk[$*]'
	touch $@
