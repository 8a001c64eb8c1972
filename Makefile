# Development commands; `make` lists them. Each sets up .venv first (test-keras: .venv-keras, and so on), again only when something that it
# is made of has changed.

PYTHON ?=
PIP_FLAGS ?=
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
BENCH_FLAGS ?=
JEPSEN_FLAGS ?=
FUZZ_EXAMPLES ?= 2000
TEST_PROCESSES ?= 7
SECONDS ?= 600
SEED ?= 1
PROTOCOL_SECONDS ?= 60
STEP_SEQUENCES ?= 10003
STEP_KILLS ?= 200
DAMAGED_STEPS ?= 100000
BIN := .venv/bin
BIN_KERAS := .venv-keras/bin
INSTALLED := .venv/.psd-installed
INSTALLED_KERAS := .venv-keras/.psd-installed
BIN_LAUNCHERS := .venv-launchers/bin
INSTALLED_LAUNCHERS := .venv-launchers/.psd-installed
BIN_TRAINERS := .venv-trainers/bin
INSTALLED_TRAINERS := .venv-trainers/.psd-installed
BIN_STORES := .venv-stores/bin
INSTALLED_STORES := .venv-stores/.psd-installed
BIN_TORCHREC := .venv-torchrec/bin
INSTALLED_TORCHREC := .venv-torchrec/.psd-installed
SOURCES := pyproject.toml setup.py .ci/setup .ci/constraints.txt \
	$(wildcard proto/psd/v1/*.proto psd_core/*.pyx psd_core/*.pxd psd_core/_c_headers.py psd_core/rules.py psd_core/_vector_rows.py psd_core/vector_operations.py psd_core/csrc/*)

.PHONY: help setup demo docs pictures check test test-keras test-trainers test-torchrec test-launchers test-stores test-install test-browser chaos jepsen check-protocol check-steps fuzz bench lint clean

help:
	@echo "make demo    train the MNIST example synchronously and asynchronously on 2 shards x 2 workers"
	@echo "make docs    the pages of docs/ as a site, in build/site"
	@echo "make pictures   the charts and timelines of README and docs, from the tables of docs/performance.md"
	@echo "make check   lint and the quick tests: what to run while one works; a minute on two cores"
	@echo "make test    lint and run all tests but those of the next ten; eight minutes on two cores"
	@echo "make test-keras   the tests of the Keras and JAX faces, in an environment of their own with TensorFlow, .venv-keras"
	@echo "make test-trainers   transformers' Trainer, PEFT, TRL, Accelerate and Lightning on shards, in .venv-trainers; three minutes"
	@echo "make test-torchrec   TorchRec's own features, configurations and DLRM on tables, in .venv-torchrec; a minute"
	@echo "make test-launchers   jobs over ssh, under SLURM, on Ray and for Kubernetes, as far as these are installed; Ray in .venv-launchers; ten minutes"
	@echo "make test-stores   jobs with checkpoints at s3://, gs:// and sftp://: moto, fake-gcs-server, sshd; in .venv-stores; five minutes"
	@echo "make test-install   sdist and wheel, installed into empty environments of three Pythons, and the words of the README; three minutes"
	@echo "make test-browser   psdctl dashboard in headless Chromium (Debian's package chromium), beside a real job; half a minute"
	@echo "make chaos   the long recovery tests: dozens of kills, broken connections, full-size memory (a quarter of an hour)"
	@echo "make jepsen  jobs that are broken in every way that we know, for SECONDS, from SEED; failures are kept in build/jepsen"
	@echo "make check-protocol   the real client and shards in every order of a small world's events, with one fault, for PROTOCOL_SECONDS each with two, and at random in larger worlds (two hours)"
	@echo "make check-steps   armed steps: STEP_SEQUENCES random sequences against pushes, STEP_KILLS of shards under load, DAMAGED_STEPS under AddressSanitizer, threads under ThreadSanitizer (hours)"
	@echo "make fuzz    every decoder, lives of a state directory, codecs and vectors, with FUZZ_EXAMPLES random inputs each, 2000 by default: up to half an hour"
	@echo "make bench   the dense step against other systems, latency, overlap, kernels: tables of ratios, in 3 minutes on a quiet machine"
	@echo "make lint    ruff and mypy alone"
	@echo "make setup   only make .venv and build the kernels into it"
	@echo "make clean   remove everything that was made, .venv too"
	@echo
	@echo "Variables: PYTHON=python3.12  PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'"
	@echo "           DEMO_FLAGS='--data DIR --steps 400'  PYTEST_FLAGS='-k torch'"
	@echo "           TEST_PROCESSES=7, for make test: how many files of tests run at a time"
	@echo "           BENCH_FLAGS='--ray-python PATH --tensorflow-python PATH', interpreters that have these"

setup: $(INSTALLED)

$(INSTALLED): $(SOURCES)
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/setup

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py $(DEMO_FLAGS)

# A warning is an error; tests/docs builds it likewise.
docs: $(INSTALLED)
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/site && echo "build/site/index.html"

# docs/recording.py makes the recording of a killed shard anew; here it is only drawn.
pictures: $(INSTALLED)
	@$(BIN)/python docs/charts.py && $(BIN)/python docs/timelines.py && $(BIN)/python docs/recording.py --draw

# Every check runs, whichever failed before; pytest comes last, so that its summary is what one sees.
lint: $(INSTALLED)
	@failed=; \
	for check in "ruff check" "ruff format --check" mypy; do \
		echo "== $$check"; \
		$(BIN)/$$check || failed="$$failed [$$check]"; \
	done; \
	[ -z "$$failed" ] || { echo "lint failed:$$failed"; exit 1; }

# Tests, and meanwhile lint, which is shown in the end.
define checked
@status=0; \
mkdir -p build; \
$(MAKE) --no-print-directory lint >build/lint.log 2>&1 & lint=$$!; \
$(BIN)/python -m pytest --dist loadfile $(1) $(PYTEST_FLAGS) || status=$$?; \
wait $$lint || status=$$?; \
cat build/lint.log; \
exit $$status
endef

# The rules of the source, messages, kernels, a shard's state, files: all in one process. Without what is long: a crash at each store,
# a failure of each operation of a file system. tests/README.md says what each folder shows.
check: $(INSTALLED)
	$(call checked,--numprocesses 2 -m "not process and not slow" \
		--ignore-glob "*_crash.py" --ignore-glob "*_torture.py" \
		tests/test_*.py tests/contract tests/core tests/state tests/checkpoint)

# Tests start hundreds of processes, which find the modules compiled, also where the environment says that Python is not to keep these.
check test: export PYTHONDONTWRITEBYTECODE =

# Torch's threads wait for each other without letting go of the core, which others could use: with them its tests take twice the
# processor time.
check test: export OMP_NUM_THREADS ?= 1

# More files of tests at a time than there are cores: they often wait, for processes to start and for connections to fail. In the order
# of their names, which mixes those that wait with those that compute; tests/conftest.py takes the pages of the docs apart.
test: $(INSTALLED)
	$(call checked,--numprocesses $(TEST_PROCESSES) --no-loadscope-reorder)

$(INSTALLED_KERAS): $(SOURCES) .ci/constraints-keras.txt
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/setup keras

# Keras has one backend in a process, so they run once on each.
test-keras: $(INSTALLED_KERAS)
	@status=0; \
	for backend in tensorflow torch; do \
		echo "== pytest, Keras on $$backend"; \
		KERAS_BACKEND=$$backend TF_CPP_MIN_LOG_LEVEL=2 $(BIN_KERAS)/python -m pytest --numprocesses 2 --dist loadfile \
			tests/keras $(PYTEST_FLAGS) || status=$$?; \
	done; \
	exit $$status

$(INSTALLED_TRAINERS): $(SOURCES) .ci/constraints-trainers.txt
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/setup trainers

test-trainers: $(INSTALLED_TRAINERS)
	@$(BIN_TRAINERS)/python -m pytest --timeout 1800 tests/trainers $(PYTEST_FLAGS)

$(INSTALLED_TORCHREC): $(SOURCES) .ci/constraints-torchrec.txt
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/setup torchrec

test-torchrec: $(INSTALLED_TORCHREC)
	@$(BIN_TORCHREC)/python -m pytest tests/torchrec $(PYTEST_FLAGS)

$(INSTALLED_LAUNCHERS): $(SOURCES) .ci/constraints-launchers.txt
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/setup launchers

# sshd, SLURM, munge and kubectl are the system's: apt install openssh-server slurmctld slurmd slurm-client munge kubectl. kmock's
# plugin for pytest would need pytest-asyncio; its server is used without.
test-launchers: $(INSTALLED_LAUNCHERS)
	@$(BIN_LAUNCHERS)/python -m pytest -p no:kmock --timeout 300 tests/launchers $(PYTEST_FLAGS)

$(INSTALLED_STORES): $(SOURCES) .ci/constraints-stores.txt
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" .ci/setup stores

# sshd is the system's: apt install openssh-server.
test-stores: $(INSTALLED_STORES)
	@$(BIN_STORES)/python -m pytest --numprocesses 2 --timeout 600 tests/stores $(PYTEST_FLAGS)

# What users install; it needs the package index. The wheel and its contents are looked at here, too.
test-install: $(INSTALLED)
	@$(BIN)/python -m pytest --timeout 1800 tests/install $(PYTEST_FLAGS)

# A browser is no dependency of psd: without one this skips. PSD_PICTURES=DIR saves pictures of the page.
test-browser: $(INSTALLED)
	@$(BIN)/python -m pytest tests/browser $(PYTEST_FLAGS)

# What `make test` has in a short form, at length; every seed is printed.
chaos: $(INSTALLED)
	@$(BIN)/python -m pytest tests/recovery tests/deploy -m chaos $(PYTEST_FLAGS)

# What `make test` has with a few fixed plans, drawn one after the other; tests/jepsen/run_jepsen.py says what it does.
jepsen: $(INSTALLED)
	@$(BIN)/python tests/jepsen/run_jepsen.py --seconds $(SECONDS) --seed $(SEED) $(JEPSEN_FLAGS)

# What `make test` has for some hundred states, with one fault: all of them; with two: for a while.
check-protocol: $(INSTALLED)
	@$(BIN)/python tests/protocol/check_protocol.py --seconds $(PROTOCOL_SECONDS)

# What `make test` has in short forms; how to repeat a sequence that fails is in its name. All run, whichever failed before.
check-steps: $(INSTALLED)
	@status=0; \
	PSD_STEP_SEQUENCES=$(STEP_SEQUENCES) PSD_STEP_KILLS=$(STEP_KILLS) $(BIN)/python -m pytest --timeout 0 \
		tests/rim/test_rim_steps_alike.py tests/rim/test_rim_row_steps_alike.py tests/rim/test_rim_steps_killed.py \
		$(PYTEST_FLAGS) || status=$$?; \
	PSD_STEP_PUSHES=5000 .ci/sanitized thread tests/core/test_steps_threads.py tests/rim/test_rim_steps_together.py \
		tests/rim/test_rim_steps_revoked.py tests/rim/test_rim_row_steps_rounds.py || status=$$?; \
	PSD_DAMAGED_STEPS=$(DAMAGED_STEPS) .ci/sanitized address tests/rim/test_rim_steps_damaged.py \
		tests/rim/test_rim_row_steps_damaged.py tests/rim/test_rim_row_steps_rounds.py \
		tests/core/test_steps_threads.py tests/core/test_worker_steps.py || status=$$?; \
	exit $$status

# What `make test` has with a few fixed inputs, with many random ones; how to repeat one that fails is printed.
fuzz: $(INSTALLED)
	@PSD_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) PSD_TEST_REQUESTS=100000 PSD_TEST_BATCHES=9600 \
		$(BIN)/python -m pytest tests/fuzz tests/rim/test_rim_malformed.py tests/contract/test_contract_frames.py \
		tests/contract/test_contract_layout.py tests/core/test_codecs_reference.py tests/core/test_core_step_block.py \
		tests/core/test_deltas.py tests/core/test_vector_batches.py --timeout 0 $(PYTEST_FLAGS)

# Each of them has --help; benchmarks/ has more that take longer. All run, whichever failed before.
bench: $(INSTALLED)
	@status=0; \
	$(BIN)/python benchmarks/step.py --quick $(BENCH_FLAGS) || status=$$?; \
	$(BIN)/python benchmarks/latency.py $(BENCH_FLAGS) || status=$$?; \
	$(BIN)/python benchmarks/overlap.py || status=$$?; \
	$(BIN)/python benchmarks/kernels.py || status=$$?; \
	exit $$status

clean:
	rm -rf .venv .venv-keras .venv-trainers .venv-torchrec .venv-launchers .venv-stores build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f psd/v1/*_pb2*.py psd/v1/*_pb2*.pyi psd_core/*.so psd_core/_*.c psd_core/csrc/rules.h psd_core/csrc/rule_templates.h psd_core/csrc/vector_operations.h
	find psd psd_core clients tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
