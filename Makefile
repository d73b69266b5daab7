# make demo    sets up what is missing, then places Inception-V3 on the paper's machine
# make test    sets up what is missing, then runs the whole test suite
# make test-slow  the tests that repeat something for minutes
# make test-hosts  the tests on several hosts: network namespaces, for which one must be root
# make fuzz    changed files of all kinds for a minute, or SECONDS=600
# make soak    kills, stops and full disks at random for 30 minutes, or SECONDS=600
# make test-gpu   the tests that need a GPU; elsewhere they are skipped, and say so
# make paper   the paper's experiment: some 40 minutes, on a machine that does nothing else
# make lint    ruff, mypy and the import contracts
# make docs    builds the documentation into build/docs
# make lock    renews requirements.lock from pyproject.toml (slow; asks the registry for hashes)
#
# Everything is installed into .venv, as pinned by requirements.lock; delete .venv to start anew.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow test-hosts soak fuzz test-gpu paper lint format docs lock clean

# Each run gets a folder of its own, so that none is overwritten.
demo: $(READY)
	@$(BIN)/placewright place inception_v3 --cluster k80x4 --budget 1m \
		--output demo-output/$$(date +%Y%m%d-%H%M%S)

# Workers share the numba cache, so kernels are compiled once. Two workers suit two cores; more
# would compete with TensorFlow's own threads.
test: $(READY)
	@$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(READY)
	@$(BIN)/python -m pytest --slow -m slow

test-hosts: $(READY)
	@$(BIN)/python -m pytest --slow tests/distributed/test_hosts.py

soak: SECONDS ?= 1800
soak: $(READY)
	@$(BIN)/python -m benchmarks.soak --seconds $(SECONDS)

fuzz: SECONDS ?= 60
fuzz: $(READY)
	@$(BIN)/python -m tests.fuzzing --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

test-gpu: $(READY)
	@$(BIN)/python -m pytest -m gpu

# Writes benchmarks/results/paper and the tables that README.md and docs/ have from it.
paper: $(READY)
	@$(BIN)/python -m benchmarks.paper

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(READY)
	@$(BIN)/python -m sphinx -W --keep-going docs build/docs

$(READY): requirements.lock pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV)
	@touch $(READY)

# torch is left out ("unsafe") and its dependencies are not: see tools/setup.sh. Run it where pip finds
# the CPU build of that version, or the lock will hold gigabytes of CUDA.
lock: $(READY)
	$(BIN)/pip install pip-tools
	$(BIN)/pip-compile --quiet --generate-hashes --unsafe-package torch --strip-extras --no-header \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--constraint tools/lock-constraints.txt \
		--extra tensorflow --extra placers --extra learning --extra ray --extra report \
		--extra nvidia --extra dev \
		--output-file requirements.lock pyproject.toml

clean:
	rm -rf $(VENV) demo-output build dist
