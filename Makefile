# Everything on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check lint format clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "eaglekit needs Python 3.11 or newer; say make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed  ## one answer of the built-in target, with EAGLE and then without
	$(BIN)/eaglekit generate "Explain why the sky is blue." --max-new-tokens 128 --compare

test: $(VENV)/installed  ## the tests: offline, on the CPU
	$(BIN)/python -m pytest

check: lint test  ## what CI runs

lint: $(VENV)/installed
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
