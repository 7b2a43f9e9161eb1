# Everything sets itself up from a fresh clone: `make demo`, `make test`, `make lint`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# What to run, and what to work on it: a demonstration needs only the first.
RUNS   := $(VENV)/.runs
STAMP  := $(VENV)/.installed
# Files are byte-compiled when they are first used, not all of them at installation.
PIP    := $(BIN)/python -m pip install -q --no-compile -c constraints.txt

.PHONY: setup demo test thorough zoo quick lint format clean

setup: $(STAMP)

$(RUNS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) -e ".[examples]"
	touch $@

$(STAMP): $(RUNS)
	$(PIP) -e ".[test,lint,examples]"
	touch $@

demo: $(RUNS)
	$(BIN)/python examples/demo_gpt2.py

test: lint
	$(BIN)/pytest -n 2

# Hours: all that `make test` checks a drawn part of.
thorough: setup
	$(BIN)/pytest -n 2 --thorough

# An hour or two: every model of the zoo, on 2x2 and 3 ranks, five random plans of each graph.
zoo: setup
	$(BIN)/pytest -n 2 --thorough tests/models/test_zoo.py

quick: setup
	$(BIN)/pytest -n 2 -m "not slow"

# mypy does not follow package-dir; it is shown the tree as it installs.
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typing && mkdir -p build/typing/autopar
	for f in autopar/*.py autopar/py.typed; do ln -s ../../../$$f build/typing/autopar/; done
	for d in ir passes runtime; do ln -s ../../../$$d build/typing/autopar/$$d; done
	MYPYPATH=build/typing $(BIN)/mypy -p autopar

format: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf build $(VENV)
