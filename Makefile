# Every target is one line of `make help`. ARGS="..." goes to the command a target runs.

PYTHON ?= python3
# Any torch 2.10 to 2.13. TORCH_INDEX=... takes it from another index, as for CPU-only wheels.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=
IMAGE ?= cpu
# Where image files are kept, to be found again by another clone; unset: in images/ itself.
IMAGE_CACHE ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HOST_READY := $(VENV)/.host-ready
LOCKS := containers/locks
# Isolated (-I), so that the PYTHONPATH of a module system cannot interfere.
PIP := $(BIN)/python -Im pip --disable-pip-version-check
PIP_LOCKED := $(PIP) install --quiet --require-hashes --no-deps --no-build-isolation
LOCK := $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.10 \
	--generate-hashes --no-header --excludes $(LOCKS)/excludes.txt
# About 25 minutes on 2 cores; what needs a testbed, and what tables other than speed, is beside it.
BENCH := host_start tokenize_rate packing short_attention loop_overhead trainer_against_hf checkpoint_against_dcp \
	export_against_save_pretrained store_clients launch_to_first_collective aggregate_against_mean \
	watch_overhead guard_cost many_ranks goodput_simulation trainer_against_trl
GPU_PYTHON ?= 3.12
GPU_PIP := $(PIP) install --quiet --upgrade --no-deps --no-compile --only-binary=:all: \
	--python-version $(GPU_PYTHON) --implementation cp --platform manylinux_2_28_x86_64 \
	--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
BENCH_TESTBED := image_start compose_and_submit srun_to_first_collective faults_of_peers

# A site's settings of Python would reach into the environments made here.
unexport PYTHONHOME PYTHONPATH
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two benchmarks at once would measure each other
.PHONY: help setup setup-host wheel docs demo demo-federation rehearse test test-full test-image \
	test-image-full mutants \
	testbed testbed-down streamflow lint format bench bench-testbed bench-gpu bench-atlas-gpu \
	gpu-travel lock clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv: torch, and all else at the locked versions

# A torch named on the command line is installed even where another one is there already.
ifeq ($(origin TORCH),command line)
.PHONY: $(READY)
endif
define check_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	echo "Python 3.10 or newer is needed; $(PYTHON) is: $$($(PYTHON) --version 2>&1)"; \
	echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; } >&2
