# `make test` is all a fresh machine needs: Python 3.10 or newer and make.
PYTHON ?= python3
VENV   ?= .venv
# An exact pin: an open range may pull a build with several gigabytes of CUDA packages.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
# Tests run in a process for each core, with one thread each.
PARALLEL ?= -n auto --dist worksteal

.PHONY: test parity test-kernels test-slow test-mindspore test-gpu lint format bench tables demo docs clean

test: $(VENV)/.dev parity lint
	$(BIN)/python -m pytest $(PARALLEL)
	$(MAKE) --no-print-directory test-kernels
	@if [ -d $(VENV)-mindspore ] || [ -n "$(WITH_MINDSPORE)" ]; then $(MAKE) --no-print-directory test-mindspore; else \
		echo "MindSpore's tests were not run: make test-mindspore downloads 800 MB and runs them"; fi

# The older libraries, to compare with. Where they cannot be installed those tests are skipped, or, with
# PARITY=required, everything fails.
parity: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(VENV)/.parity || [ "$(PARITY)" != required ]

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The Triton kernels on the CPU, by Triton's interpreter.
test-kernels: $(VENV)/.dev
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(PARALLEL) tests/kernels tests/ops/test_compressed.py

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m slow

# No environment has both frameworks: PyTorch's half writes what it computes, MindSpore's compares, and the other way.
test-mindspore: $(VENV)/.dev $(VENV)-mindspore/.dev
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(BIN)/python tests/mindspore/torch_side.py write "$$folder" && \
	LONGSPAN_PARITY="$$folder" $(VENV)-mindspore/bin/python -m pytest $(PARALLEL) --confcutdir tests/mindspore tests/mindspore && \
	$(BIN)/python tests/mindspore/torch_side.py check "$$folder"

# Runs with whatever Python already has torch with CUDA: nothing is installed.
test-gpu:
	$(PYTHON) -m pytest -m gpu

bench: $(VENV)/.parity
	$(BIN)/longspan bench

# Rewrites the tables of README.md and docs/benchmarks.md from benchmarks/results.
tables: $(VENV)/.dev
	$(BIN)/longspan bench tables

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

# From nothing to a model that writes, in about three minutes on two cores: everything is in runs/demo afterwards.
demo: $(VENV)/.train
	$(BIN)/longspan train --config examples/demo.toml --out runs/demo \
		--data "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
	$(BIN)/longspan generate --model runs/demo/checkpoint --prompt "def " --max-tokens 400
	$(BIN)/longspan report runs/demo

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable ".[dev,docs,triton,train,data,hf,serve,export]"
	touch $@

$(VENV)/.train: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable ".[train]"
	touch $@

$(VENV)/.parity: $(VENV)/.dev
	$(BIN)/pip install --quiet --editable ".[parity]"
	$(BIN)/pip install --quiet --no-deps "fla-core==0.6.0"
	touch $@

# Without torch; tyro and rich are for the command line.
$(VENV)-mindspore/.dev: pyproject.toml
	test -d $(VENV)-mindspore || $(PYTHON) -m venv $(VENV)-mindspore
	$(VENV)-mindspore/bin/pip install --quiet "mindspore==2.10.0" "numpy<2" pytest pytest-xdist safetensors tyro rich
	$(VENV)-mindspore/bin/pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-mindspore build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
