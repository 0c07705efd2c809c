# make serve, make test: all that a user needs. .ci/venv.py keeps .venv ready and does nothing when it is.
#
#   PYTHON           the Python 3.11+ to build .venv on
#   TORCH_SPEC       which torch (default torch==2.13.0, or the host's own ROCm or CUDA build where there is one)
#   TORCH_INDEX_URL  the package index to take torch from, e.g. one with CPU or ROCm builds
#   MODEL, ARGS      make serve MODEL=folder-or-hub-id ARGS="--port 8080 --dtype float32"; the same of make observe, which
#                    draws the dashboard of a server under load and needs Debian's prometheus
#   PYTEST_ARGS      passed to pytest by every test target
#
# test-checkpoints reads the folder of model folders that NYBBLE_CHECKPOINTS names; test-rdna needs RDNA_TINYGRAD;
# test-fuzz, test-soak and test-lm-eval run for minutes: FUZZ_S and SOAK_S say how many seconds. audit needs a network.
# test-packages runs the linear kernels that call a package of their own on that package, and what nvrtc, which needs no
# GPU, makes of csrc.
# test-ray installs Ray apart, in build/ray: an environment on top of .venv, which it sees.

SHELL := /bin/bash
PYTHON ?= python3
MODEL ?= demo
ARGS ?=
PYTEST_ARGS ?=
export TORCH_SPEC TORCH_INDEX_URL

READY := "$(PYTHON)" .ci/venv.py
# The tests' tensors are tiny: more threads than this only get in each other's way.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} .venv/bin/pytest
CSRC := $(wildcard csrc/*.h csrc/*.hip csrc/*.cu csrc/*.cpp)

# Beside .venv and without their dependencies: nothing here may bring another torch.
ROW_PACKAGES := zentorch==2.13.0.2 deprecated==1.3.1 wrapt==2.5.2 \
	humming-kernels==0.1.20 tabulate==0.10.0 cuda-bindings==13.5.0 cuda-pathfinder==1.9.1 \
	nvidia-cuda-nvrtc==13.5.37

RAY := "ray[serve]==2.60.0"

LM_EVAL := "lm-eval[api]==0.4.13"

.PHONY: serve observe test test-slow test-checkpoints test-fuzz test-soak test-lm-eval test-gpu test-deploy test-image test-ray audit test-mutations test-rdna test-packages test-wheel venv lint format clean

serve:
	@$(READY)
	@exec .venv/bin/nybble serve "$(MODEL)" $(ARGS)

observe:
	@command -v prometheus >/dev/null || { echo "observe: prometheus is not on PATH: apt-get install prometheus" >&2; exit 1; }
	@$(READY) test dev
	@.venv/bin/python deploy/observe "$(MODEL)" $(ARGS)

test:
	@$(READY) test
	$(PYTEST) -m "not slow and not fuzz and not soak and not lm_eval and not deploy and not image and not ray" $(PYTEST_ARGS)

test-slow:
	@$(READY) test
	$(PYTEST) -m "slow and not deploy and not image and not ray" --ignore=tests/test_wheel.py $(PYTEST_ARGS)

test-checkpoints:
	@$(READY) test
	$(PYTEST) -m checkpoints $(PYTEST_ARGS)

test-fuzz:
	@$(READY) test dev
	$(PYTEST) -m fuzz tests/fuzz $(PYTEST_ARGS)

test-soak:
	@$(READY) test
	$(PYTEST) -m soak tests/soak $(PYTEST_ARGS)

test-lm-eval: build/lm-eval/.installed
	@$(READY) test
	NYBBLE_LM_EVAL=$(CURDIR)/build/lm-eval/bin/python $(PYTEST) -m lm_eval tests/lm_eval $(PYTEST_ARGS)

# An environment of its own: its hundred packages are nobody else's.
build/lm-eval/.installed: Makefile
	rm -rf build/lm-eval
	"$(PYTHON)" -m venv build/lm-eval
	build/lm-eval/bin/pip install --quiet --disable-pip-version-check $(LM_EVAL)
	touch $@

# On a machine with a ROCm or CUDA GPU, whose kernels it compiles: many minutes the first time.
test-gpu:
	@$(READY) test
	$(PYTEST) -m gpu $(PYTEST_ARGS)

test-deploy: build/quadlet/quadlet
	@$(READY) test dev
	$(PYTEST) -m deploy tests/deploy $(PYTEST_ARGS)

# NYBBLE_IMAGE_ARCH=gfx1151 builds that image, with a torch that this machine has.
test-image:
	@$(READY) test dev
	$(PYTEST) -m image -o faulthandler_timeout=900 tests/deploy $(PYTEST_ARGS)

# Where it cannot be had, the tests that run it say so and are left out.
build/quadlet/quadlet: .ci/quadlet.sh
	-bash .ci/quadlet.sh build/quadlet

test-ray: build/ray/.installed
	@$(READY) test
	NYBBLE_RAY=$(CURDIR)/build/ray/bin $(PYTEST) -m ray tests/deploy/test_ray.py $(PYTEST_ARGS)

build/ray/.installed: Makefile
	@$(READY) test dev
	rm -rf build/ray
	.venv/bin/python -m venv build/ray
	.venv/bin/python -c 'import site; print("import site;", "; ".join(f"site.addsitedir({p!r})" for p in site.getsitepackages()))' \
		> "$$(build/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/nybble.pth"
	build/ray/bin/pip install --quiet --disable-pip-version-check $(RAY)
	touch $@

audit:
	@$(READY) test dev
	.venv/bin/pip-audit --skip-editable --progress-spinner off

test-mutations:
	@$(READY) test
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} .venv/bin/python tests/mutations.py

test-rdna:
	@$(READY) test
	$(PYTEST) tests/rdna $(PYTEST_ARGS)

test-packages: build/packages/.installed
	@$(READY) test
	PYTHONPATH=build/packages $(PYTEST) tests/kernels/test_zen.py tests/kernels/test_humming.py \
		tests/kernels/native tests/service/test_warm.py tests/cuda $(PYTEST_ARGS)

build/packages/.installed: Makefile
	@$(READY) test
	rm -rf build/packages
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target build/packages $(ROW_PACKAGES)
	touch $@

test-wheel:
	@$(READY) test
	$(PYTEST) tests/test_wheel.py $(PYTEST_ARGS)

venv:
	@$(READY) test dev

lint:
	@$(READY) dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/mypy --strict .ci/venv.py .ci/report.py deploy/healthcheck.py
	.venv/bin/hadolint deploy/Dockerfile
	MYPYPATH=deploy/observe:.typing .venv/bin/mypy --strict deploy/grafana/build.py deploy/observe
	MYPYPATH=deploy/ray:.typing .venv/bin/mypy --strict deploy/ray/nybble_ray/gateway.py
	$(if $(CSRC),.venv/bin/clang-format --dry-run --Werror $(CSRC))

format:
	@$(READY) dev
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	$(if $(CSRC),.venv/bin/clang-format -i $(CSRC))

clean:
	rm -rf .venv .venv.lock build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
