# Two commands: `make run` and `make test`. Each sets up .venv by itself, once, with the tested versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools

.PHONY: run test test-slow break lint benchmarks docs dist clean

run: $(READY)  ## the main job: LUCIR + GeoDL beside LUCIR, plain fine-tuning and the closed form, on the embedded digits
	$(BIN)/geodl compare finetune lucir lucir+geodesic analytic --preset digits

# One thread each: two processes whose threads wait for each other are many times slower.
test: $(READY)  ## the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --cov --cov-report=term

test-slow: $(READY)  ## minutes to hours: real data, many kills
	$(BIN)/python -m pytest -m slow --timeout=7200

break: $(READY)  ## hostile cases by the thousand, and a table of the failures
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.break --out docs/reliability.md

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Benchmarks that need a directory of images (docs/photographs.md) are left out.
WITH_DATA = $(patsubst %,benchmarks/%.py,labels photographs series unequal unknown)
benchmarks: $(READY)  ## speed and memory, side by side; run it on a quiet machine
	for part in $(filter-out $(WITH_DATA),$(wildcard benchmarks/[a-z]*.py)); do echo "== $$part"; $(BIN)/python -m benchmarks.$$(basename $$part .py) || exit 1; done

docs: $(TOOLS)  ## the documentation site, docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going docs docs/_build/html

dist: $(TOOLS)  ## wheel and source archive in dist/, checked, and used in a fresh environment
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	GEODL_DIST=$(CURDIR)/dist $(BIN)/python -m pytest -m slow --timeout=3600 tests/test_distribution.py

# torch first: with the tested version there, no other package's wishes can bring in another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[test,parquet,onnx,pretrained,serve,sklearn]' -c constraints.txt
	touch $(READY)

$(TOOLS): $(READY)
	$(BIN)/python -m pip install --quiet -e '.[docs,dev]' -c constraints.txt
	touch $(TOOLS)

clean:  ## remove the environment and caches
	rm -rf $(VENV) dist docs/_build .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
