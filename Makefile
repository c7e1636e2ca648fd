# Targets install what they need into .venv: `demo` and `docs` little, all others what `setup` installs.
# make setup   everything that tests and checks need
# make demo    a real RL run, with and without drafts, from a bare machine
# make test    everything, with real components; what CI runs. As root, it installs missing programs with apt-get, and says so first
# make check   formatters, linters, types, the documentation site
# make docs    the documentation site in build/site, which a browser opens from the disk
# make bench   measurements beside the peers
# make study   RL runs by method and seed: exact drafts, SPEC-RL, both; hours
# make chaos   faults and hostile clients at length: a million messages, ten thousand streams, partitions
# make manifests   deploy/kubernetes from the chart
# make vllm-versions   what every release of vLLM has of what the adapter relies on, into docs/vllm-versions.md
# make lock    the versions and hashes that the image installs; make lock UPGRADE=1 for newer ones
# make dist    the source distribution and wheels, installed in clean environments and tried; DIST_PYTHON=3.12 for one
# make wheels  the wheels of a release, in manylinux containers (Docker)
# make test-verl   rollouts through verl, in an environment of its own
# make test-sglang  rollouts through SGLang on the CPU, its latest release and the one that slime pins, in environments of their own
# make test-v2   vLLM's model runner V2 on the CPU, its kernels interpreted, in environments of their own; hours
# make test-ray    a job on a real cluster of Ray, in an environment of its own
# make test-image  the image built and run with buildah and podman, as root
# make test-cluster  the chart in a real control plane: etcd, API server, controllers, scheduler, several versions of Helm
# make fuzz    the long runs: fuzzers of engine and wire, an hour each
PYTHON ?= python3
VENV := .venv
VENV_OLD := .venv-vllm-0.27
VENV_MID := .venv-vllm-0.29
VENV_V2 := .venv-v2
VENV_V2_NEXT := .venv-v2-next
VENV_VERL := .venv-verl
VENV_SGLANG := .venv-sglang
VENV_SGLANG_OLD := .venv-sglang-old
VENV_RAY := .venv-ray
VENV_DIST := build/dist-tools
VERL := 0.9.1
SGLANG := 0.5.23
SGLANG_OLD := 0.5.15.post1
RAY := 2.60.0
VLLM_NEW := 0.32.0
VLLM_OLD := 0.27.0
VLLM_MID := 0.29.0
VLLM_NEXT := 0.33.0
UV := 0.13.9
BIN := $(VENV)/bin
NATIVE_SOURCES := $(shell find native -name '*.cc' -o -name '*.h' -o -name 'CMakeLists.txt')
# In the order of the files' names: xdist's own order starts files with few tests last, among them the slowest.
BY_FILE := --dist loadfile --no-loadscope-reorder
# $(SIDE_BY_SIDE) N TARGETS runs N targets at a time. The output of a target appears when the target ends.
SIDE_BY_SIDE = $(MAKE) --no-print-directory --output-sync=target -j
CXX_FORMATTED := $(filter-out native/third_party/%,$(filter %.cc %.h,$(NATIVE_SOURCES)))

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles the modules that it imports, a small part of vLLM and torch, and keeps them for the next process, even if
# the environment says otherwise. pip reads PIP_NO_COMPILE the wrong way round.
export PIP_NO_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo dist wheels test check check-types check-locks check-style check-docs docs lock bench study chaos fuzz setup clean manifests test-image test-cluster tools say-tools test-native test-python test-vllm test-long test-verl test-sglang test-sglang-$(SGLANG) test-sglang-$(SGLANG_OLD) test-ray test-vllm-$(VLLM_NEW) test-vllm-$(VLLM_OLD) test-vllm-$(VLLM_MID) test-v2 test-v2-short test-v2-$(VLLM_NEW) test-v2-$(VLLM_NEXT) test-v2-async-$(VLLM_NEW) test-v2-async-$(VLLM_NEXT) vllm-versions

setup: $(VENV)/.ready