endef
$(READY): pyproject.toml setup/virtual_environment.py $(wildcard $(LOCKS)/*.txt)
	$(check_python)
	@rm -f $@
	@echo '1/5 a virtual environment in $(VENV)'
	@$(PYTHON) setup/virtual_environment.py $(VENV)
	@echo '2/5 what builds packages'
	@$(PIP_LOCKED) -r $(LOCKS)/build.txt
	@echo '3/5 $(TORCH): the largest download'
	@$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	@echo '4/5 all else, at the locked versions'
	@$(PIP_LOCKED) -r $(LOCKS)/dev.txt
	@echo '5/5 atoll itself'
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@conflicts=$$($(PIP) check) || { echo "$$conflicts"; exit 1; } >&2
	@touch $@

setup-host: $(HOST_READY) ## Make .venv for a login node alone: composes and submits, has no torch

$(HOST_READY): pyproject.toml setup/virtual_environment.py $(wildcard $(LOCKS)/host.txt)
	$(check_python)
	@echo '1/3 a virtual environment in $(VENV)'
	@$(PYTHON) setup/virtual_environment.py $(VENV)
	@echo '2/3 what composes and submits, at the locked versions'
	@$(PIP_LOCKED) -r $(LOCKS)/build.txt
	@$(PIP_LOCKED) -r $(LOCKS)/host.txt
	@echo '3/3 atoll itself'
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

wheel: $(READY) ## Build dist/*.whl: an Atoll to pip install where there is no clone
	rm -rf build
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

demo: $(READY) ## Train, evaluate, export and sample a small model on this machine
	sbatch/train.sbatch facility=laptop experiment=demo name=demo $(ARGS)

demo-federation: $(READY) ## Three facilities on this machine, against each alone
	$(BIN)/python benchmarks/federation_against_alone.py $(ARGS)

streamflow: .venv-streamflow/.ready ## Install StreamFlow, for campaigns with engine=streamflow

# Its antlr4 is not Hydra's, so it has an environment of its own.
.venv-streamflow/.ready: $(LOCKS)/streamflow.txt setup/virtual_environment.py
	$(PYTHON) setup/virtual_environment.py .venv-streamflow
	.venv-streamflow/bin/python -Im pip --disable-pip-version-check install --quiet --require-hashes \
		--no-deps -r $(LOCKS)/streamflow.txt
	@touch $@

test: $(READY) ## Try every feature once, 20 to 50 minutes (ARGS="-k launch" for some)
	$(BIN)/python tests/beside.py $(ARGS)

test-full: $(READY) ## Every test, and every one that an image can run inside one: two hours
	$(BIN)/python tests/beside.py --full $(ARGS)
	$(MAKE) test-image-full

rehearse: $(READY) ## A small job under the constraints of every facility, on the testbed
	@code=0; for file in hydra_conf/facility/*.yaml; do name=$$(basename $$file .yaml); \
		echo "$$name"; $(BIN)/python -m atoll rehearse facility=$$name $(ARGS) || code=1; done; exit $$code

# a login node's .venv builds as well: torch is not for that
image-%: $(if $(wildcard $(READY)),$(READY),$(firstword $(wildcard $(HOST_READY)) $(READY))) ## Build images/%.sif: cpu, cuda, cuda12, cuda_compat, rocm or lumi
	$(BIN)/python -m atoll image build $* $(if $(IMAGE_CACHE),--cache '$(IMAGE_CACHE)') $(ARGS)

test-image: $(READY) ## Run inside an image (IMAGE=cpu) the tests of what it can break
	$(BIN)/python -m atoll image test $(IMAGE) -m image $(ARGS)

# Not what needs a clone, its .venv, or programs of a login node; the testbed's jobs try those.
test-image-full: $(READY) ## Run inside an image every test that does not need a clone
	$(BIN)/python -m atoll image test $(IMAGE) --full -m 'not login_node' --ignore=tests/testbed \
		--ignore=tests/benchmarks --ignore=tests/images --ignore=tests/install --ignore=tests/setup \
		--ignore=tests/test_documented_commands.py $(ARGS)

mutants: $(READY) ## Count the faults that the tests find (ARGS="--most 40 data/pack")
	$(PIP) install --quiet --upgrade --no-deps --target .build/mutation cosmic-ray==8.7.0 \
		parso==0.8.7 attrs==26.1.0 stevedore==5.10.0
	PYTHONPATH=.build/mutation $(BIN)/python tests/mutation/run.py $(ARGS)

testbed: streamflow ## As root: two real Slurms of virtual nodes and a real Apptainer on this machine
	$(PYTHON) tests/testbed/testbed.py up

testbed-down: ## Stop it; what it installed stays
	$(PYTHON) tests/testbed/testbed.py down

docs: $(READY) .build/docs/.ready ## Build the site of docs/, with the reference, into site/
	$(BIN)/python setup/reference.py docs/reference
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.build/docs $(BIN)/python -m mkdocs build --strict --quiet --site-dir site $(ARGS)

.build/docs/.ready: $(READY) $(LOCKS)/docs.txt
	$(PIP_LOCKED) --upgrade --target $(@D) -r $(LOCKS)/docs.txt
	@touch $@

lint: $(READY) ## Check formatting, code, types and shell
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run $(wildcard sbatch/* containers/*.sh src/atoll/*/*.sh)

format: $(READY) ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH:%=bench-%) bench-report ## Us and each peer in turns: about 25 minutes, then docs/benchmarks.md

