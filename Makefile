# make train   set up .venv and run the main job on real text (about two minutes on two cores)
# make test    set up .venv and run every check and test
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test lint parity-full benchmarks clean

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(BIN)/.installed-test: $(BIN)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

train: $(BIN)/.installed
	$(BIN)/python train.py experiment=first_run

lint: $(BIN)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

parity-full: $(BIN)/.installed-test
	$(BIN)/python -m pytest -m slow

benchmarks: $(BIN)/.installed
	for name in command_line startup data_parallel pipeline; do $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