$(VENV)/.vllm: scripts/install_vllm.py scripts/environments.py
	$(PYTHON) -m scripts.install_vllm $(VLLM_NEW) $(VENV)
	touch $@

# The package is installed again when compiled or generated files change; changes of Python files need no installation.
BUILT_FROM := pyproject.toml setup.py $(NATIVE_SOURCES) $(wildcard protos/*/*/*.proto)
# pip installs groups from this version on.
UPGRADE_PIP = $(BIN)/pip install -q -U "pip>=25.1"

# Includes what the demo and the site need.
$(VENV)/.ready: $(VENV)/.vllm $(BUILT_FROM)
	$(UPGRADE_PIP)
	$(BIN)/pip install -q --group test --group docs -e '.[all]'
	touch $@ $(VENV)/.demo $(VENV)/.docs

$(VENV)/.demo: $(VENV)/.vllm $(BUILT_FROM)
	$(UPGRADE_PIP)
	$(BIN)/pip install -q --group demo -e '.[server]'
	touch $@

# Without vLLM and without the package: mkdocstrings reads the sources.
$(VENV)/.docs: pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(UPGRADE_PIP)
	$(BIN)/pip install -q --group docs
	touch $@

# The oldest vLLM that runs with the same torch, and one between, which OpenRLHF pins. They have the client only, as a
# trainer's image would.
$(VENV_OLD)/.ready: VERSION := $(VLLM_OLD)
$(VENV_MID)/.ready: VERSION := $(VLLM_MID)
$(VENV_OLD)/.ready $(VENV_MID)/.ready: $(VENV)/.ready
	$(PYTHON) -m scripts.install_vllm $(VERSION) $(@D) --over $(VENV)
	HISTOSPEC_CLIENT_ONLY=1 $(@D)/bin/pip install -q -e .
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python -m examples.tiny_rl.run

check: setup
	@+$(SIDE_BY_SIDE) 2 check-types check-locks check-style check-docs

check-types: setup
	$(BIN)/mypy

