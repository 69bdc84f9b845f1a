# Everything runs from a fresh clone: the first target sets up what it needs, stamps in .build keep it from being repeated.
#
#   make cold-start   a real SGLang engine starts cold and takes its prefixes from the NVMe store
#   make test         the tests CI runs            make test-full   the whole matrices
#   make lint         style, types, layers         make setup       only the environment
#   make bench-smoke  the benchmarks, a few seconds each: that they work, not how fast
#
# PYTHON=python3.12 picks an interpreter; TORCH_ARGS="--index-url ..." an index with CPU builds of torch.

PYTHON ?= python3
VENV ?= .venv
TORCH_ARGS ?=
PYTEST_ARGS ?=
COLD_START_ARGS ?=

PY := $(VENV)/bin/python
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore $(PY) -m pip --quiet --quiet
STAMPS := .build

export PYTHONDONTWRITEBYTECODE := 1

.PHONY: setup cold-start bench-smoke test test-unit test-e2e test-full lint format clean
.DELETE_ON_ERROR:

setup: $(STAMPS)/package

cold-start: setup
	$(PY) benchmarks/cold_start.py $(COLD_START_ARGS)

# the longest first; two at a time, because much of it is processes that start
SMOKE := bench_cold_start bench_storage bench_pipeline bench_tools bench_linker bench_remote bench_pd compare_policies cluster_model
SMOKE_bench_linker := --parts overlap,layout
SMOKE_bench_tools := --rounds 2

bench-smoke: setup
	$(MAKE) --no-print-directory --output-sync=target -j 2 $(SMOKE:%=smoke-%)

smoke-%:
	$(PY) benchmarks/$*.py --smoke $(SMOKE_$*)

test: test-unit test-e2e

test-unit: setup
	$(PY) -m pytest $(PYTEST_ARGS)

test-e2e: setup
	$(PY) -m pytest -m "e2e and not full and not gpu and not rdma" tests/e2e $(PYTEST_ARGS)

test-full: setup
	$(PY) -m pytest -m "not gpu and not rdma" $(PYTEST_ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	sh requirements/check_types.sh $(abspath $(PY))
	$(VENV)/bin/lint-imports

docs: setup
	$(PY) scripts/make_docs.py --check
	$(PY) -m mkdocs build --quiet --site-dir $(STAMPS)/site

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(STAMPS) build dist *.egg-info

$(STAMPS)/system: requirements/system.sh
	@mkdir -p $(STAMPS)
	sh requirements/system.sh
	@touch $@

$(STAMPS)/venv: $(STAMPS)/system
	@echo "setup 1/4: environment in $(VENV)"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install pip==26.3  # an old one takes half a minute longer for what follows
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@touch $@

$(STAMPS)/torch: requirements/torch.txt requirements/sglang-cpu.txt $(STAMPS)/venv
	@echo "setup 2/4: torch"
	$(PIP) install --no-compile $(TORCH_ARGS) -r requirements/torch.txt -c requirements/sglang-cpu.txt
	@touch $@

$(STAMPS)/packages: requirements/sglang-cpu.txt requirements/dev.txt requirements/kvikio.txt requirements/remote.txt requirements/pd.txt $(STAMPS)/torch
	@echo "setup 3/4: SGLang and the tools of the tests"
	$(PIP) install --no-compile --no-deps $(foreach f,sglang-cpu dev kvikio remote pd,-r requirements/$(f).txt)
	@$(PY) -m compileall -q -j 0 $(VENV)/lib >/dev/null || true  # on all cores, where pip takes one; templates are no Python
	@touch $@

$(STAMPS)/package: pyproject.toml $(STAMPS)/packages
	@echo "setup 4/4: this package, editable"
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@
