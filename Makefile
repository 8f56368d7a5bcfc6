# `make demo` and `make test` are all a newcomer needs. Both work in virtual environments of their own.
PYTHON ?= python3
TORCH ?= $(shell grep ^torch== tests/versions.txt)
JOBS ?= 3
SLOW_JOBS ?= 3
# What README and tests/requirements.txt name, and nothing else: an import that only ComfyUI's packages satisfy fails.
VENV := .venv
# The same with what ComfyUI requires, for the host tests.
HOST_VENV := .venv-host
BIN := $(VENV)/bin

# A stand-in for torchvision and torchaudio beside a CPU build of torch; it does nothing beside a GPU build.
export PYTHONPATH := $(CURDIR)/tests/host/cpu_shim
# Images of containers set it: hundreds of processes would compile torch anew, each.
unexport PYTHONDONTWRITEBYTECODE

# Real processes, servers and browsers on a busy machine: who ran out of time, and for nothing else, is tried once more.
RERUN = --reruns 1 --only-rerun Timeout
# $(call run_tests,options,tier): first what needs no ComfyUI, where none is found; then, with one, the host tests.
# PYTEST may name tests of one half alone: that there are none in the other (5) is no failure.
define run_tests
	COMFYUI_PATH=none $(BIN)/python -m pytest -q $(1) -m "not host and $(2)" $(PYTEST) || test $$? -eq 5
	$(MAKE) --no-print-directory host
	test ! -e $(HOST_VENV)/.installed || $(HOST_VENV)/bin/python -m pytest -q $(1) -m "host and $(2)" $(PYTEST) || test $$? -eq 5
endef

.PHONY: demo test test-slow test-long lint venv clean host

demo: venv
	$(BIN)/python -m benchmarks.demo

# More at a time than two cores compute: a third of the time tests wait for processes that start, sleep or are found dead.
# Tests of GPUs: `python -m pytest -q -m gpu tests`.
test: venv
	$(call run_tests,--dist worksteal -n $(JOBS),not slow and not gpu)

test-slow: venv
	$(call run_tests,--dist loadfile --no-loadscope-reorder -n $(SLOW_JOBS) $(RERUN),slow and not long and not gpu)

# Before a release: the rest of tables whose first rows CI has.
test-long: venv
	$(call run_tests,--dist loadfile --no-loadscope-reorder -n $(SLOW_JOBS) $(RERUN),long and not gpu)

# Nothing where there is no ComfyUI, which one line says.
host: venv
	@! $(BIN)/python -m tests.host.find_host || \
		{ $(MAKE) --no-print-directory $(HOST_VENV)/.installed && $(HOST_VENV)/bin/python -m tests.host.requirements; }

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy nodes workers parallel_runtime benchmarks

venv: $(VENV)/.installed

# Modules are compiled when they are imported: pip would compile thousands more, for a minute.
$(VENV)/.installed $(HOST_VENV)/.installed: requirements.txt tests/requirements.txt tests/versions.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --no-compile "$(TORCH)"
	$(@D)/bin/python -m pip install --quiet --no-compile -r requirements.txt -r tests/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(HOST_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-output
