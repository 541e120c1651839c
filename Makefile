# Two commands do everything on a machine that has Python >= 3.10 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint unit pictures clean

demo: $(READY)
	$(BIN)/retape schedule revolve --steps 24 --snapshots 4
	@echo
	@echo 'Steps run across, time runs down. Plain reversal holds 24 tapes; here at most 4 states are stored, for 51 more'
	@echo 'forward steps. No schedule with 4 states needs fewer. Next, a GPT inside four budgets (a minute or two):'
	@echo
	$(BIN)/retape demo

test: lint unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal

# The pictures of the documents; a test sees to it that they are what the code draws.
pictures: $(READY)
	$(BIN)/python docs/pictures/draw.py

# Made again only when what it installs from has changed.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
