# make demo | test | check | wheel-check | bench: each makes .venv first where it is missing or old.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
# What decides the environment; another branch's requirements give another stamp.
KEY := $(shell cat pyproject.toml constraints.txt hatch_build.py | cksum | cut -d' ' -f1)
INSTALLED := .venv/installed-$(KEY)
CHECKED := .venv/checked-$(KEY)

.PHONY: demo test check wheel-check bench clean

demo: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/examples/demo.sh out/demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) -m 'not serial' tests
	$(BIN)/python -m pytest -m serial tests

check: $(CHECKED)
	$(BIN)/ruff check
	$(BIN)/mypy --strict

wheel-check: $(INSTALLED)
	.ci/wheel $(BIN)/python

bench: $(INSTALLED)
	$(BIN)/python -m pytest --benchmark-enable --benchmark-only tests/benchmarks

clean:
	rm -rf .venv out

.venv/bin/python:
	$(PYTHON) -m venv .venv

$(INSTALLED): | .venv/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

$(CHECKED): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,check]'
	touch $@
