# make demo | test | check | docs | wheel-check | accept-drift | bench: each makes .venv first where it is missing or old.
# environment and the parts of test and of wheel-check are for .ci/run, where some of them overlap.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
# What decides the environment; another branch's requirements give another stamp.
KEY := $(shell cat pyproject.toml constraints.txt hatch_build.py | cksum | cut -d' ' -f1)
INSTALLED := .venv/complete-$(KEY)
# The demo needs neither test tools nor Ray.
RUNS := $(or $(wildcard $(INSTALLED)),.venv/runs-$(KEY))
# Python compiles the quarter of torch and the others that it imports, and keeps it; pip would compile
# all of it.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install -q --no-compile -c constraints.txt

.PHONY: environment demo test test-parallel test-serial test-notebooks check docs
.PHONY: wheel-check wheel-install wheel-types wheel-use accept-drift bench clean

environment: $(INSTALLED)

demo: $(RUNS)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/examples/demo.sh out/demo

# One after another, also with make -j.
test: $(INSTALLED)
	$(MAKE) test-parallel
	$(MAKE) test-serial
	$(MAKE) test-notebooks

test-parallel: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not serial' tests

test-serial: $(INSTALLED)
	$(BIN)/python -m pytest -m serial tests

test-notebooks: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) --nbmake --nbmake-timeout=900 notebooks

check: $(INSTALLED) docs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict

# Into out/docs; a warning is an error. The variable silences an announcement of the theme's authors.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

wheel-check: $(INSTALLED)
	.ci/wheel $(BIN)/python

# Its steps, in CLEAN, a folder outside the checkout.
wheel-install:
	.ci/wheel $(PYTHON) $(CLEAN) install

wheel-types: $(INSTALLED)
	.ci/wheel $(BIN)/python $(CLEAN) types

wheel-use: $(INSTALLED)
	.ci/wheel $(BIN)/python $(CLEAN) use

# Freeze what is predicted and planned now, after a change that means to move it; shows what moved.
# CASES="pretrained:ops" limits it.
accept-drift: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.drift.gate --accept $(CASES)

bench: $(INSTALLED)
	$(BIN)/python -m pytest --benchmark-enable --benchmark-only tests/benchmarks

clean:
	rm -rf .venv out

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/runs-$(KEY): | .venv/bin/python
	$(INSTALL) -e .
	touch $@

# Ray is large, and not built for every machine; without it the test of its example says that it is
# skipped.
$(INSTALLED): | .venv/bin/python
	$(INSTALL) -e '.[test,check,docs,ray]' \
	  || { echo "ray: not installed here" && $(INSTALL) -e '.[test,check,docs]'; }
	touch $@
