# Every target makes .venv and installs what it needs; stamps inside .venv make the next run start at once.
# MXNet, which needs an old numpy, has an environment of its own: .venv-mxnet, made when its tests or its demo are run.
# So have Ray, for one example, DeepSpeed, for one test, optimizers of other packages, and W&B and MLflow, for two tests:
# .venv-ray, .venv-deepspeed, .venv-optimizers and .venv-loggers, made by `make test-slow`.
#
#   make PYTHON=/path/to/python3.12 demo     chooses the interpreter of a new .venv
#   make test ARGS='-k headroom'             chooses among the tests, those of MXNet left out; for them: make test-mxnet
#   make test-matrix ROWS='torch-2.6'        chooses among the environments that are made, tested and deleted

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
PY := $(VENV)/bin/python
MXNET := .venv-mxnet
MXNET_PY := $(MXNET)/bin/python
RAY := .venv-ray
DEEPSPEED := .venv-deepspeed
OPTIMIZERS := .venv-optimizers
LOGGERS := .venv-loggers
PYTHON ?=
WORKERS ?= 2 # of the tests; each takes up to 5 GB of memory
DEVICE ?= sim # where the tests of PyTorch run besides the CPU
ROWS ?= # of the matrix: all

# What each stage adds. pip resolves every stage against the same pins, so the stages can come in any order.
DEMO := -e '.[cli,demo,torch]'
TEST := -e '.[cli,demo,torch,jax,keras,onnx,lightning,accelerate,transformers]' --group test --group docs --group jax --group keras --group trainers --group events --group triton
LINT := $(TEST) --group lint
DOCS := -e . --group docs
MATRIX := --group matrix
DIST := --group dist
ONLY_MXNET := -e '.[cli,demo,mxnet]' --group test
ONLY_RAY := -e '.[torch]' --group test --group ray
ONLY_DEEPSPEED := -e '.[torch]' --group test --group deepspeed
ONLY_OPTIMIZERS := -e '.[torch]' --group test --group optimizers
ONLY_LOGGERS := -e . --group test --group loggers

# What is tested in the environment of MXNet. A requested adapter that does not load fails the run.
MXNET_TESTS := tests/mxnet tests/conformance tests/numpy tests/peers/test_other_rules.py tests/demo/test_mxnet_demo.py src/gradscale/mxnet
MXNET_PYTEST := GRADSCALE_ADAPTERS=mxnet,numpy $(MXNET_PY) -m pytest -q $(MXNET_TESTS)

.PHONY: help
help: ## show this list (the default)
	@echo 'gradscale: make <target>'
	@sed -n -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 18

.PHONY: demo
demo: $(VENV)/.stage-demo ## train small networks in FP16 with and without loss scaling
	@$(PY) -m examples.demo

.PHONY: demo-mxnet
demo-mxnet: $(MXNET)/.stage-test-mxnet ## train a small network in MXNet, likewise
	@$(MXNET_PY) -m examples.demo --framework mxnet

.PHONY: test
test: test-main $(if $(ARGS),,test-device test-mxnet) ## run the tests and the doctests, without the slow ones

.PHONY: test-main
test-main: $(VENV)/.stage-test ## run all of them but those of MXNet
	@$(PY) -m pytest -q -m 'not slow' -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: test-device
test-device: $(VENV)/.stage-test ## run those of PyTorch on DEVICE: sim, a simulated accelerator, or cuda
	@$(PY) -m tests.torch.on_device --device $(DEVICE) --workers $(WORKERS) -m 'not slow' $(ARGS)

.PHONY: test-mxnet
test-mxnet: $(MXNET)/.stage-test-mxnet ## run those of MXNet, in their own environment
	@$(MXNET_PYTEST) -m 'not slow' $(ARGS)

.PHONY: test-slow
test-slow: test-slow-main $(if $(ARGS),,test-ray test-deepspeed test-optimizers test-loggers) ## run the slow tests, the example of Ray Train, DeepSpeed's engine, other optimizers, W&B and MLflow

.PHONY: test-slow-main
test-slow-main: $(VENV)/.stage-test $(if $(ARGS),,$(MXNET)/.stage-test-mxnet) ## run the slow tests
	@$(PY) -m pytest -q -m 'slow and not soak' $(ARGS) || { code=$$?; [ $$code -eq 5 ] || exit $$code; } # 5: there are none
	@$(if $(ARGS),,$(MXNET_PYTEST) -m slow)

.PHONY: test-soak
test-soak: $(VENV)/.stage-test ## train for 2,000 steps on many ranks with faults on single ones (most of an hour)
	@$(PY) -m pytest -q -m soak $(ARGS)

.PHONY: test-ray
test-ray: $(RAY)/.stage-test-ray ## run the example of Ray Train, in its own environment
	@$(RAY)/bin/python -m pytest -q tests/examples/test_ray.py

.PHONY: test-deepspeed
test-deepspeed: $(DEEPSPEED)/.stage-test-deepspeed ## compare the preset and checkpoints with DeepSpeed's engine, in its own environment
	@$(DEEPSPEED)/bin/python -m pytest -q tests/peers/test_deepspeed_engine.py

