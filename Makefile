# make demo   train with and without penalties, compare, write a report: two minutes
# make reproduce   the figures of the paper, under reproduced/
# make examples   every application in its default size, and the gallery that shows them
# make test   what CI runs: linters, types, tests
# make fuzz   random networks against stock autograd: ARGS="--networks 1000 --jobs 8 --json benchmarks/results/fuzz.json"
# make fuzz-faults   steps that fail and are interrupted, at every place; training that is killed
# make test-sizes   batches of changing sizes: every penalty, node by node, flat and compiled: ten minutes
# make mutate   small errors put into the formulas, which the tests must notice: ARGS="--mutants 200"
# make docs   the site, under build/site; a warning is an error
# make test-zoo   other people's networks (timm, transformers, …) against stock autograd: an hour
# make test-operators   every operator of PyTorch's database, as a network: half an hour
# make test-integrations   with Lightning, Hugging Face's Trainer and accelerate installed
# make test-forces   the recipes of docs/forces.md against the packages themselves, in .venv-forces
# make bench  the measurements behind the README's table (a GPU is used when there is one)

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
STAMP := .venv/.doubleback

.DELETE_ON_ERROR:
.PHONY: setup demo reproduce examples test pytest test-integrations test-forces test-zoo test-operators test-sizes docs lint types fuzz fuzz-faults mutate bench readme clean

setup: $(STAMP)

# The build backend is installed first and used in place, so that it is pinned like the rest.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/doubleback demo $(ARGS)

reproduce: $(STAMP)
	@$(BIN)/python -m reproduce $(ARGS)

examples: $(STAMP)
	@$(BIN)/python -m examples $(ARGS)

# Types are checked beside the tests: pyright keeps one core busy for a while.
test: lint
	@$(MAKE) --no-print-directory -j 2 types pytest

pytest: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -q $(ARGS)

test-integrations: $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[test,integrations]'
	@$(BIN)/python -m pytest -q tests/test_integrations.py $(ARGS)

# MACE asks for e3nn 0.4 and NequIP for a newer one: two environments. SchNetPack by itself would
# bring an older torch, and TorchMD-Net, which asks for another setuptools than torch does, an older
# TorchMD-Net, built for CUDA alone.
test-forces:
	@for kind in mace others; do \
	  test -x .venv-forces/$$kind/bin/python || $(PYTHON) -m venv .venv-forces/$$kind; \
	done
	@grep '^torch==' constraints.txt > .venv-forces/torch.txt
	@.venv-forces/mace/bin/python -m pip install -qq --constraint .venv-forces/torch.txt --editable . pytest hypothesis mace-torch
	@.venv-forces/others/bin/python -m pip install -qq --constraint .venv-forces/torch.txt --editable . pytest hypothesis nequip nequip-allegro torch_geometric ase h5py lightning warp-lang
	@.venv-forces/others/bin/python -m pip install -qq --no-deps 'torchmd-net>=3'
	@.venv-forces/others/bin/python -m pip install -qq --constraint .venv-forces/torch.txt schnetpack
	@.venv-forces/mace/bin/python -m pytest -q tests/test_forces.py -k "MACE" $(ARGS)
	@.venv-forces/others/bin/python -m pytest -q tests/test_forces.py -k "not MACE" $(ARGS)

test-zoo: $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[test,zoo]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m zoo tests/test_architectures.py $(ARGS)

test-operators: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m operators tests/test_architectures.py $(ARGS)

test-sizes: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "long or not long" \
	  tests/test_open_sizes.py tests/test_with_gradient.py $(ARGS)

docs: $(STAMP)
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)
	@echo "build/site/index.html (its search needs a server: $(PYTHON) -m http.server --directory build/site)"

lint: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(STAMP)
	@$(BIN)/pyright

fuzz: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python tools/fuzz.py $(ARGS)

fuzz-faults: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "long or not long" tests/test_faults.py \
	  tests/test_train.py tests/test_inductor.py::test_the_next_process_does_not_compile_again \
	  $(ARGS)

mutate: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py $(ARGS)

bench: $(STAMP)
	@PYTHONPATH=src $(BIN)/python benchmarks/engine.py $(ARGS)

readme: $(STAMP)
	@$(BIN)/python benchmarks/readme_table.py
	@$(BIN)/python benchmarks/measured_tables.py
	@$(BIN)/python benchmarks/spaces_table.py

clean:
	rm -rf .venv .venv-forces build dist .hypothesis .pytest_cache .ruff_cache
	find src tests benchmarks reproduce examples -name __pycache__ -type d -prune -exec rm -rf {} +
