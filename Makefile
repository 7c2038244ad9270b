# The whole set-up: `make demo` or `make test` makes .venv, installs the pinned versions and runs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Bytecode is kept: tests start many processes, each of which would compile what it imports.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo contract test test-long test-kernels test-ray browser check soak docs site wheel format clean

demo: $(READY)
	$(BIN)/vivace demo

# The contract of one technique: make contract NAME=steps
contract: $(READY)
	$(BIN)/python -m pytest -n0 -m "" -k "$(or $(NAME),$(error give NAME=TECHNIQUE))" tests/contract

# Three processes for two cores: tests wait for workers and servers.
test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Matrices and slow compilers: what `make test` leaves out, and `.ci/run` runs.
test-long: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'long and not gpu and not soak'

# Our kernels under Triton's interpreter and compiler. Triton is in a folder of its own, since PyTorch's packages for
# CPUs come without it, and behave differently with it.
test-kernels: .venv/.triton
	PYTHONPATH=.venv/triton $(BIN)/python -m pytest -n 2 -m long tests/unit/kernels tests/benchmarks/test_sparse_attention.py

# The server on a Ray cluster of two nodes; `make test-long` has it, too.
test-ray: $(READY)
	$(BIN)/python -m pytest -n 0 -m "" tests/unit/serve/test_ray_cluster.py

# What tests/unit/browser needs: Playwright, and Debian's Chromium where none is there. Without it they are skipped.
browser: $(READY)
	$(PIP) playwright==1.65.2
	command -v chromium || command -v google-chrome || (apt-get update -q && apt-get install -qy --no-install-recommends chromium)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m docgen.generate --check
	$(BIN)/python -m tests.repo.sizes

# The server's record goes on where it was interrupted; so does a part that is missing from it.
soak: $(READY)
	$(BIN)/python -m benchmarks.serving_soak --record results/serving-soak-cpu.json
	$(BIN)/python -m pytest -m soak --timeout 7200 -s

docs: $(READY)
	$(BIN)/python -m docgen.generate

# The pages of docs/ as a site, in site/.
site: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The sdist, and the wheel that is made of it, in dist/.
wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .vivace build dist site demo.html page.html pictures

# torch first and by its exact version: an open range may bring gigabytes of CUDA libraries to a laptop.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vivace needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -c constraints.txt -e ".[dev]"
	touch $(READY)

.venv/.triton: $(READY)
	$(PIP) --no-deps --target .venv/triton triton==3.6.0
	touch .venv/.triton

.venv/.docs: $(READY)
	$(PIP) -c constraints.txt -e ".[docs]"
	touch .venv/.docs
