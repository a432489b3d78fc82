# make demo    everything once, ending in gigagrad-demo/report.html
# make page    the page of 'gigagrad view', by Node.js 20 or later and its npm; 'make demo' does it where they are at hand
# make test    all tests, by three processes: some of them wait for others more than they compute
# make zoo     a dozen published models, compared with plain autograd
# make oldest  some tests beside the oldest versions that pyproject.toml allows
# make other   tests of capture, exactness and gradients by another Python: make other PYTHON=python3.13
# make quick   in a minute: lint, and the tests of what everything stands on
# make lint    style, formatting, types and the direction of the imports
# make docs    the site in build/docs, without a warning, and its spelling
# make dist    sdist and wheel in dist/, with the page: Node.js is needed
# make sbom    what is in them and beside them, as CycloneDX in dist/
#
# Each makes its own environment in .venv (oldest: .venv-oldest; other: .venv-python3.13; dist and sbom: .venv-release) first,
# once; all it needs is Python 3.11 or later.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .venv-oldest
OTHER := .venv-$(notdir $(PYTHON))
RELEASE := .venv-release
TOOLS := hypothesis ome-types pydicom pytest pytest-xdist scipy

PAGE := src/gigagrad/view/page/page.js

.PHONY: demo page test oldest other quick zoo lint docs dist sbom clean

demo: $(INSTALLED)
	@if command -v npm >/dev/null; then $(MAKE) page || echo "the page of 'gigagrad view' is not built: see above"; fi
	$(BIN)/gigagrad demo

page: $(PAGE)

# No package may run a script of its own while it is installed.
$(PAGE): web/package-lock.json web/build.mjs web/index.html $(wildcard web/src/*)
	cd web && npm ci --ignore-scripts --no-audit --no-fund && npm run check && npm run build

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest --quiet --numprocesses 2 --dist worksteal tests/images tests/masks tests/stores \
		tests/exactness/test_any_model.py tests/execution/test_engine_gradients.py

other: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest --quiet --numprocesses 2 --dist worksteal tests/graphs \
		tests/exactness/test_any_model.py tests/execution/test_engine_gradients.py tests/test_threads.py

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

docs: $(INSTALLED)
	$(BIN)/codespell README.md SECURITY.md CHANGELOG.md CONTRIBUTING.md docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs

dist: $(PAGE) $(RELEASE)/.installed
	rm -rf dist build
	$(RELEASE)/bin/python -m build
	$(RELEASE)/bin/twine check --strict dist/*

# The packages beside which gigagrad is tested, and those that the page is made of.
sbom: $(INSTALLED) $(RELEASE)/.installed
	mkdir -p dist
	$(RELEASE)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file dist/sbom-python.json $(BIN)/python
	cd web && npm ci --ignore-scripts --no-audit --no-fund && npm sbom --sbom-format cyclonedx > ../dist/sbom-page.json

# The constraints name the versions, and with them a PyTorch that brings no CUDA packages where its index is at hand.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("gigagrad needs Python 3.11 or later, found " + sys.version.split()[0] + "; run: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[demo,geo,bags]' $(TOOLS)
	touch $@

$(OTHER)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,geo,bags]' $(TOOLS)
	touch $@

$(RELEASE)/.installed:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet build cyclonedx-bom twine
	touch $@

clean:
	rm -rf web/node_modules src/gigagrad/view/page
	rm -rf .venv .venv-* .zoo.jsonl build dist gigagrad-demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
