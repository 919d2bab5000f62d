# Each of the main jobs is one command; the first call makes .venv and installs, later calls find it done.

PYTHON  ?= python3
SECONDS ?= 600
BIN     := .venv/bin
SOURCES := src tests benchmarks examples

.PHONY: demo test check lint types bench fuzz docs dist clean

demo: .venv/.installed
	@$(BIN)/remat demo

test: .venv/.installed-dev
	@$(BIN)/python -m pytest -q -n 2

check: lint types test

lint: .venv/.installed-dev
	@$(BIN)/ruff format --quiet --check $(SOURCES) || { echo "ruff format: not formatted; run $(BIN)/ruff format $(SOURCES)"; exit 1; }
	@$(BIN)/ruff check --quiet $(SOURCES) && echo "ruff: clean"

types: .venv/.installed-dev
	@$(BIN)/mypy

# Benchmarks are timed, so they run one after the other and alone; OpenMP threads that spin would disturb each other.
bench: .venv/.installed-dev
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; OMP_WAIT_POLICY=PASSIVE $(BIN)/python $$script; done

# The pages, into build/site; a warning is an error. Their Python is run by the tests.
docs: .venv/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "docs: build/site/index.html"

# Wheel and source archive, into dist/.
dist: .venv/.installed-dev
	@rm -rf dist && $(BIN)/python -m build --outdir dist . >/dev/null && ls dist

# Property tests with new random examples, round after round until SECONDS are over or one fails.
fuzz: .venv/.installed-dev
	@end=$$(( $$(date +%s) + $(SECONDS) )); rounds=0; \
	while [ $$(date +%s) -lt $$end ]; do \
	    $(BIN)/python -m pytest -q -n 2 -m hypothesis --hypothesis-profile=fuzz -o faulthandler_timeout=3000 || exit 1; \
	    rounds=$$(( rounds + 1 )); \
	done; echo "fuzz: $$rounds rounds in $(SECONDS) s, nothing found"

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis demo.png demo.json
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "remat needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	@echo "making .venv"
	@$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing remat into .venv (torch is large: this may take a few minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing remat and its checks into .venv (torch is large: this may take a few minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch .venv/.installed $@

.venv/.installed-docs: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing remat and what builds its pages into .venv"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
