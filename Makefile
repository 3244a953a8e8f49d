# Each target runs in .venv, which the first one makes; `make test PYTHON=python3.12` picks another interpreter for it.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Which models `make timm-suite` tests, as names or patterns, and what pytest gets: make test PYTEST_ARGS='-m "not slow"'
MODELS ?= aft_*
PYTEST_ARGS ?=
# How many tests run at a time, a thread each
JOBS ?= 2
# How long `make fuzz` runs, and for what: make fuzz SECONDS=60 FUZZ_ARGS='--operator aft_full --backend cpp'
SECONDS ?= 600
FUZZ_ARGS ?=
# What `make gpu` gets: make gpu GPU_ARGS='--data imagenette.tar --pieces a b'
GPU_ARGS ?=
# make package EMPTY=1 downloads every dependency of the wheel, of which PyTorch is gigabytes
EMPTY ?=

# What FFCV is built with, by Debian's names
FFCV_LIBRARIES := libopencv-dev libturbojpeg0-dev pkg-config
FFCV_STAMP := $(VENV)/.ffcv
SANITIZE := -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all

.PHONY: install ffcv test sanitize fuzz lint gpu timm-suite demo docs package clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@echo 'Installing into $(VENV); PyTorch is large, so this takes a few minutes'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -e '.[dev]'
	touch $@

# FFCV, where it can be built; elsewhere its tests are skipped, and say so
ffcv: $(STAMP)
	@test -e $(FFCV_STAMP) || { pkg-config --exists opencv4 libturbojpeg; } 2>/dev/null \
	|| { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y --no-install-recommends $(FFCV_LIBRARIES); } \
	>/dev/null 2>&1 || echo 'FFCV needs: apt-get install $(FFCV_LIBRARIES)'
	@test -e $(FFCV_STAMP) || { $(PY) -m pip install --quiet -e '.[ffcv]' && touch $(FFCV_STAMP); } \
	|| echo 'FFCV cannot be built here: its tests will be skipped'

test: ffcv
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# The C++ kernels, built for AddressSanitizer and UndefinedBehaviorSanitizer, and their tests. torch throws exceptions of
# its own, for which the library of C++ must be loaded as early as the sanitizer; Python never frees all its memory.
sanitize: $(STAMP)
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.cache/sanitize CXX='$(CXX) $(SANITIZE)' ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	OMP_NUM_THREADS=2 $(PY) -m pytest -p no:cacheprovider tests/ops -m cpp $(PYTEST_ARGS)

lint: $(STAMP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

# Drawn inputs of every operator and backend, against float64
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) tests/fuzz.py --seconds $(SECONDS) $(FUZZ_ARGS)

# All that is open on a GPU, in pieces that go on where they were stopped; the report is in build/gpu
gpu: ffcv
	$(PY) -m tools.gpu_report $(GPU_ARGS)

# timm's own tests/test_models.py on our models
timm-suite: $(STAMP)
	$(PY) tests/run_timm_suite.py $(foreach model,$(MODELS),'$(model)')

# A small AFT-conv on the embedded photographs (ten classes), its accuracy at three image sizes, what it has learned
demo: $(STAMP)
	$(PY) -m train.imagenet --config configs/smoke/clothing_demo.yaml run.dir=runs/demo run.overwrite=true
	$(PY) -m tools.eval_resolution --checkpoint runs/demo --data tests/assets/clothing --sizes 64 96 128
	$(PY) -m tools.visualize_bias --checkpoint runs/demo
	$(PY) -m tools.report --checkpoint runs/demo --images tests/assets/clothing/validation
	@echo
	@echo 'Everything is in runs/demo. Look at:'
	@echo '  runs/demo/curves.png             loss and accuracy by epoch'
	@echo '  runs/demo/eval_resolution.png    accuracy at sizes that it was not trained at'
	@echo '  runs/demo/position_biases.png    what the position biases have become'
	@echo '  runs/demo/report.html            these, the keys and the attention of four photographs on a page'
	@echo 'Try next:'
	@echo '  $(PY) -m train.imagenet --config configs/smoke/clothing_demo.yaml run.dir=runs/k3 model.kernel_size=3'
	@echo '  $(PY) -m train.imagenet --config configs/smoke/clothing_demo.yaml run.dir=runs/mine data.dir=YOUR_IMAGES'
	@echo '  $(PY) -c "import aft_vision, timm; print(timm.create_model('"'local-dir:runs/demo/export'"', pretrained=True))"'

# The site of README.md and docs/, with the keys of configs, the commands and the Python API, in build/site
docs: $(STAMP)
	$(PY) -m pip install --quiet -e '.[docs]'
	$(PY) docs/make_site.py
	@echo 'Open build/site/index.html, or serve it: $(PY) -m http.server --directory build/site'

# The sdist, and the wheel from it, in dist/. The wheel is tried in an environment that is empty: it is the one package
# installed there, the checkout is not on its path, and what `import aft_vision` needs (torch, timm, ...) is read from
# $(VENV), without the editable package that $(VENV) has. EMPTY=1 installs the dependencies there too, as a user does.
package: $(STAMP)
	rm -rf dist
	$(PY) -m build --quiet --outdir dist
	$(PY) -m twine check --strict dist/*
	$(PY) tests/try_wheel.py $(if $(EMPTY),--dependencies) dist/*.whl

clean:
	rm -rf $(VENV) dist .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build *.egg-info runs/demo
