# make demo | test | check | docs | wheel-check | accept-drift | bench: each makes .venv first where it is missing or old.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
# What decides the environment; another branch's requirements give another stamp.
KEY := $(shell cat pyproject.toml constraints.txt hatch_build.py | cksum | cut -d' ' -f1)
INSTALLED := .venv/installed-$(KEY)
CHECKED := .venv/checked-$(KEY)
RAY := .venv/ray-$(KEY)

.PHONY: demo test check docs wheel-check accept-drift bench clean

demo: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash docs/examples/demo.sh out/demo

test: $(INSTALLED) $(RAY)
	$(BIN)/python -m pytest -n $(JOBS) -m 'not serial' tests
	$(BIN)/python -m pytest -m serial tests
	$(BIN)/python -m pytest -n $(JOBS) --nbmake --nbmake-timeout=300 notebooks

check: $(CHECKED) $(RAY) docs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict

# Into out/docs; a warning is an error. The variable silences an announcement of the theme's authors.
docs: $(CHECKED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

wheel-check: $(CHECKED)
	.ci/wheel $(BIN)/python

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

$(INSTALLED): | .venv/bin/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

$(CHECKED): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,check,docs]'
	touch $@

# Large, and not built for every machine; without it the test of its example says that it is skipped.
$(RAY): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[ray]' || echo "ray: not installed here"
	touch $@
