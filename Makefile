# Every target first runs `make install`, which creates .venv in this folder. It needs python3 (3.11 or newer) with venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install check quick test tests demo docs lint types nightly clean

install: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("autopar needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# What to run while you work: about a minute on two cores.
QUICK := tests/test_tiny.py tests/test_floors.py \
	$(addprefix tests/unit/,rules emit analysis cost sharding validation) \
	$(addprefix tests/unit/test_,layout.py redistribute.py collective.py mesh.py plans.py)

check: lint
	@$(MAKE) --no-print-directory -j 2 types quick

quick: install
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile $(QUICK)

test: lint
	@$(MAKE) --no-print-directory -j 2 types tests

# All tests of a file run in one process, because they share fixtures that take long.
tests: install
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: install
	$(BIN)/mypy autopar benchmarks

demo: install
	$(BIN)/python -m benchmarks.demo

# The documentation as a site, in build/site. The command line reference is written from the commands themselves.
docs: install
	$(BIN)/typer autopar.cli.commands utils docs --name autopar --output docs/cli.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# All tests, with all hypothesis examples. No test uses what was captured for another.
nightly: install
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --fresh-captures --hypothesis-profile nightly -m "slow or not slow"

clean:
	rm -rf .venv build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
