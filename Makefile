# Each target runs in .venv, which the first one creates; `make test PYTHON=python3.12` uses another interpreter.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Names or patterns of the models of `make timm-suite`, and options of pytest: make test PYTEST_ARGS='-m "not slow"'
MODELS ?= aft_*
PYTEST_ARGS ?=
# Tests that run at a time, with one thread each
JOBS ?= 2
# Folders of tests that `make distributed` and `make package` run
IGNORED := --ignore=tests/distributed --ignore=tests/standalone
# Plugins of pytest that no test of `make test` needs; together they take half a millisecond of each
UNUSED := -p no:anyio -p no:hypothesispytest -p no:timeout
# Seconds and options of `make fuzz`: make fuzz SECONDS=60 FUZZ_ARGS='--operator aft_full --backend cpp'
SECONDS ?= 600
FUZZ_ARGS ?=
# Options of pytest for `make gpu`: make gpu GPU_ARGS='-n 8'
GPU_ARGS ?=
# Names of runtimes, or options, of `make runtimes`
RUNTIMES ?=
# A photograph for the packaged weights, which know 210 classes of ImageNet
PHOTO ?= tests/assets/clothing/validation/shoes/5e577f40-dd22-4b40-9827-ce6cae5ac3fd.jpg
WEIGHTS := aft_pyramid_pico
# make package EMPTY=1 downloads every dependency of the wheel, of which PyTorch is gigabytes
EMPTY ?=

# The oldest torch and timm that pyproject.toml takes, for `make oldest`, and the torchvision of that torch
OLDEST := torch==2.7.1 torchvision==0.22.1 timm==1.0.31
OLDEST_VENV := .venv-oldest

# Debian's packages to build FFCV with
FFCV_LIBRARIES := libopencv-dev libturbojpeg0-dev pkg-config
FFCV_STAMP := $(VENV)/.ffcv
# Bytecode is kept even where the environment forbids it: tests start a hundred processes, which would each compile ours
export PYTHONDONTWRITEBYTECODE :=
SANITIZE := -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all

SHELL := bash

.PHONY: install ffcv test oldest distributed sanitize fuzz kernels lint gpu timm-suite runtimes demo results docs findings package clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@echo 'Installing into $(VENV); PyTorch is large, so this takes a few minutes'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -e '.[dev]'
	touch $@

# FFCV, if it can be built; otherwise its tests are skipped with a reason
ffcv: $(STAMP)
	@test -e $(FFCV_STAMP) || { pkg-config --exists opencv4 libturbojpeg; } 2>/dev/null \
	|| { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y --no-install-recommends $(FFCV_LIBRARIES); } \
	>/dev/null 2>&1 || echo 'FFCV needs: apt-get install $(FFCV_LIBRARIES)'
	@test -e $(FFCV_STAMP) || { $(PY) -m pip install --quiet -e '.[ffcv]' && touch $(FFCV_STAMP); } \
	|| echo 'FFCV cannot be built here: its tests will be skipped'

test: ffcv
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal $(UNUSED) $(IGNORED) $(PYTEST_ARGS)

# Operations, layers and models with the oldest torch and timm, in a folder of its own; no extra is installed
oldest:
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet $(OLDEST) -e . 'pytest<9.3' pytest-timeout hypothesis 'setuptools>=77' numpy
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/ops tests/layers tests/models tests/test_registry.py

# Training in several processes, killed and restarted, also on two nodes: a file of tests at a time in each worker.
# FFCV's own loader is compiled here alone; `make test` interprets it.
distributed: ffcv
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS) tests/distributed
	NUMBA_DISABLE_JIT=0 OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS) tests/data/test_ffcv.py -k ffcv_reads_what_is_written

# The C++ kernels, built for AddressSanitizer and UndefinedBehaviorSanitizer, and their tests. torch throws exceptions of
# its own, for which the library of C++ must be loaded as early as the sanitizer; Python never frees all its memory.
sanitize: $(STAMP)
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.cache/sanitize CXX='$(CXX) $(SANITIZE)' ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	OMP_NUM_THREADS=2 $(PY) -m pytest -p no:cacheprovider tests/ops -m cpp $(PYTEST_ARGS)

# The C++ kernels for every set of instructions, with the compiler's warnings as errors, and how each runs here
kernels: $(STAMP)
	$(PY) tests/instructions.py

lint: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

# Random inputs for every operator and backend, against float64
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) tests/fuzz.py --seconds $(SECONDS) $(FUZZ_ARGS)

# The tests that need a GPU, of every kernel against float64 too, then the goals of speed there
gpu: $(STAMP)
	$(PY) -m tools.verify_gpu --thorough $(GPU_ARGS)
	$(PY) -m tools.benchmark goals --rows 17 18

