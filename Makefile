# make demo | test | lint | bench | bench-identity. Each sets up what it needs.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PAIR := qwen2.5-coder-0.5b qwen2.5-coder-1.5b
READY := $(VENV)/.ready

.PHONY: setup models demo test lint bench bench-identity

setup: $(READY)

# llama-cpp-python has no wheel and compiles for some minutes; it needs a C++ compiler.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(READY)

models: $(READY)
	$(BIN)/skydraft models fetch $(PAIR)

demo: models
	$(BIN)/python -m skydraft.cli.demo

test: $(READY)
	-$(BIN)/skydraft models fetch $(PAIR)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: models
	$(BIN)/python -m bench.speed

bench-identity: models
	$(BIN)/python -m bench.identity
