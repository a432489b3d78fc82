# make demo    everything once, ending in gigagrad-demo/report.html
# make test    all tests, by three processes: some of them wait for others more than they compute
# make zoo     a dozen published models, compared with plain autograd
# make oldest  some tests beside the oldest versions that pyproject.toml allows
# make quick   in a minute: lint, and the tests of what everything stands on
# make lint    style, formatting, types and the direction of the imports
#
# Each makes its own environment in .venv (oldest: .venv-oldest) first, once; all it needs is Python 3.11 or later.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .venv-oldest

.PHONY: demo test oldest quick zoo lint clean

demo: $(INSTALLED)
	$(BIN)/gigagrad demo

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest --quiet --numprocesses 2 --dist worksteal tests/images tests/masks tests/stores \
		tests/exactness/test_any_model.py tests/execution/test_engine_gradients.py

quick: lint
	$(BIN)/python -m pytest --quiet --numprocesses 2 --dist worksteal --hypothesis-profile quick -m "not slow" \
		tests/test_boxes.py tests/test_documents.py tests/graphs tests/plans tests/stores tests/execution/test_engine_gradients.py

zoo: $(INSTALLED)
	rm -f .zoo.jsonl
	$(BIN)/python bench/zoo.py --quick --exact-only --jobs 2 --out .zoo.jsonl

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The constraints name the versions, and with them a PyTorch that brings no CUDA packages where its index is at hand.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("gigagrad needs Python 3.11 or later, found " + sys.version.split()[0] + "; run: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[demo,geo]' \
		hypothesis ome-types pydicom pytest pytest-xdist scipy
	touch $@

clean:
	rm -rf .venv $(OLDEST) .zoo.jsonl build dist gigagrad-demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
