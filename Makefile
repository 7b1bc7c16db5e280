# Every target sets up .venv first, if anything that goes into it has changed; the second time that takes no time.
# PYTHON=/path/to/python3 chooses the interpreter (3.11 to 3.14), CXX the compiler.
SHELL := /bin/sh
BIN := .venv/bin
export PYTHON

# Any Python that runs can do the set-up; which one it sets up is its own choice (tools/setup_env.py).
SETUP = for p in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 7))' 2>/dev/null && break; p=; done; \
	test -n "$$p" || { echo 'setup: needs Python 3.11 to 3.14; found none; install one or set PYTHON=/path/to/python3' >&2; exit 5; }; \
	"$$p" tools/setup_env.py

.PHONY: help install demo test test-cpp lint format bench clean

help:
	@echo 'make install   set up .venv (builds the extension)'
	@echo 'make demo      a bundled model reads 8 KB of text, writes on and looks things up in it'
	@echo 'make test      the test suite, some 13 minutes on 2 cores; TESTS=tests/cli for a part of it'
	@echo 'make test-cpp  the C++ tests: plain, address and undefined, thread sanitizer'
	@echo 'make lint      ruff, mypy --strict, clang-format'
	@echo 'make format    let ruff and clang-format rewrite what they can'
	@echo 'make bench     all benchmarks, quick (benchmarks/suite.py runs them at full size)'

install:
	@$(SETUP)

demo:
	@$(SETUP) && exec $(BIN)/wscope demo

# Two processes hold some 4 GB each. Whoever is done first takes from the end of what the other has still to do: a module
# stays in one process, as far as that goes, which compiles its programs once.
test:
	@$(SETUP) && exec $(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

test-cpp:
	@tools/test_cpp

lint:
	@$(SETUP) --lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/*.py
	$(BIN)/clang-format --dry-run -Werror $$(find ffi benchmarks -name '*.h' -o -name '*.cc')
	$(CXX) -std=c++17 -O2 -Wall -Wextra -Werror -mavx512f -fsyntax-only benchmarks/reading_order.cc

format:
	@$(SETUP) --lint
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find ffi benchmarks -name '*.h' -o -name '*.cc')

bench:
	@$(SETUP) && exec $(BIN)/python benchmarks/suite.py --quick

clean:
	rm -rf .venv build .pytest_cache .ruff_cache .mypy_cache
