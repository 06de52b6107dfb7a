# What a developer runs. Nothing here needs a GPU.
#
# `make` builds the libraries with the system's C compiler into build/lib and
# build/sim; the Python package in python/ uses them with
# AMEM_LIBRARY_DIR=build/lib and AMEM_SIM_LIBRARY_DIR=build/sim. `make test`
# builds the wheel and installs it into build/venv, so that the tests see what
# users get.

PYTHON ?= python3
GO ?= go
CC = gcc
# Of each fuzz target, and of the soak test.
FUZZTIME = 1m
CYCLES = 1000
STARTS = 60
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2

venv := build/venv
python := $(venv)/bin/python
pip := $(python) -m pip install --quiet --disable-pip-version-check
export GO PYTHON

.PHONY: lib help wheel install venv lint lint-go lint-py test test-go test-py test-torch race tsan fuzz soak sim-bench demo clean

# Several targets install into build/venv.
.NOTPARALLEL:

lib: ## the libraries, into build/lib and build/sim (the default)
	CC="$(CC)" CFLAGS="-g -Werror" scripts/build_native.sh build
	$(MAKE) --silent -C tests/nccl CC="$(CC)" BUILD=$(CURDIR)/build

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

wheel: ## the wheel, into dist/
	scripts/build_wheel.sh

install: wheel
	$(pip) --no-deps --force-reinstall dist/amem-*.whl

venv:
	[ -x $(python) ] || $(PYTHON) -m venv $(venv)
	$(pip) -r scripts/requirements-build.txt -r scripts/requirements-test.txt

lint: lint-go lint-py ## gofmt, go vet, staticcheck, ruff, mypy

lint-go:
	@files=$$(gofmt -l golib); [ -z "$$files" ] || { echo "gofmt -w these: $$files" >&2; exit 1; }
	$(GO) vet ./golib/...
	GOBIN=$(CURDIR)/build/bin $(GO) install $(STATICCHECK)
	build/bin/staticcheck ./golib/...

lint-py: venv
	$(python) -m ruff check .
	$(python) -m mypy python/amem tests/py tests/agent
	$(python) -m mypy tests/sim
	$(python) -m mypy tests/pytorch

test: lib lint install test-go test-py ## every check that needs no GPU

test-go:
	$(GO) test -race -timeout 600s ./golib/...

test-py: venv
	$(python) -m pytest -rs

test-torch: lib venv install ## real PyTorch releases on the simulated driver; TORCH=VERSION: that one only
	$(python) tests/pytorch/run.py $(addprefix --only ,$(TORCH))

race: lib install ## the tests of several processes with Go's race detector in the core
	scripts/build_race.sh build/lib build/race/lib
	GORACE=halt_on_error=1 AMEM_LIBRARY_DIR=$(CURDIR)/build/race/lib AMEM_SIM_LIBRARY_DIR=$(CURDIR)/build/sim \
		$(python) -m pytest -rs --timeout 600 --ignore tests/sim/test_driver.py --ignore tests/sim/test_standin.py tests/sim

tsan: lib ## ThreadSanitizer over the hook, in a program of many threads
	$(MAKE) --silent -C tests/tsan CC="$(CC)" BUILD=$(CURDIR)/build

fuzz: ## each fuzz target for FUZZTIME
	@set -e; for package in $$($(GO) list ./golib/...); do \
		for target in $$($(GO) test -list '^Fuzz' $$package | grep '^Fuzz'); do \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$package; \
		done; \
	done

soak: lib install ## STARTS starts, and CYCLES cycles of pause and resume with random work and faults
	AMEM_LIBRARY_DIR=$(CURDIR)/build/lib AMEM_SIM_LIBRARY_DIR=$(CURDIR)/build/sim \
		$(python) tests/sim/soak.py --cycles $(CYCLES) --starts $(STARTS)

sim-bench: lib install ## how the cost grows with ranks and communicators, on the simulator
	AMEM_LIBRARY_DIR=$(CURDIR)/build/lib AMEM_SIM_LIBRARY_DIR=$(CURDIR)/build/sim $(python) bench/sim_bench.py

demo: install ## the wheel, installed, and what it does, on a simulated GPU if there is none
	$(python) -m amem demo

clean: ## removes build/ and dist/
	rm -rf build dist python/build python/*.egg-info
