# The things one does with a working copy; `make` lists them. All of them may be interrupted and repeated.
PYTHON ?= python3
OUT ?= out/demo
ARGS ?=
BENCHES := print(*dict.fromkeys(row.benchmark for row in ROWS if hasattr(row, "benchmark")))
BENCH ?= steps clip lamb $(shell $(PYTHON) -c 'from op_builder.registry import ROWS; $(BENCHES)') prefill aio

BIN := .venv/bin
SOURCES := benchmarks deepspeed_ext docs examples op_builder tests setup.py
DONE := .venv/done
TORCH := $(shell grep '^torch==' requirements/dev.txt)
HAS_TORCH := import sys, torch; from importlib.metadata import version; \
  sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 11))
# Most of what is installed is never imported: Python compiles what is.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# One worker per processor, and no more than a GPU has room for. A thread that waits sleeps, because
# the processor is another worker's. Ops that all need are compiled first, where no worker waits.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal
OP_BUILDER := $(BIN)/python -m deepspeed_ext.op_builder
# Each by one process, with a compiler of its own: together they keep all processors busy.
WARM := echo 'compiling the ops that are not in the cache'; $(OP_BUILDER) list | awk '$$2 == "cpu" { print $$1 }' | tac \
  | MAX_JOBS=$$(( ($$(nproc) + 9) / 10 )) xargs -n 1 -P $$(nproc) $(OP_BUILDER) build > /dev/null || true
export PYTHONUNBUFFERED := 1

.SHELLFLAGS := -ec
.ONESHELL:
.PHONY: help env demo ops test test-long test-all test-gpus lint types docs site bench rivals clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile
	echo
	echo "PYTHON=$(PYTHON) makes .venv; ARGS= passes arguments on to what demo, test and bench run."

env: $(DONE)/package  ## make .venv, with torch and this package in it

demo: $(DONE)/package  ## train a small GPT and show what it writes; goes on when it was interrupted
	@how='--offload cpu'
	if [ -f $(OUT)/sample.txt ]; then
	  rm -f $(OUT)/checkpoint.pt $(OUT)/metrics.jsonl $(OUT)/loss.png $(OUT)/experts.png $(OUT)/sample.txt
	elif [ -f $(OUT)/checkpoint.pt ]; then
	  how=--resume
	fi
	$(BIN)/python -m examples.train_gpt --out $(OUT) $$how $(ARGS)

ops: $(DONE)/package  ## compile the ops that tests use and the cache lacks
	@$(WARM)

test: $(DONE)/test  ## run the tests, but for the longest
	@$(if $(ARGS),,$(WARM))
	$(PYTEST) -m 'not long' $(ARGS)

test-long: $(DONE)/long  ## run the longest tests: over 8 s each, or in an emulator
	@$(PYTEST) -m long $(ARGS)

test-all: $(DONE)/long  ## run both in one go
	@$(if $(ARGS),,$(WARM))
	$(PYTEST) $(ARGS)

test-gpus: $(DONE)/test  ## run the tests of several processes with a GPU for each
	@$(PYTEST) --on-gpus $(ARGS) tests/zero tests/engine tests/moe tests/offload tests/optim tests/compat tests/patching

lint: types  ## check style, types and layout of the code
	@$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	find csrc tests/csrc -name '*.h' -o -name '*.inl' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' \
	  | xargs -n 50 -P $$(nproc) $(BIN)/clang-format --dry-run -Werror

types: $(DONE)/dev  ## check the types alone
	@rm -rf build/typed
	mkdir -p build/typed/deepspeed_ext  # the package as it is when installed, for mypy
	ln -s $(CURDIR)/deepspeed_ext/* $(CURDIR)/op_builder build/typed/deepspeed_ext/
	ln -s $(CURDIR)/examples build/typed/
	cd build/typed; ../../$(BIN)/mypy --strict --package deepspeed_ext --package examples

docs: site $(DONE)/test  ## build the site, check its links, run what its pages show
	@$(PYTEST) tests/test_documents.py
	echo 'look at it: $(CURDIR)/build/site/index.html'

site: $(DONE)/docs  ## build the site and check its links alone
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs . build/site
	ln -sf README.html build/site/index.html

bench: $(DONE)/bench  ## measure ours against torch and fio; BENCH=aio measures one thing only
	@for what in $(BENCH); do $(BIN)/python -m benchmarks.bench_$$what $(ARGS); done

rivals: $(DONE)/bench  ## measure ours on a GPU beside all others that .venv has, and say which it lacks
	@$(BIN)/python -m benchmarks.rivals
	for what in rms_norm layer_norm softmax swiglu prefill decode patch; do
	  $(BIN)/python -m benchmarks.bench_$$what --device cuda $(ARGS)
	done

clean:  ## remove what the other targets made, the trained model included
	@rm -rf .venv build prebuilt dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(OUT)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is written last, so what was interrupted is done again.
$(DONE)/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
	  echo 'make: PYTHON is $(PYTHON), expected Python 3.10 or newer: make PYTHON=/path/to/python' >&2
	  exit 1
	}
	if ! $(BIN)/python -m pip --version > /dev/null 2>&1; then
	  echo 'making .venv'
	  if $(PYTHON) -c '$(HAS_TORCH)' 2> /dev/null; then shared=--system-site-packages; fi
	  $(PYTHON) -m venv --clear $$shared .venv
	fi
	if ! $(BIN)/python -c '$(HAS_TORCH)' 2> /dev/null; then
	  echo 'installing $(TORCH)'
	  $(PIP) $(TORCH)
	fi
	mkdir -p $(DONE)
	touch $@

$(DONE)/package: $(DONE)/torch pyproject.toml setup.py requirements/base.txt
	@echo 'installing deepspeed_ext into .venv'
	$(PIP) --editable '.[examples]'
	touch $@

$(DONE)/test: $(DONE)/package requirements/test.txt
	@$(PIP) --requirement requirements/test.txt
	touch $@

$(DONE)/long: $(DONE)/test requirements/long.txt requirements/evaluation.txt
	@$(PIP) --no-deps --requirement requirements/long.txt && $(PIP) --requirement requirements/evaluation.txt && touch $@ \
	  || echo 'without it, some tests are skipped'

$(DONE)/docs: $(DONE)/package requirements/docs.txt
	@$(PIP) --requirement requirements/docs.txt
	touch $@

$(DONE)/bench: $(DONE)/package requirements/bench.txt
	@$(PIP) --requirement requirements/bench.txt
	touch $@

$(DONE)/dev: $(DONE)/package requirements/dev.txt requirements/test.txt requirements/bench.txt
	@$(PIP) --requirement requirements/dev.txt
	touch $@
