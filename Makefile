# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check

NODE   := node_modules/.installed

.PHONY: demo shell demo-reading test suite test-all soak test-gpu check browser postgresql bench bench-docs bench-gpu bench-gpu-long gpu-bundle format docs screenshots clean

# one call with everything that is wanted: each builds the package's metadata and resolves versions again. Python compiles
# the modules that are imported; pip would compile all of torch, which takes as long as unpacking it. The pip that comes with
# Python 3.11 takes twice as long as a new one. What Python compiles is kept, or every process would do it again
export PYTHONDONTWRITEBYTECODE :=
INSTALL = test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) && $(PIP) install --quiet --upgrade pip; } \
	&& $(PIP) install --quiet --no-compile -c constraints.txt

# reading needs only safetensors, numpy, typer, rich and pydantic
$(VENV)/.base: pyproject.toml constraints.txt
	$(INSTALL) -e .
	touch $@

# generating needs torch, diffusers and transformers; constraints.txt pins torch
$(VENV)/.generate: pyproject.toml constraints.txt
	$(INSTALL) -e ".[generate]"
	touch $(VENV)/.base $@

# tests run against the real libraries
$(VENV)/.dev: pyproject.toml constraints.txt
	$(INSTALL) -e ".[dev]"
	touch $(VENV)/.base $(VENV)/.generate $@

# the page: types, lint and browser tests; without npm they are skipped, with a line that says so. `npm ci` would refuse a
# registry that lacks the optional packages of other platforms
$(NODE): package.json package-lock.json
	command -v npm > /dev/null && npm install --no-save --ignore-scripts --no-audit --no-fund \
		|| { echo "npm installed nothing: the page is not checked"; mkdir -p node_modules; }
	touch $@

# as root a missing browser is installed; the page's tests skip without one, with the reason
browser:
	@command -v chromium > /dev/null || test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null \
		|| (apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium) || true