bench-testbed: $(BENCH_TESTBED:%=bench-%) ## The same of images and queues, after make testbed image-cpu

# On a machine that has torch and transformers alone: PYTHON=python3 is that machine's.
bench-gpu: ## Training on one GPU against other trainers; without a GPU: ARGS=--dry-run
	$(PYTHON) benchmarks/gpu_training.py $(ARGS)

# The texts are another machine's where they have travelled from there.
bench-atlas-gpu: ## Every combination of docs/atlas.md on one GPU: about 10 minutes
	PYTHONPATH=src:.build/gpu/requirements $(PYTHON) benchmarks/atlas.py --device cuda \
		$(addprefix --texts ,$(wildcard .build/gpu/texts.safetensors)) $(ARGS)

# Carried to a GPU machine without a network: what we need beside torch, the peers' own code, and
# the atlas' texts, which are this machine's. antlr4 comes as its source alone, in Python.
gpu-travel: $(READY) ## Download them into .build/gpu, for GPU_PYTHON (3.12)
	$(GPU_PIP) --target .build/gpu/requirements pydantic==2.14.3 pydantic-core==2.50.4 \
		annotated-types==0.8.0 typing-inspection==0.4.5 typing-extensions==4.16.0 \
		hydra-core==1.3.8 omegaconf==2.3.1 py3langid==0.4.0
	$(PIP) install --quiet --upgrade --no-deps --no-compile --no-build-isolation \
		--target .build/gpu/requirements antlr4-python3-runtime==4.9.3
	$(GPU_PIP) --target .build/gpu/peers torchtitan==0.2.2 torchdata==0.11.0 tyro==1.0.17 \
		docstring-parser==0.18.0 typeguard==4.6.0 litgpt==0.5.13 jsonargparse==4.41.0
	$(BIN)/python benchmarks/atlas_texts.py .build/gpu/texts.safetensors

bench-trainer_against_hf bench-trainer_against_trl bench-faults_of_peers: .build/peers/.ready

# Without what they ask for: the versions here are those that all sides share.
.build/peers/.ready: $(READY)
	$(PIP) install --quiet --upgrade --no-deps --target $(@D) litgpt==0.5.13 jsonargparse==4.41.0 \
		lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 \
		submitit==1.5.4 cloudpickle==3.1.2 trl==1.16.0
	@touch $@

bench-%: $(READY) ## Run one of them: benchmarks/%.py (bench-report: draw what was measured)
	$(BIN)/python benchmarks/$*.py $(ARGS)

lock: $(READY) ## Pin again what pyproject.toml asks for (ARGS=--upgrade: at the newest versions)
	$(BIN)/uv pip compile --group build --quiet --universal --python-version 3.10 \
		--generate-hashes --no-header --output-file $(LOCKS)/build.txt $(ARGS)
	$(BIN)/uv pip compile --group streamflow --quiet --universal --python-version 3.10 \
		--generate-hashes --no-header --output-file $(LOCKS)/streamflow.txt $(ARGS)
	$(BIN)/uv pip compile --group docs --quiet --universal --python-version 3.10 \
		--generate-hashes --no-header --output-file $(LOCKS)/docs.txt $(ARGS)
	$(LOCK) --extra dev --output-file $(LOCKS)/dev.txt $(ARGS)
	$(LOCK) --extra train --constraint $(LOCKS)/dev.txt --output-file $(LOCKS)/train.txt
	$(LOCK) --extra test --constraint $(LOCKS)/dev.txt --output-file $(LOCKS)/image.txt
	$(LOCK) --constraint $(LOCKS)/dev.txt --output-file $(LOCKS)/host.txt

clean: ## Remove caches and build leftovers
	rm -rf .build build dist site docs/reference .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks setup -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too; runs/ and prepared/ stay
	rm -rf $(VENV) .venv-streamflow
