.DEFAULT_GOAL := help
.PHONY: help setup check test bench bench-data bench-decode prove-kills vllm demo report clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## .venv with the exact versions of constraints.txt
	@bash scripts/setup.sh

check: setup ## ruff and mypy, no tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: ## every check and every test (under 15 minutes)
	bash scripts/test.sh

demo: ## the whole line on the embedded target: answers, two heads, evaluation, export (under 25 minutes)
	bash scripts/quickstart.sh

bench: setup ## measure the heads of the last `make demo` again: acceptance, speed, report
	rm -rf outputs/eval/bench
	.venv/bin/python -m eval experiment=quickstart/eval name=bench

bench-data: setup ## speed and memory of the data stage for 10,000 and 100,000 conversations (about 15 minutes)
	.venv/bin/python -m scripts.bench_data

prove-kills: setup ## kill -9 at random moments of regeneration and capture, resumed to the same bytes (minutes)
	.venv/bin/python -m scripts.prove_kills --out docs/proofs/kills.txt

bench-decode: setup ## our decoding loop beside transformers' own: ratios with their spread (about 8 minutes)
	.venv/bin/python -m scripts.bench_decode

vllm: setup ## .venv-vllm with vLLM for CPU, and the proof that it reads our folders as meant (about 10 minutes)
	bash scripts/vllm.sh

report: ## where the HTML reports are, newest first
	@ls -1t outputs/eval/*/report.html 2>/dev/null || echo "no report yet: make demo"

clean: ## remove outputs/ and the tools' caches; .venv stays
	rm -rf outputs multirun wandb .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
