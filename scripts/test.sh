#!/usr/bin/env bash
# Sets up .venv and runs every check: ruff, mypy, pytest (no network, no GPU, under 15 minutes on 2 cores).
#
#   bash scripts/test.sh                              # all of it
#   bash scripts/test.sh tests/test_config.py -k type # only pytest, with these arguments
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
bin=.venv/bin
# The tiny targets of the tests run fastest on one thread, and tests start processes of their own.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ $# -eq 0 ]; then
  "$bin/ruff" check .
  "$bin/ruff" format --check .
  "$bin/mypy"
  set -- --numprocesses 2 --dist worksteal  # a worker for each of the 2 cores it is measured on
fi
exec "$bin/python" -m pytest "$@"