# timm's own tests/test_models.py on our models
timm-suite: $(STAMP)
	$(PY) tests/run_timm_suite.py $(foreach model,$(MODELS),'$(model)')

# Exported files in the runtimes of others, each in an environment of its own; continues after an interruption, for hours.
# make runtimes RUNTIMES='--again opencv tvm'
runtimes: $(STAMP)
	$(PY) tests/runtimes/run.py $(RUNTIMES)

# The classes of a photograph (PHOTO=FILE) by packaged weights, also on a page; then these weights
# fine-tuned on the embedded photographs of clothing (ten classes), the accuracy at three image sizes, and the report
demo: $(STAMP)
	$(PY) -m tools.predict '$(PHOTO)' --model $(WEIGHTS) --top 3
	rm -rf runs/demo/photo && mkdir -p runs/demo/photo && cp '$(PHOTO)' runs/demo/photo
	$(PY) -m tools.report --checkpoint $(WEIGHTS) --images runs/demo/photo --max-images 1 --average-images 16 \
	--max-heads 8 --out runs/demo/pretrained.html
	$(PY) -m train.imagenet --config configs/finetune.yaml data.dir=tests/assets/clothing run.dir=runs/demo run.overwrite=true
	$(PY) -m tools.eval_resolution --checkpoint runs/demo --data tests/assets/clothing --sizes 64 96 128
	$(PY) -m tools.report --checkpoint runs/demo --only biases
	$(PY) -m tools.report --checkpoint runs/demo --images tests/assets/clothing/validation
	@echo
	@echo 'Everything is in runs/demo. Look at:'
	@echo '  runs/demo/curves.png             loss and accuracy by epoch'
	@echo '  runs/demo/eval_resolution.png    accuracy at sizes that it was not trained at'
	@echo '  runs/demo/biases.png             what the position biases have become'
	@echo '  runs/demo/report.html            these, each class, the worst photographs and four answers'
	@echo '  runs/demo/pretrained.html        the photograph and the answer of the packaged weights'
	@echo 'Try next:'
	@echo '  $(PY) -m train.imagenet --config configs/finetune.yaml run.dir=runs/tuned data.dir=YOUR_IMAGES'
	@echo '  $(PY) -m train.imagenet --config configs/smoke/clothing_demo.yaml run.dir=runs/scratch'
	@echo '  $(PY) -c "import aft_vision, timm; print(timm.create_model('"'local-dir:runs/demo/export'"', pretrained=True))"'

# The tables and pictures of the pages in docs/results, from docs/results/data
results: $(STAMP)
	$(PY) docs/results/build.py

# The site of README.md and docs/, with the keys of configs, the commands and the Python API, in build/site
docs: $(STAMP)
	$(PY) -m pip install --quiet -e '.[docs]'
	$(PY) docs/make_site.py
	@echo 'Open build/site/index.html, or serve it: $(PY) -m http.server --directory build/site'

# The surprises of other tools, in findings/: a line each. They share an environment; make findings PY=INTERPRETER makes none
findings:
	@set -o pipefail; place=$$(mktemp -d); trap 'rm -rf "$$place"' EXIT; export ENVIRONMENT=$$place/environment; \
	for each in findings/*.sh; do \
	said="$$($(if $(findstring file,$(origin PY)),,PY='$(PY)') $$each 2>/dev/null | tail -1)" && echo "as written: $$(basename $$each .sh): $$said" \
	|| { echo "CHANGED: $$(basename $$each .sh): $$said"; failed=1; }; done; test -z "$$failed"

# The sdist, the wheel from it, and a wheel for this platform with compiled kernels, in dist/. Each is tried in an empty
# environment, the second where there is no compiler: it is its only package, the checkout is not on the path, and the
# dependencies of aft_vision (torch, timm, ...) are read from $(VENV), without the editable package of $(VENV). EMPTY=1
# installs the dependencies too, as a user does. Then exported folders are loaded where this package and timm are not
# installed, and models where the extras are not.
package: $(STAMP)
	rm -rf dist build/lib
	$(PY) -m build --quiet --outdir dist
	AFT_WHEEL_KERNELS=1 $(PY) -m build --quiet --wheel --outdir dist
	$(PY) -m twine check --strict dist/*
	for each in dist/*.whl; do $(PY) tests/try_wheel.py $(if $(EMPTY),--dependencies) $$each || exit 1; done
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS) tests/standalone

clean:
	rm -rf $(VENV) $(OLDEST_VENV) dist .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build *.egg-info runs/demo
