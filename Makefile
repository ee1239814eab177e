# Everything a contributor runs. Targets make what they need: a fresh clone needs Python >= 3.10 and nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# No bytecode is compiled here: most of what is installed is never imported. torch comes by pip, whose configuration may say
# where a machine keeps its own build; the rest by uv in a fifth of pip's time, or by pip where uv fails.
INSTALL := $(PIP) install --no-compile
install_rest = { $(INSTALL) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(1); } || $(INSTALL) $(1)
PYTEST := $(BIN)/python -m pytest
# As many as CI has cores; a third makes it slower.
WORKERS ?= 2

# The tests start hundreds of interpreters; where this is set, as containers do, each would compile precdoctor again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test lint unit gpu bench docs clean new-rule slow aot site torture fuzz faults reliability scale gating zoo predictions prescriptions trials samples stacks

help:
	@awk -F':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environments; the stamps make a second run quick ---------------------------------------------------------------

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml precdoctor-boot.pth requirements/torch.txt | $(BIN)/python
	@echo "installing precdoctor and torch into $(VENV) ..."
	@$(INSTALL) --requirement requirements/torch.txt
	@$(call install_rest,--editable .)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml precdoctor-boot.pth requirements/torch.txt requirements/dev.txt tests/support/quick/quick_torch.pth | $(BIN)/python
	@echo "installing precdoctor, torch and the development tools into $(VENV) ..."
	@$(INSTALL) --requirement requirements/torch.txt
	@$(call install_rest,--requirement requirements/dev.txt)
	@# lets children of tests start in half the time, where tests ask for it
	@cp tests/support/quick/quick_torch.pth $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
	@touch $(VENV)/.installed $@

##@ Every day

demo: $(VENV)/.installed  ## record a training run that goes wrong, live, and diagnose it
	$(BIN)/precdoctor demo

test: lint unit  ## everything continuous integration runs: style, types, tests

lint: $(VENV)/.installed-dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)

unit: $(VENV)/.installed-dev  ## the tests alone; make unit ARGS="-k gate" picks some
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not gpu and not slow" $(ARGS)

# Installs nothing and needs no network: any Python with torch and the packages of pyproject.toml runs the source tree.
gpu:  ## ten minutes on a CUDA device: checks, numbers, tests (PYTHON=... SECTIONS=...)
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu

bench: $(VENV)/.installed-dev  ## what recording costs on this CPU beside others (requirements/bench.txt), as a table
	mkdir -p benchmarks/results
	-$(PIP) install --requirement requirements/bench.txt
	$(BIN)/python benchmarks/overhead.py | tee benchmarks/results/cpu.md

docs: $(VENV)/.installed-dev  ## write the page of screens and the picture under docs/ again
	$(BIN)/python docs/generate.py

new-rule: $(VENV)/.installed-dev  ## write the skeleton of a rule and its samples (CODE=PD513 NAME=my-new-rule)
	$(BIN)/python -m tests.support.new_rule "$(CODE)" "$(NAME)"

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

##@ Takes longer

slow: $(VENV)/.installed-dev  ## the tests that `make test` leaves out because they take long
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "slow" $(ARGS)

aot: $(VENV)/.installed-dev  ## compile the CUDA kernels without a GPU: their tests, interpreted, and a table of their loops
	$(INSTALL) triton==3.9.0
	$(PYTEST) -n $(WORKERS) tests/unit/recording -k triton $(ARGS)
	mkdir -p benchmarks/results
	PYTHONPATH=. $(BIN)/python benchmarks/kernels_aot.py > benchmarks/results/kernels-aot.md

site: $(VENV)/.installed  ## build the documentation site into build/site, strictly (requirements/docs.txt)
	$(PIP) install --requirement requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

##@ Measure or record again; each writes files that are committed

faults: $(VENV)/.installed-dev  ## score the fault corpus and its peers; a table under benchmarks/results/
	mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.faults.oracle --set every $(ARGS)
	$(BIN)/python -m benchmarks.faults.score --set every --tools all $(ARGS) | tee benchmarks/results/faults.md

