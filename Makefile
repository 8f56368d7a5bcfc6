# `make demo` and `make test` are all a newcomer needs. Both work in a virtual environment of their own (.venv).
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 3
SLOW_JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin

# A stand-in for torchvision and torchaudio beside a CPU build of torch; it does nothing beside a GPU build.
export PYTHONPATH := $(CURDIR)/tests/host/cpu_shim

# More at a time than two cores compute: a third of the time tests wait for processes that start, sleep or are found dead.
# Tests of GPUs: `python -m pytest -q -m gpu tests`.
RUN_TESTS = $(BIN)/python -m pytest -q
# Real processes, servers and browsers on a busy machine: who ran out of time, and for nothing else, is tried once more.
RERUN = --reruns 1 --only-rerun Timeout

.PHONY: demo test test-slow test-long lint venv clean host

demo: venv
	$(BIN)/python -m benchmarks.demo

test: host
	$(RUN_TESTS) --dist worksteal -n $(JOBS) -m "not slow and not gpu" $(PYTEST)

test-slow: host
	$(RUN_TESTS) --dist loadfile --no-loadscope-reorder -n $(SLOW_JOBS) -m "slow and not long and not gpu" $(RERUN) $(PYTEST)

# Before a release: the rest of tables whose first rows CI has.
test-long: host
	$(RUN_TESTS) --dist loadfile --no-loadscope-reorder -n $(SLOW_JOBS) -m "long and not gpu" $(RERUN) $(PYTEST)

host: venv
	$(BIN)/python -m tests.host.requirements

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy nodes workers parallel_runtime benchmarks

venv: $(VENV)/.installed

$(VENV)/.installed: requirements.txt tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -r requirements.txt -r tests/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output
