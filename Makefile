# `make demo` and `make test` work on a fresh clone; each installs what it needs into .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
TORCH := 2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
# The stamp keeps the index that torch came from: the build that was asked for last stays, and asking for another
# installs again. To pip they are one version, so that it has to be forced.
KEPT := $(shell cat $(STAMP) 2>/dev/null)
TORCH_INDEX ?= $(if $(KEPT),$(patsubst index=%,%,$(KEPT)),$(CPU_INDEX))

.PHONY: install demo test check format latest oldest clean

install: $(STAMP)

ifneq ($(KEPT),index=$(TORCH_INDEX))
.PHONY: $(STAMP)
PIP_TORCH := $(PIP) install --no-compile --no-deps --force-reinstall "torch==$(TORCH)"
else
PIP_TORCH := $(PIP) install --no-compile --no-deps "torch==$(TORCH)"
endif

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "corolla needs Python 3.11 or newer; say: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# torch by itself and first, the pinned CPU build: an unpinned torch fetches gigabytes of CUDA.
	@# A wheel in a local wheelhouse of pip's configuration is taken first; TORCH_INDEX= asks PyPI alone (CUDA on Linux).
	$(if $(filter $(CPU_INDEX),$(TORCH_INDEX)),@$(PIP_TORCH) --no-index >/dev/null 2>&1 || )$(PIP_TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install --no-compile -c constraints.txt -e ".[dev]"
	@# pip would compile on one core. What does not compile (templates, other Pythons' code) is imported by nobody.
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@echo "index=$(TORCH_INDEX)" > $(STAMP)

demo: $(STAMP)
	@$(BIN)/corolla demo

check: $(STAMP)
	@$(BIN)/python tools/run_checks.py check

test: $(STAMP)
	@$(BIN)/python tools/run_checks.py test

latest: $(STAMP)
	@$(BIN)/python tools/latest.py

oldest: $(STAMP)
	@$(BIN)/python tools/oldest.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info
