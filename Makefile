# Every target makes .venv and installs what it needs; stamps inside .venv make the next run start at once.
#
#   make PYTHON=/path/to/python3.12 demo     chooses the interpreter of a new .venv

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
PY := $(VENV)/bin/python
PINS := constraints/main.txt
PYTHON ?=

# What each stage adds. pip resolves every stage against the same pins, so the stages can come in any order.
DEMO := -e '.[demo,torch]'
TEST := -e '.[demo,torch,jax,keras,lightning,accelerate,onnx]' --group test --group jax --group keras
LINT := $(TEST) --group lint
DOCS := -e . --group docs

.PHONY: help
help: ## show this list (the default)
	@echo 'gradscale: make <target>'
	@sed -n -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 14

.PHONY: demo
demo: $(VENV)/.stage-demo ## train small networks in FP16 with and without loss scaling
	@$(VENV)/bin/gradscale demo

.PHONY: test
test: $(VENV)/.stage-test ## run the tests and the doctests, without the slow ones
	@$(PY) -m pytest -q -m 'not slow' $(ARGS)

.PHONY: test-slow
test-slow: $(VENV)/.stage-test ## run the slow tests
	@$(PY) -m pytest -q -m slow $(ARGS) || { code=$$?; [ $$code -eq 5 ] || exit $$code; } # 5: there are none

.PHONY: lint
lint: $(VENV)/.stage-lint ## check style (ruff), formatting (ruff format) and types (pyright)
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m pyright

.PHONY: format
format: $(VENV)/.stage-lint ## fix what ruff can fix, and format
	@$(PY) -m ruff check --fix
	@$(PY) -m ruff format

.PHONY: docs
docs: $(VENV)/.stage-docs ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet # the variable silences a notice of the theme's
	@echo 'docs: open site/index.html'

.PHONY: bench
bench: $(VENV)/.stage-test ## run the benchmarks; write their figures and plots (minutes, 7 GB of memory)
	@$(PY) benchmarks/run.py --json benchmarks/results.json --markdown benchmarks/README.md \
	  --plot docs/images/benchmarks.png --growth docs/images/step_growth.png $(ARGS)

.PHONY: bench-quick
bench-quick: $(VENV)/.stage-test ## run the benchmarks in under a minute, roughly; write nothing
	@$(PY) benchmarks/run.py --quick $(ARGS)

.PHONY: pins
pins: $(VENV)/.stage-lint $(VENV)/.stage-docs ## write the versions installed in .venv to constraints/main.txt
	@{ sed -n '/^#/p' $(PINS); $(PY) -m pip freeze --all --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//'; } > $(PINS).new
	@mv $(PINS).new $(PINS)

.PHONY: clean
clean: ## remove what the other targets made, except .venv
	@rm -rf site build dist .pytest_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.PHONY: distclean
distclean: clean ## remove .venv as well
	@rm -rf $(VENV)

$(VENV)/.stage-demo: EXTRA = $(DEMO)
$(VENV)/.stage-test: EXTRA = $(TEST)
$(VENV)/.stage-lint: EXTRA = $(LINT)
$(VENV)/.stage-docs: EXTRA = $(DOCS)

# pip's whole output goes to the log; the screen gets the names as they are resolved, and the end of the log on failure.
$(VENV)/.stage-%: pyproject.toml $(PINS) | $(VENV)/.stage-venv
	@echo 'installing what `make $*` needs into $(VENV) (only when pyproject.toml or the pins are new)'
	@$(PY) -m pip install -c $(PINS) $(EXTRA) 2>&1 | tee $(VENV)/install.log | while IFS= read -r line; do \
	  case "$$line" in \
	    'Collecting '*) name=$${line#Collecting }; printf '%s ' "$${name%%[^A-Za-z0-9._-]*}"; named=1 ;; \
	    'Processing '*.whl*) name=$${line##*/}; printf '%s ' "$${name%%-*}"; named=1 ;; \
	    *Downloading*\([0-9][0-9][0-9]*' MB)'*) size=$${line##*\(}; printf '(%s ' "$$size" ;; \
	    'Installing collected'*) [ -z "$${named:-}" ] || printf '\nunpacking...\n' ;; \
	  esac; \
	done || { printf '\n'; tail -n 30 $(VENV)/install.log; echo 'installing failed; all of it: $(VENV)/install.log'; exit 1; }
	@touch $@

# Each candidate is run, not only looked up: a pyenv shim may be on the PATH with no such Python behind it.
$(VENV)/.stage-venv:
	@seen=; for python in $(if $(PYTHON),'$(PYTHON)',python3.11 python3 python3.12 python3.13); do \
	  version=$$("$$python" --version 2>/dev/null) || continue; \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then found=$$python; break; fi; \
	  seen="$$seen $$python is $$version;"; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "gradscale needs Python 3.11 or newer. Found:$${seen:- none;} install one, or name it: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	echo "making $(VENV) with $$version"; \
	"$$found" -m venv $(VENV) || { echo 'the venv module failed; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@$(PY) -m pip install -qq -c $(PINS) --upgrade pip
	@touch $@
