# Everything sets itself up from a fresh clone: `make demo`, `make test`, `make lint`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test quick lint format benchmarks clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch numpy
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,lint,examples]"
	touch $@

demo: setup
	$(BIN)/python examples/demo_gpt2.py

test: lint
	$(BIN)/python -m pytest

quick: setup
	$(BIN)/python -m pytest -m "not slow"

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
