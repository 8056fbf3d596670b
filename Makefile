# Everything a reader needs is one word: make demo, make test, make lab. Each sets up what is missing, and nothing else
# on the machine is touched: packages go into .venv, the default model into the user's cache.

.PHONY: help demo test test-code test-notebooks test-colab lab notebooks exercises fast bench mutation lint setup model clean
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
# The stamp's name holds a checksum of what decides the environment: it goes stale when their contents change, and not
# when a checkout only touches them.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d ' ' -f 1)
KERNELS_STAMP := $(STAMP)-kernels
NOTEBOOKS := $(wildcard notebooks exercises solutions)
REPLAY := -m pytest -q --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout 120
COLAB := .venv-colab
COLAB_STAMP := $(COLAB)/.installed-$(shell cksum < .github/colab-versions.txt | cut -d ' ' -f 1)

export OMP_WAIT_POLICY := passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# a user's pip may be set to install outside of virtual environments, and a user's Jupyter to prefer its own kernels
export PIP_USER := 0
export JUPYTER_PREFER_ENV_PATH := 1
unexport PYTHONPATH PYTHONHOME

help:
	@echo "make demo       set up, then run the getting-started notebook for real and print what the model wrote"
	@echo "make test       set up, then run the tests and compare every notebook with a fresh run"
	@echo "make test-colab the same comparison with the versions that Colab has, in an environment of its own"
	@echo "make lab        set up, then open JupyterLab"
	@echo "make notebooks  rebuild the .ipynb files from their .py sources"
	@echo "make exercises  rebuild exercises/ and the answers beside their sources in solutions/"
	@echo "make fast       run every lesson with small parameters, comparing nothing"
	@echo "make bench      measure the engine on this machine's CPU"
	@echo "make mutation   plant faults in a copy of the engine and see that the tests notice each"
	@echo "make lint       ruff and mypy"
	@echo "make clean      remove .venv, .venv-colab and build/"

demo: setup
	$(PY) tools/run_demo.py

# Side by side, on one core each: two threads of torch that share a core with another process wait for each other.
test: setup $(KERNELS_STAMP)
	@$(MAKE) -j 2 test-code test-notebooks

test-code:
	$(PY) -m pytest -q tests

test-notebooks:
	TRITON_INTERPRET=1 $(PY) -m pytest -q tests/kernels || test $$? -eq 5  # 5: no Triton here, nothing to test
	$(if $(NOTEBOOKS),OMP_NUM_THREADS=1 TUTORIAL_LIVE=0 $(PY) $(REPLAY) $(NOTEBOOKS))

# As on Colab: what its image has, then this package with --no-deps, which must leave everything else as it was.
test-colab: $(COLAB_STAMP)
	$(COLAB)/bin/python -m pip freeze --exclude tutorial-engine > $(COLAB)/before.txt
	$(COLAB)/bin/python -m pip install -q --no-deps --force-reinstall .
	$(COLAB)/bin/python -m pip freeze --exclude tutorial-engine | diff $(COLAB)/before.txt -
	cd / && $(CURDIR)/$(COLAB)/bin/python -c "from tutorial_engine import *; LLM, SamplingParams"
	$(COLAB)/bin/python -m tutorial_engine.download
	TUTORIAL_LIVE=0 $(COLAB)/bin/python $(REPLAY) $(NOTEBOOKS)

lab: setup
	$(PY) -m jupyterlab

notebooks: setup
	$(PY) tools/build_notebooks.py --run

exercises: setup
	$(PY) tools/build_exercises.py --run

fast: setup
	$(PY) tools/run_fast.py

bench: setup
	$(PY) bench/cpu.py

mutation: $(STAMP)
	$(PY) tools/mutation_check.py

lint: $(STAMP)
	$(PY) -m pip install -q -c constraints.txt -e ".[dev]"
	$(PY) -m ruff check .
	$(PY) -m mypy

setup: model

model: $(STAMP)
	@$(PY) -m tutorial_engine.download

# The first interpreter that is new enough makes the environment; make PYTHON=... names another.
PYTHON := python3 python3.13 python3.12 python3.11
FOUND = $(shell for p in $(PYTHON); do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

$(STAMP):
	@test -n "$(FOUND)" || { \
	  echo "This project needs Python 3.11 or newer, and none of these is: $(PYTHON) (python3: $$(python3 -V 2>&1))."; \
	  echo "Install one, or say where it is: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PY) -c '' 2>/dev/null || $(FOUND) -m venv --clear $(VENV) || { \
	  echo "'$(FOUND) -m venv' failed. On Debian and Ubuntu it needs a package: apt install python3-venv"; exit 1; }
	$(PY) -m pip install -c constraints.txt -e ".[lab,test]"
	@rm -f $(VENV)/.installed-*
	@touch $@

# nbval and pytest-timeout are ours: Colab has neither, and its versions of everything else must suffice.
$(COLAB_STAMP):
	@test -n "$(FOUND)" || { echo "Python 3.11 or newer is needed; say where it is: make PYTHON=... test-colab"; exit 1; }
	$(FOUND) -m venv --clear $(COLAB)
	$(COLAB)/bin/python -m pip install -r .github/colab-versions.txt
	$(COLAB)/bin/python -m pip install -c .github/colab-versions.txt nbval pytest-timeout
	@touch $@

# Triton is large, so it comes only when the kernels are to be tested. A GPU build of torch brings it along anyway.
$(KERNELS_STAMP): $(STAMP)
	$(PY) -m pip install -q -c constraints.txt -e ".[kernels]"
	@touch $@

clean:
	rm -rf $(VENV) $(COLAB) build
