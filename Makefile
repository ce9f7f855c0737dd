# Everything starts from an empty clone with Python 3.11 or newer and make.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.gfdit-setup
TYPED := gfdit tests tools $(sort $(dir $(wildcard examples/*.py benchmarks/*.py)))

# The first Python that is new enough.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

SOAK_REQUESTS ?= 400
CACHED_REQUESTS ?= 200
FUZZ_INPUTS ?= 1000000

# Tests start hundreds of processes: each would compile gfdit anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test thorough families models soak soak-caches soak-comm soak-kernels storm fuzz endurance fleet report report-default kernels dist lint format types clean

help:
	@echo "make demo    watch running requests change their parallelism (sets everything up)"
	@echo "make test    lint, types and tests (sets everything up)"
	@echo "make thorough  the tests that make test leaves out"
	@echo "make families  every adapter against its stock pipeline, all checks"
	@echo "make setup   only the environment, in $(VENV)"
	@echo "make models  check the models of the collectives' protocol (needs spin and gcc)"
	@echo "make soak    $(SOAK_REQUESTS) requests on random layouts, some abandoned"
	@echo "make soak-caches  $(CACHED_REQUESTS) requests with TeaCache and as many with cache-dit, likewise"
	@echo "make soak-comm  100,000 collectives over random ordered subsets of ranks"
	@echo "make soak-kernels  3,000 of them by interpreted kernels, by random paths"
	@echo "make storm   1,000,000 events with faults in a simulated server"
	@echo "make fuzz    $(FUZZ_INPUTS) inputs, most of them wrong, wherever something is read"
	@echo "make endurance  half an hour of a real server with mixed sizes: what its processes hold"
	@echo "make fleet  two servers behind each router, one killed, one drained (installs Ray Serve and vllm-router apart)"
	@echo "make report  the policies compared on the published workloads, into docs/reports"
	@echo "make report-default  only the default policy against all others, from fewer traces"
	@echo "make kernels  compile every kernel variant, record what it takes, test them all: after any change of a kernel"
	@echo "make dist    the wheel and the source archive, in dist"
	@echo "make lint format types clean"

setup: $(STAMP)

$(STAMP): tools/setup.py pyproject.toml $(wildcard requirements/*.txt)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed" >&2; exit 1; }
	@$(PYTHON) tools/setup.py --venv $(VENV)

demo: setup
	@$(BIN)/python examples/demo.py

# One process more than cores, four at most: many tests wait for servers to start, or for a limit to run out. Which tests
# stay together, and what begins, is in tests/conftest.py.
TEST_PROCESSES ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -ge 3 ] && echo 4 || echo 3)

test: lint types
	@$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder

thorough: setup
	@$(BIN)/python -m pytest -m thorough --timeout 3600

families: setup
	@$(BIN)/python -m pytest tests/adapters tests/families -m "thorough or not thorough" --timeout 3600 \
		--numprocesses 2 --dist loadfile

models: setup
	@$(BIN)/python tools/check_models.py

soak: setup
	@$(BIN)/python -m pytest tests/elastic/test_soak.py --soak-requests $(SOAK_REQUESTS) --timeout 3600

soak-caches: setup
	@$(BIN)/python -m pytest tests/elastic/test_cached_traffic.py --soak-requests $(CACHED_REQUESTS) --timeout 3600 \
		-m "thorough or not thorough"

soak-comm: setup
	@$(BIN)/python -m tests.comm.soak

storm: setup
	@$(BIN)/python -m tests.whole
	@$(BIN)/python -m tests.whole --changed --events 250000

fuzz: setup
	@$(BIN)/python -m tests.fuzz --inputs $(FUZZ_INPUTS)

soak-kernels: setup
	@$(BIN)/python -m tests.kernels.soak

endurance: setup
	@$(BIN)/python -m benchmarks.endurance

fleet: setup
	@$(BIN)/python -m benchmarks.fleet

report: setup
	@$(BIN)/python -m benchmarks.policy_reports

report-default: setup
	@$(BIN)/python -m benchmarks.policy_reports default_policy --seeds 3 --jobs 1

kernels: setup
	@$(BIN)/python tools/compile_kernels.py
	@$(BIN)/python -m pytest tests/kernels/test_compiled.py --all-kernels

dist: setup
	@$(BIN)/python tools/build_dist.py

lint: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet || { echo "formatting differs: run make format" >&2; exit 1; }

format: setup
	@$(BIN)/ruff check --fix --quiet
	@$(BIN)/ruff format

types: setup
	@$(BIN)/mypy $(TYPED)

clean:
	rm -rf $(VENV) build dist out gfdit.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
