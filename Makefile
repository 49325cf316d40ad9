# Each target needs nothing but Python and a network: the first one that runs builds .venv, later
# ones use it again. `make cuda` has an environment of its own, and needs a C++ compiler, too.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.duoka-installed
# Some 360 MB more, which nothing but its own tests need.
RAY_STAMP := $(VENV)/.duoka-ray-installed
# matplotlib, for the plots of the benchmark page.
BENCHMARKS_STAMP := $(VENV)/.duoka-benchmarks-installed
JOBS ?= 2

# A Python of your choice: make PYTHON=python3.12 test
PYTHON ?=
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3 python)

.PHONY: demo test test-all nightly newest oldest fuzz cuda check docs schema reference golden \
  golden-update benchmarks release-check clean

demo: $(STAMP)
	$(BIN)/duoka demo

# One thread per worker: the workers are the parallelism. A worker that has nothing left to do takes
# over tests of another, so that no large file keeps one busy at the end. Bytecode is kept whatever
# the environment says: processes that tests start would compile every module again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

QUICK = -m "not slow and not nightly" --hypothesis-profile quick

# Every promise, by one case of each test, in minutes.
test: $(STAMP)
	$(PYTEST) $(QUICK)

# Every promise by all cases; rare families of transformers and slow cases by turn (tests/turns.py).
# build/durations.xml has the time of each test, without its fixtures.
# Two workers more than cores: many of these wait for other processes, and for time to pass.
DURATIONS = --durations 60 --durations-min 2 --junitxml build/durations.xml -o junit_duration_report=call
test-all: JOBS := 4
test-all: $(RAY_STAMP)
	$(PYTEST) -m "not nightly" --hypothesis-profile ci $(DURATIONS)

# Everything: all families and all layouts of processes, runs that are killed and go on, and ten
# thousand random inputs for each reader.
nightly: JOBS := 4
nightly: $(RAY_STAMP)
	DUOKA_TURN=all $(PYTEST) -m "" --timeout 3600 $(DURATIONS)
	$(MAKE) fuzz

# `make test` with the newest versions that pyproject.toml allows, and with its lower bounds. torch
# is that of constraints.txt in both: 2.11, its lower bound, would bring gigabytes of CUDA.
newest: BIN := .venv-newest/bin
oldest: BIN := .venv-oldest/bin
newest oldest: %: .venv-%/.duoka-installed
	$(PYTEST) $(QUICK)

# The tests that feed random and damaged input, with many more inputs.
FUZZ_EXAMPLES ?= 10000
fuzz: $(STAMP)
	DUOKA_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PYTEST) -m fuzz --timeout 3600 --durations 0

# What needs CUDA, on PyTorch's own CUDA build without a GPU (tests/cuda_rig/README.md). That build
# is some 5 GB; a directory of other wheels, which pip may be set to prefer, is left out.
CUDA_VENV := .venv-cuda
CUDA_STAMP := $(CUDA_VENV)/.duoka-installed
RIG = rig=$$($(CUDA_VENV)/bin/python tests/cuda_rig/build.py) && \
  LD_PRELOAD=$$rig LD_LIBRARY_PATH=$${rig%/*} OMP_NUM_THREADS=1 RIG_GPUS=24GiB,12GiB RIG_CONTEXT=400MiB
cuda: $(CUDA_STAMP)
	$(RIG) $(CUDA_VENV)/bin/python -m pytest -n $(JOBS) -m "(cuda_rig or gpu) and not nightly" \
	  tests/cuda_rig tests/hardware tests/runtime/test_devices.py tests/tools/bench/test_calibrate.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The documentation site, in build/site: English, and Chinese in zh/. A broken link, anchor or
# docstring is an error. duoka itself isn't installed for it: docstrings are read, not imported.
docs: .venv-docs/.installed
	.venv-docs/bin/python docs/site/build.py

# Writes the schemas of plan files and reports anew, after a change to the dataclasses that they
# are made of.
schema: $(STAMP)
	$(BIN)/python tests/schemas.py

# Writes docs/cli.md anew, after a change to options, exit codes or environment variables.
reference: $(STAMP)
	$(BIN)/python tests/reference.py

# What duoka does, as kept in tests/golden: plans, checks, commands, requests, tunes, and rig where
# there is a .venv-cuda. `make golden PARTS=plans` for one of them. The second target keeps what is
# new.
PARTS ?=
golden: $(STAMP)
	$(BIN)/python tests/golden $(PARTS)
golden-update: $(STAMP)
	$(BIN)/python tests/golden --update $(PARTS)

# Whether the working tree can be released (scripts/release_check.py): builds the wheels, the sdist and
# the SBOM in dist/, installs a wheel and runs the demo. Its tools have an environment of their own.
# `make release-check UPDATE=--update` also writes docs/licenses.md.
UPDATE ?=
release-check: .venv-release/.installed
	.venv-release/bin/python scripts/release_check.py $(UPDATE)

# Measures what a machine without a GPU can, in about half an hour on two cores, and rewrites the
# tables and plots of benchmarks/README.md. `make benchmarks ONLY="forecast load"` for some of them.
ONLY ?=
benchmarks: $(BENCHMARKS_STAMP)
	$(BIN)/python benchmarks/run.py $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf $(VENV) $(CUDA_VENV) .venv-docs .venv-newest .venv-oldest .venv-release

# Makes a virtual environment with the first candidate that is new enough and can make some (Debian
# ships a Python without ensurepip).
define MAKE_VENV
@for python in $(CANDIDATES); do \
  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then \
    echo "making $(@D) with $$python" && exec $$python -m venv $(@D); \
  fi; \
done; \
echo "duoka needs Python 3.11 or newer with its venv module; tried: $(CANDIDATES)" >&2; \
echo "hint: install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
exit 1
endef

# Made again when a dependency or what is compiled changes.
$(CUDA_STAMP): export PIP_FIND_LINKS := $(CURDIR)/tests/cuda_rig/c
.venv-newest/.duoka-installed: CONSTRAINTS = grep '^torch==' constraints.txt
.venv-oldest/.duoka-installed: CONSTRAINTS = grep '^torch==' constraints.txt && \
  $(@D)/bin/python -m pip install --quiet packaging && $(@D)/bin/python tests/lower_bounds.py
CONSTRAINTS = cat constraints.txt
VERSION_STAMPS := .venv-newest/.duoka-installed .venv-oldest/.duoka-installed
$(STAMP) $(CUDA_STAMP) $(VERSION_STAMPS): pyproject.toml constraints.txt hatch_build.py $(wildcard src/duoka/forecast/*.[ch])
	$(MAKE_VENV)
	($(CONSTRAINTS)) > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c $(@D)/constraints.txt -e '.[all,dev]'
	@touch $@

$(RAY_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $@

# Tools, in the dependency groups of pyproject.toml; --group came with pip 25.1.
GROUP = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1" && \
  $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group
.venv-docs/.installed .venv-release/.installed: .venv-%/.installed: pyproject.toml constraints.txt
	$(MAKE_VENV)
	$(GROUP) $*
	@touch $@
$(BENCHMARKS_STAMP): $(STAMP)
	$(GROUP) benchmarks
	@touch $@
