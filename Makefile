# The commands of this project. `make help` lists them.

VENV := target/python
export POSTRIDER_TEST_PYTHON := $(CURDIR)/$(VENV)/bin/python

.PHONY: help run test fmt lint install

help: ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-8s %s\n", $$1, $$2 }'

run: ## installs what is missing, builds, and starts everything on a private Postgres in .postrider/
	@sh deploy/install.sh postgres
	cargo build --release
	@exec $${CARGO_TARGET_DIR:-target}/release/postrider up

test: $(VENV)/stripe ## installs what is missing and runs every test
	cargo test --workspace

install: ## only installs what is missing
	@sh deploy/install.sh postgres python curl

fmt: ## formats the code
	cargo fmt --all

lint: ## the checks that need no test
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

# Stripe's own library verifies our signatures in the tests.
$(VENV)/stripe: tests/requirements.txt | install
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/requirements.txt
	@touch $@