check-locks: setup
	@$(BIN)/clang-tidy -quiet $(wildcard native/src/registry/*.cc native/src/upkeep/*.cc native/src/engine/*.cc) -- -std=c++20 -Wthread-safety -Inative/include -Inative/src 2>/dev/null

check-style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FORMATTED)

# A link that leads nowhere, or a page that no menu has, is an error. The variable hides an advertisement.
check-docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs: check-docs

# The first two lines compile and download. Installing an environment writes the generated messages again, so nothing else
# that reads them runs at the same time. The third line runs three targets at a time, so that two cores stay busy while one
# of them runs its last test.
test: say-tools setup
	@+$(SIDE_BY_SIDE) 2 $(VENV_OLD)/.ready tools check-locks check-style
	@+$(MAKE) --no-print-directory $(VENV_V2)/.ready
	@+$(SIDE_BY_SIDE) 3 test-python test-vllm-$(VLLM_NEW) test-v2-short test-vllm-$(VLLM_OLD) test-native check-types check-docs

tools:
	scripts/install-tools

say-tools:
	@scripts/install-tools --say

test-native: setup
	scripts/test-native

# More processes than cores: these tests often wait for a process to start or a deadline to pass.
# The tools are in its recipe: with them as a target beside `setup`, make would start all other tests first.
test-python: setup
	scripts/install-tools
	$(BIN)/pytest -q -n 4 $(BY_FILE) -m "not long" tests --ignore=tests/vllm

test-vllm: test-vllm-$(VLLM_NEW) test-vllm-$(VLLM_OLD)

test-vllm-$(VLLM_NEW): setup
	$(BIN)/pytest -q -n 2 $(BY_FILE) -m "not long" tests/vllm

test-vllm-$(VLLM_OLD): $(VENV_OLD)/.ready
test-vllm-$(VLLM_MID): $(VENV_MID)/.ready
# vLLM keeps what it learned of a model's class in one file for all versions, and finds it out again (9 seconds of CPU
# time) after another version has written the file. So these have caches of their own.
test-vllm-$(VLLM_OLD) test-vllm-$(VLLM_MID):
	VLLM_CACHE_ROOT=$(abspath $(<D))/cache HISTOSPEC_TEST_SERVER=$(abspath $(BIN))/histospec \
	  $(<D)/bin/python -m pytest -q $(OLD_TESTS)

test-long: setup
	$(BIN)/pytest -q -m long tests
	$(MAKE) --no-print-directory test-vllm-$(VLLM_OLD) test-vllm-$(VLLM_MID) OLD_TESTS='-n 2 $(BY_FILE) -m "not newest" tests/vllm'

# An engine that drafts, in one process; `make test-long` runs the rest with these versions, too.
OLD_TESTS := tests/vllm/test_greedy.py

# Downloads every wheel at the first time, some GB, and keeps their Python files.
vllm-versions: setup
	$(BIN)/python -m scripts.vllm_versions --record

# vLLM's model runner V2 with kernels in Triton's interpreter.
$(VENV_V2)/.ready: VERSION := $(VLLM_NEW)
$(VENV_V2_NEXT)/.ready: VERSION := $(VLLM_NEXT)
$(VENV_V2)/.ready $(VENV_V2_NEXT)/.ready: scripts/install_v2.py scripts/environments.py $(VENV)/.ready
	$(PYTHON) -m scripts.install_v2 $(VERSION) $(@D) $(VENV)
	HISTOSPEC_CLIENT_ONLY=1 $(@D)/bin/pip install -q -e .
	touch $@

IN_V2 = VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 HISTOSPEC_TEST_SERVER=$(abspath $(BIN))/histospec \
  $(<D)/bin/python -m pytest -q

test-v2: test-v2-$(VLLM_NEW) test-v2-$(VLLM_NEXT) test-v2-async-$(VLLM_NEW) test-v2-async-$(VLLM_NEXT)

test-v2-$(VLLM_NEW): $(VENV_V2)/.ready
test-v2-$(VLLM_NEXT): $(VENV_V2_NEXT)/.ready
test-v2-$(VLLM_NEW) test-v2-$(VLLM_NEXT):
	$(IN_V2) -n 2 $(BY_FILE) -m "not long" tests/vllm

# Tests of the adapter with asynchronous scheduling, too.
ASYNC_TESTS := $(addprefix tests/vllm/test_,$(addsuffix .py,history epochs greedy options partial_rollouts parallel learned_cost)) \
  tests/vllm/test_sampling.py::test_sampling_is_exact

test-v2-async-$(VLLM_NEW): $(VENV_V2)/.ready
test-v2-async-$(VLLM_NEXT): $(VENV_V2_NEXT)/.ready
test-v2-async-$(VLLM_NEW) test-v2-async-$(VLLM_NEXT):
	HISTOSPEC_TEST_ASYNC=1 $(IN_V2) -n 2 $(BY_FILE) $(ASYNC_TESTS)

# What `make test` runs of it, in one process, which imports vLLM once.
V2_SHORT := any_draft_leaves_the_output_as_it_is a_sampler_that_accepts_any_token_is_noticed \
  the_host_reads_nothing_from_the_device finished_responses_are_the_history

test-v2-short: $(VENV_V2)/.ready
	$(IN_V2) $(addprefix tests/vllm/test_runner_v2.py::test_,$(V2_SHORT)) \
	  tests/vllm/test_coupled_v2.py::test_known_answers_of_vllms_kernel

# In an environment of its own: verl and the newest vLLM need different versions of transformers.
$(VENV_VERL)/.ready: scripts/install_verl.py scripts/environments.py $(VENV)/.ready
	$(PYTHON) -m scripts.install_verl $(VERL) $(VENV_VERL) $(VENV)
	touch $@

test-verl: $(VENV_VERL)/.ready
	$(VENV_VERL)/bin/python -m pytest -q tests/verl

# Over the torch of the first environment: SGLang's own requirements are 11 GB of CUDA.
$(VENV_SGLANG)/.ready: scripts/install_sglang.py scripts/environments.py $(VENV)/.ready
	$(PYTHON) -m scripts.install_sglang $(SGLANG) $(VENV_SGLANG) $(VENV)
	touch $@

# The release that slime pins.
$(VENV_SGLANG_OLD)/.ready: scripts/install_sglang.py scripts/environments.py $(VENV)/.ready
	$(PYTHON) -m scripts.install_sglang $(SGLANG_OLD) $(VENV_SGLANG_OLD) $(VENV)
	touch $@

test-sglang: test-sglang-$(SGLANG) test-sglang-$(SGLANG_OLD)

test-sglang-$(SGLANG): $(VENV_SGLANG)/.ready
test-sglang-$(SGLANG_OLD): $(VENV_SGLANG_OLD)/.ready
test-sglang-$(SGLANG) test-sglang-$(SGLANG_OLD):
	$(<D)/bin/python -m pytest -q tests/sglang

# The environment also sees the packages of the first one. addsitedir reads its .pth files, too.
$(VENV_RAY)/.ready: $(VENV)/.ready
	$(PYTHON) -m venv $(VENV_RAY)
	$(VENV_RAY)/bin/pip install -q "ray[default]==$(RAY)"
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" >"$$($(VENV_RAY)/bin/python -c "$$site")/base.pth"
	touch $@

test-ray: $(VENV_RAY)/.ready
	$(VENV_RAY)/bin/python -m pytest -q tests/deploy/test_ray.py

bench: setup
	scripts/install-peers $(VENV)
	$(BIN)/python -m benchmarks.engine.compare
	$(BIN)/python -m benchmarks.engine.growth
	$(BIN)/python -m benchmarks.engine.budget

study: setup
	scripts/install-peers $(VENV)
	$(BIN)/python -m benchmarks.rl_study.run

chaos: setup tools
	HISTOSPEC_CHAOS_MESSAGES=1000000 HISTOSPEC_CHAOS_STREAMS=10000 HISTOSPEC_CHAOS_ROUNDS=3 \
	  $(BIN)/pytest -q -s -o timeout=7200 tests/integration/test_partitions.py tests/integration/test_hostile.py

manifests: tools
	scripts/render-manifests

lock: setup
	$(BIN)/pip install -q uv==$(UV)
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m scripts.lock $(if $(UPGRADE),--upgrade)

# Without `setup`: a machine that only builds packages needs no vLLM.
$(VENV_DIST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV_DIST)
	$(VENV_DIST)/bin/pip install -q -U "pip>=25.1"
	$(VENV_DIST)/bin/pip install -q --group dist
	touch $@

dist: $(VENV_DIST)/.ready
	$(VENV_DIST)/bin/python -m scripts.dist $(addprefix --python ,$(DIST_PYTHON))

wheels: $(VENV_DIST)/.ready
	$(VENV_DIST)/bin/pip install -q --group wheels
	$(VENV_DIST)/bin/cibuildwheel --output-dir dist
	$(VENV_DIST)/bin/twine check --strict dist/*.whl

test-image: setup
	HISTOSPEC_TEST_IMAGE=1 $(BIN)/pytest -q tests/deploy/test_image.py

# At most two control planes: more are too slow on two cores.
test-cluster: setup tools
	scripts/install-control-plane
	HISTOSPEC_TEST_CLUSTER=1 $(BIN)/pytest -q -n 2 $(BY_FILE) $(wildcard tests/deploy/test_cluster*.py)

fuzz: setup
	scripts/fuzz

clean:
	rm -rf build dist $(VENV_V2) $(VENV_V2_NEXT) $(VENV) $(VENV_OLD) $(VENV_MID) $(VENV_VERL) $(VENV_SGLANG) $(VENV_SGLANG_OLD) $(VENV_RAY) *.egg-info native/python/*.so
	find . -name '*_pb2*.py*' -not -path './.venv*' -delete