.PHONY: test-optimizers
test-optimizers: $(OPTIMIZERS)/.stage-test-optimizers ## run optimizers of other packages with every scaler, in their own environment
	@$(OPTIMIZERS)/bin/python -m pytest -q tests/torch/optimizers

.PHONY: test-loggers
test-loggers: $(LOGGERS)/.stage-test-loggers ## record runs to W&B and MLflow and read them back, in their own environment
	@$(LOGGERS)/bin/python -m pytest -q tests/recording/test_loggers.py

.PHONY: test-other-cpu
test-other-cpu: $(VENV)/.stage-test ## run the tests as on a CPU without vector instructions beyond the baseline
	@$(PY) -m tests.other_cpu -q -m 'not slow' -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: test-matrix
test-matrix: $(VENV)/.stage-matrix ## run the adapters' tests on the lowest and newest versions; write docs/reference/versions.md
	@$(PY) -m tests.matrix --workers $(WORKERS) $(if $(ALLOW_MISSING),--allow-missing) $(ROWS) $(if $(ARGS),-- $(ARGS))

.PHONY: matrix-pins
matrix-pins: $(VENV)/.stage-matrix ## resolve the versions of the matrix anew, into constraints/matrix/
	@$(PY) -m tests.matrix --pin $(ROWS)

.PHONY: dist
dist: $(VENV)/.stage-dist ## build wheel and source distribution into dist/, check and install them, run a smoke test
	@$(PY) -m tests.package

.PHONY: lint
lint: $(VENV)/.stage-lint ## check style and format (ruff), spelling (codespell), imports (import-linter) and types (pyright)
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(VENV)/bin/codespell
	@$(VENV)/bin/lint-imports
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
	@$(PY) -m benchmarks.run --json benchmarks/results.json --markdown benchmarks/README.md \
	  --plot docs/images/benchmarks.png --growth docs/images/step_growth.png $(ARGS)

.PHONY: bench-quick
bench-quick: $(VENV)/.stage-test ## run the benchmarks in under a minute, roughly; write nothing
	@$(PY) -m benchmarks.run --quick $(ARGS)

.PHONY: study
study: $(VENV)/.stage-test ## train small models with every policy; continues benchmarks/study/results.json (hours)
	@$(PY) -m benchmarks.study $(ARGS)