# the same for PostgreSQL's server, whose binaries Debian and Ubuntu put where only its own tools look
postgresql:
	@ls /usr/lib/postgresql/*/bin/initdb > /dev/null 2>&1 || command -v initdb > /dev/null \
		|| test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null \
		|| (apt-get update -qq && apt-get install -qq -y --no-install-recommends postgresql) || true

demo: $(VENV)/.generate
	@$(BIN)/inweave demo --out demo
	@echo "your own images: make shell opens a shell in which inweave is found; $(BIN)/inweave works without it"

# a shell in which `inweave` is found; leave it with exit
shell: $(VENV)/.generate
	@PATH="$(CURDIR)/$(BIN):$$PATH" VIRTUAL_ENV="$(CURDIR)/$(VENV)" $${SHELL:-sh}

demo-reading: $(VENV)/.base
	@$(BIN)/python examples/demo.py

# one worker per core, one thread per worker: threads that wait for each other's cores cost many times what they bring
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --durations=50

# a sample of what takes long: fuzzing, kills, launchers; minutes on two cores. mypy has one core to itself while the
# workers of pytest start
test:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/.dev $(NODE)
	@$(MAKE) --no-print-directory --jobs=2 check suite

suite: $(VENV)/.dev $(NODE)
	$(PYTEST)

# everything at full size
test-all: $(VENV)/.dev check browser postgresql
	$(PYTEST) --full

# kill -9 at any moment, over a hundred runs; `make test` does a few
soak: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --rounds 100

check: $(VENV)/.dev $(NODE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if test -x node_modules/.bin/tsc; then npm run --silent check; else echo "no npm packages: the page is not checked"; fi

format: $(VENV)/.dev $(NODE)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	if test -x node_modules/.bin/biome; then npm run --silent format; fi

bench: $(VENV)/.dev
	$(BIN)/python bench/reading.py

# docs/benchmarks.md and its charts, of the reports in docs/bench
bench-docs: $(VENV)/.dev
	$(BIN)/python tools/bench_page.py

# the guides and the Python API as one site with search: build/docs/index.html
$(VENV)/.docs: $(VENV)/.generate
	$(INSTALL) -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python tools/docs/build.py build/docs

# the screenshots of the page in docs/images
screenshots: $(VENV)/.dev $(NODE) browser
	$(BIN)/python tools/page_screenshots.py

# a machine with a GPU that can install nothing: packages go there in one archive (7 MB) and are unpacked there;
# pydantic's core is the one that is not pure Python, so it is that machine's
BUNDLE := .gpu-bundle
SITE   := $(BUNDLE)/site
PEERS  := $(BUNDLE)/peers
WHEELS := build/gpu-wheels
GPU_WHEELS := diffusers peft importlib_metadata zipp pytest pluggy iniconfig typer rich shellingham annotated-doc \
	markdown-it-py mdurl pygments click pytest-xdist execnet
PACK    = rm -rf $(1)/site && for wheel in $(1)/*.whl; do python3 -m zipfile -e $$wheel $(1)/site; done && \
	mkdir -p $(dir $(2)) && cd $(1) && python3 -c "import tarfile; tarfile.open('$(abspath $(2))', 'w:xz').add('site')"

# of cuDNN's frontend the graph API travels, without headers and the kernels of other GPUs
gpu-bundle: $(VENV)/.base
	rm -rf $(BUNDLE) $(WHEELS)
	$(PIP) download --quiet --no-deps -c constraints.txt -d $(WHEELS) $(GPU_WHEELS)
	$(PIP) download --quiet --only-binary=:all: --platform manylinux2014_x86_64 --python-version 312 -d $(WHEELS) pydantic
	$(PIP) download --quiet --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 --python-version 312 -d $(WHEELS) \
		"nvidia-cudnn-frontend>=1.32,<2"
	python3 tools/slim_wheel.py $(WHEELS)/nvidia_cudnn_frontend-*.whl \
		'^include/|^cudnn/(?!engines/|frost/|sdpa/)[^/]+/|^cudnn/sdpa/.*(/kernels/|sm[0-9]{2}|/api_dsl|/qat/|/compact_gqa/)'
	$(PIP) download --quiet --no-deps --only-binary=:all: --platform any -d $(WHEELS)/peers "torchao>=0.18,<0.19"
	$(PIP) download --quiet --no-deps --only-binary=:all: --platform manylinux_2_24_x86_64 --python-version 312 \
		-d $(WHEELS)/peers "bitsandbytes>=0.50,<0.51"
	python3 tools/slim_wheel.py $(WHEELS)/peers/bitsandbytes-*.whl 'libbitsandbytes_(?!cuda130|cpu)'
	$(call PACK,$(WHEELS),$(BUNDLE)/site.tar.xz)
	$(call PACK,$(WHEELS)/peers,$(PEERS)/site.tar.xz)

$(SITE):
	python3 -m tarfile -e $(BUNDLE)/site.tar.xz $(BUNDLE)

# optimizers to compare with, beside the rest: diffusers and PEFT import them wherever they find them, and are measured
# too. bitsandbytes' wheel has a library for every CUDA, 43 MB; that of CUDA 13.0 travels
$(PEERS)/site:
	python3 -m tarfile -e $(PEERS)/site.tar.xz $(PEERS)

# a process per core: none of them may start threads, or a pool of compilers, for all cores
test-gpu: $(SITE)
	OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONPATH=src:.:$(SITE) python3 -m pytest -p no:cacheprovider -n 14 --dist worksteal -rfE -q --tb=short --durations=20 tests/gpu

# figures of a GPU: `make bench-gpu FIGURES=docs/bench`, then `make bench-docs`
FIGURES := build/bench
MEASURE  = -PYTHONPATH=src:.:$(SITE) timeout -k 5 $(1) python3 -m inweave bench $(2) --json $(FIGURES)/$(3).json

bench-gpu: $(SITE)
	PYTHONPATH=src:.:$(SITE) python3 bench/figures.py $(FIGURES)

# what takes longer: peers compiled and recorded, their memory, optimizers beside other libraries, runs within limits of memory
bench-gpu-long: $(SITE) $(PEERS)/site
	mkdir -p $(FIGURES)
	$(call MEASURE,600,step --model sdxl --batch 1 --peers-compiled,step-sdxl-1)
	$(call MEASURE,600,step --model sdxl --batch 4 --peers-compiled,step-sdxl-4)
	$(call MEASURE,600,step --model flux1-dev --rank 16 --targets listed --compile on --peers-compiled,step-flux1-dev)
	$(call MEASURE,600,memory --model sdxl --batch 4,memory-sdxl-4)
	-PYTHONPATH=src:.:$(SITE):$(PEERS)/site python3 bench/optimizers.py
	-PYTHONPATH=src:.:$(SITE) python3 bench/training.py

clean:
	rm -rf $(VENV) node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
