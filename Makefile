# The commands of the project. `make setup` runs by itself before whatever needs it and is skipped when nothing changed.
PYTHON ?= python3
VENV ?= .venv
# Test processes. Tests that need the machine to themselves are marked `memory` and run one by one afterwards.
WORKERS ?= 2
PYTEST_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
TORCH := $(shell grep '^torch==' constraints.txt)
EXTRAS := torch,hf,plot,milp,bench,dev
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install -c constraints.txt

.PHONY: setup demo test compiler check format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make setup: '$(PYTHON)' not found; set PYTHON=python3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make setup: $(PYTHON) is $$($(PYTHON) --version 2>&1), regrad needs 3.11 or newer; set PYTHON=" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "make setup: $(PYTHON) cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV) (some minutes the first time)"
	@# torch first and alone: as a dependency of another package the resolver could choose a much larger build
	@$(PIP) '$(TORCH)'
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

demo: setup
	@$(BIN)/regrad demo

test: setup compiler
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'not memory$(if $(FAST), and not slow)' $(PYTEST_ARGS)
	@$(BIN)/python -m pytest -m 'memory$(if $(FAST), and not slow)' $(PYTEST_ARGS) || test $$? -eq 5 # none was chosen

compiler:
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "make test: no C++ compiler, and the counting allocator of the tests needs one; on Debian: apt-get install g++" >&2; exit 1; }

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup
	@$(BIN)/python -m regrad.bench

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