.PHONY: pins
pins: $(VENV)/.stage-lint $(VENV)/.stage-docs $(VENV)/.stage-dist $(MXNET)/.stage-test-mxnet $(RAY)/.stage-test-ray $(DEEPSPEED)/.stage-test-deepspeed $(OPTIMIZERS)/.stage-test-optimizers $(LOGGERS)/.stage-test-loggers ## write the installed versions to constraints/
	@for pair in $(VENV):main $(MXNET):mxnet $(RAY):ray $(DEEPSPEED):deepspeed $(OPTIMIZERS):optimizers $(LOGGERS):loggers; do \
	  pins=constraints/$${pair#*:}.txt; \
	  { sed -n '/^#/p' $$pins; $${pair%:*}/bin/python -m pip freeze --all --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//'; } > $$pins.new; \
	  mv $$pins.new $$pins; \
	done

.PHONY: clean
clean: ## remove what the other targets made, except the environments
	@rm -rf site build dist .pytest_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.PHONY: distclean
distclean: clean ## remove the environments as well
	@rm -rf $(VENV) $(MXNET) $(RAY) $(DEEPSPEED) $(OPTIMIZERS) $(LOGGERS) .venv-matrix

$(VENV)/.stage-demo: EXTRA = $(DEMO)
$(VENV)/.stage-test: EXTRA = $(TEST)
$(VENV)/.stage-lint: EXTRA = $(LINT)
$(VENV)/.stage-docs: EXTRA = $(DOCS)
$(VENV)/.stage-matrix: EXTRA = $(MATRIX)
$(VENV)/.stage-dist: EXTRA = $(DIST)
$(MXNET)/.stage-test-mxnet: EXTRA = $(ONLY_MXNET)
$(RAY)/.stage-test-ray: EXTRA = $(ONLY_RAY)
$(DEEPSPEED)/.stage-test-deepspeed: EXTRA = $(ONLY_DEEPSPEED)
$(OPTIMIZERS)/.stage-test-optimizers: EXTRA = $(ONLY_OPTIMIZERS)
$(LOGGERS)/.stage-test-loggers: EXTRA = $(ONLY_LOGGERS)

# What the recipes below need to know of an environment. For MXNet no newer Python will do: it needs numpy 1.23.
$(VENV)/.stage-%: PINS = constraints/main.txt
$(VENV)/.stage-venv: CANDIDATES = $(if $(PYTHON),'$(PYTHON)',python3.11 python3 python3.12 python3.13 python3.14)
$(VENV)/.stage-venv: SUITS = sys.version_info >= (3, 11)
$(VENV)/.stage-venv: NEEDS = gradscale needs Python 3.11 or newer
$(MXNET)/.stage-%: PINS = constraints/mxnet.txt
$(MXNET)/.stage-venv: CANDIDATES = $(if $(PYTHON),'$(PYTHON)') python3.11 python3
$(MXNET)/.stage-venv: SUITS = sys.version_info[:2] == (3, 11)
$(MXNET)/.stage-venv: NEEDS = MXNet 1.9.1 needs Python 3.11 (all other tests: make test-main)

$(RAY)/.stage-%: PINS = constraints/ray.txt
$(RAY)/.stage-venv: CANDIDATES = $(if $(PYTHON),'$(PYTHON)') python3.11 python3 python3.12 python3.13
$(RAY)/.stage-venv: SUITS = (3, 11) <= sys.version_info < (3, 14)
$(RAY)/.stage-venv: NEEDS = Ray 2.60 needs Python 3.11 to 3.13 (all other tests: make test-main)

$(DEEPSPEED)/.stage-%: PINS = constraints/deepspeed.txt
$(DEEPSPEED)/.stage-venv: CANDIDATES = $(if $(PYTHON),'$(PYTHON)') python3.11 python3 python3.12 python3.13
$(DEEPSPEED)/.stage-venv: SUITS = sys.version_info >= (3, 11)
$(DEEPSPEED)/.stage-venv: NEEDS = gradscale needs Python 3.11 or newer

$(OPTIMIZERS)/.stage-%: PINS = constraints/optimizers.txt
$(OPTIMIZERS)/.stage-venv: CANDIDATES = $(if $(PYTHON),'$(PYTHON)') python3.11 python3 python3.12 python3.13
$(OPTIMIZERS)/.stage-venv: SUITS = sys.version_info >= (3, 11)
$(OPTIMIZERS)/.stage-venv: NEEDS = gradscale needs Python 3.11 or newer

$(LOGGERS)/.stage-%: PINS = constraints/loggers.txt
$(LOGGERS)/.stage-venv: CANDIDATES = $(if $(PYTHON),'$(PYTHON)') python3.11 python3 python3.12 python3.13
$(LOGGERS)/.stage-venv: SUITS = sys.version_info >= (3, 11)
$(LOGGERS)/.stage-venv: NEEDS = gradscale needs Python 3.11 or newer

$(VENV)/.stage-%: pyproject.toml constraints/main.txt | $(VENV)/.stage-venv
	$(INSTALL)

$(MXNET)/.stage-%: pyproject.toml constraints/mxnet.txt | $(MXNET)/.stage-venv
	$(INSTALL)

$(RAY)/.stage-%: pyproject.toml constraints/ray.txt | $(RAY)/.stage-venv
	$(INSTALL)

$(DEEPSPEED)/.stage-%: pyproject.toml constraints/deepspeed.txt | $(DEEPSPEED)/.stage-venv
	$(INSTALL)

$(OPTIMIZERS)/.stage-%: pyproject.toml constraints/optimizers.txt | $(OPTIMIZERS)/.stage-venv
	$(INSTALL)

$(LOGGERS)/.stage-%: pyproject.toml constraints/loggers.txt | $(LOGGERS)/.stage-venv
	$(INSTALL)

# pip's whole output goes to the log; the screen gets the names as they are resolved, and the end of the log on failure.
define INSTALL
	@echo 'installing what `make $*` needs into $(@D) (only when pyproject.toml or the pins are new)'
	@$(@D)/bin/python -m pip install -c $(PINS) $(EXTRA) 2>&1 | tee $(@D)/install.log | while IFS= read -r line; do \
	  case "$$line" in \
	    'Collecting '*) name=$${line#Collecting }; printf '%s ' "$${name%%[^A-Za-z0-9._-]*}"; named=1 ;; \
	    'Processing '*.whl*) name=$${line##*/}; printf '%s ' "$${name%%-*}"; named=1 ;; \
	    *Downloading*\([0-9][0-9][0-9]*' MB)'*) size=$${line##*\(}; printf '(%s ' "$$size" ;; \
	    'Installing collected'*) [ -z "$${named:-}" ] || printf '\nunpacking...\n' ;; \
	  esac; \
	done || { printf '\n'; tail -n 30 $(@D)/install.log; echo 'installing failed; all of it: $(@D)/install.log'; exit 1; }
	@touch $@
endef

# Each candidate is run, not only looked up: a pyenv shim may be on the PATH with no such Python behind it.
$(VENV)/.stage-venv $(MXNET)/.stage-venv $(RAY)/.stage-venv $(DEEPSPEED)/.stage-venv $(OPTIMIZERS)/.stage-venv $(LOGGERS)/.stage-venv:
	@seen=; for python in $(CANDIDATES); do \
	  version=$$("$$python" --version 2>/dev/null) || continue; \
	  if "$$python" -c 'import sys; sys.exit(not ($(SUITS)))'; then found=$$python; break; fi; \
	  seen="$$seen $$python is $$version;"; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "$(NEEDS). Found:$${seen:- none;} install one, or name it: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	echo "making $(@D) with $$version"; \
	"$$found" -m venv $(@D) || { echo 'the venv module failed; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@$(@D)/bin/python -m pip install -qq -c $(PINS) --upgrade pip
	@touch $@
