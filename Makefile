# Everything starts from nothing but Python: the first target run makes the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help:
	@echo 'make demo    trains a CNN on real digits, whole and cut in two, and compares the numbers'
	@echo 'make test    runs the tests'
	@echo 'make check   runs the linter, the formatter, the type checker and the import contracts'
	@echo 'make clean   removes what runs and tools left behind'
	@echo 'PYTHON=...   chooses the Python (3.11 or later) that the environment is made with'

demo: $(INSTALLED)
	$(BIN)/python -m lightning_mgpu.app.demo

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf build dist demo_output outputs .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first, so that what depends on it finds the pinned release in place.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing lightning_mgpu and what it needs into $(VENV) ...'
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) -e '.[dev]'
	@touch $@

$(BIN)/python:
	@command -v '$(PYTHON)' > /dev/null || \
		{ echo 'found no $(PYTHON); install Python 3.11 or later, or name one: make PYTHON=/path/to/python3.12' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
		"$(PYTHON) is Python %d.%d, and lightning_mgpu needs 3.11 or later; name one: make PYTHON=python3.12" % v[:2])'
	@'$(PYTHON)' -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