reliability: $(VENV)/.installed-dev  ## stated confidence against the fault corpus; benchmarks/results/reliability.md
	mkdir -p benchmarks/results
	test -d precdoctor-runs/faults || $(BIN)/python -m benchmarks.faults.score --set every --keep precdoctor-runs/faults
	$(BIN)/python -m benchmarks.reliability precdoctor-runs/faults > benchmarks/results/reliability.md

scale: $(VENV)/.installed-dev  ## time the commands on logs of 10^5 to 10^8 rows; benchmarks/results/scale.md
	mkdir -p build benchmarks/results
	$(BIN)/python -m benchmarks.scale measure build/scale $(ARGS) > benchmarks/results/scale.md

gating: $(VENV)/.installed-dev  ## how often the gate is wrong, on recorded runs; benchmarks/results/gate.md
	mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.gating.rates precdoctor-runs/gating > benchmarks/results/gate.md

# Beside torch, whose build is what requirements/torch.txt brings: the constraints name all but torch, so nothing replaces it.
ZOO := build/zoo-venv
$(ZOO)/.installed: benchmarks/zoo/requirements.txt benchmarks/zoo/constraints.txt requirements/torch.txt
	@echo "installing the libraries of benchmarks/zoo/requirements.txt into $(ZOO) (2 GB) ..."
	test -x $(ZOO)/bin/python || $(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip --disable-pip-version-check --quiet install --editable . --requirement requirements/torch.txt \
	  --requirement benchmarks/zoo/requirements.txt --constraint benchmarks/zoo/constraints.txt
	@touch $@

zoo: $(ZOO)/.installed  ## train with real libraries, plain and recorded; benchmarks/results/zoo.md (ARGS="-k pyro")
	mkdir -p benchmarks/results
	$(ZOO)/bin/python benchmarks/zoo/run.py $(ARGS)

STACKS := build/stacks-venv
$(STACKS)/.installed: benchmarks/stacks/requirements.txt benchmarks/stacks/libraries.txt benchmarks/zoo/constraints.txt requirements/torch.txt
	@echo "installing DeepSpeed, Megatron-core and Accelerate into $(STACKS) ..."
	test -x $(STACKS)/bin/python || $(PYTHON) -m venv $(STACKS)
	$(STACKS)/bin/python -m pip --disable-pip-version-check --quiet install --editable . --requirement requirements/torch.txt \
	  --requirement benchmarks/stacks/requirements.txt --constraint benchmarks/zoo/constraints.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(STACKS)/bin/python -m pip --disable-pip-version-check --quiet install \
	  --no-deps --no-build-isolation --requirement benchmarks/stacks/libraries.txt
	@touch $@

stacks: $(VENV)/.installed-dev $(STACKS)/.installed  ## train with sharded trainers and FP8 engines; benchmarks/results/stacks.md
	mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.stacks.table --python $(STACKS)/bin/python $(ARGS)

torture: $(VENV)/.installed-dev  ## kill, damage, starve and interrupt it; benchmarks/results/torture.md (ARGS="kills")
	mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.torture $(ARGS) > benchmarks/results/torture.md

fuzz: $(VENV)/.installed-dev  ## fuzz the readers for half an hour (needs atheris)
	$(PIP) install atheris
	$(BIN)/python -m benchmarks.torture.fuzz

predictions: $(VENV)/.installed-dev  ## hold predictions against real casts: docs/predictions.md, benchmarks/results/inference.md
	$(BIN)/python benchmarks/predictions.py
	$(BIN)/python benchmarks/inference_predictions.py

prescriptions: $(VENV)/.installed-dev  ## diagnose, apply, verify on small faults; docs/prescriptions.md
	$(BIN)/python -m benchmarks.prescriptions.table $(ARGS)

trials: $(VENV)/.installed-dev  ## plan five models, try the plans; benchmarks/results/trial.md
	$(BIN)/python -m benchmarks.trials.table $(ARGS)

samples: $(VENV)/.installed-dev  ## record sample_runs/ and the rules' recorded samples again
	$(BIN)/python sample_runs/regenerate.py
	$(BIN)/python docs/generate.py
