#!/usr/bin/env bash
# The whole line on the embedded target, SmolLM2-135M-Instruct: prompts, its own answers, two draft heads, a measured
# report, an exported folder. No Hub, no GPU; at most 25 minutes on 2 CPU cores after the install.
#
#   bash scripts/quickstart.sh                # uses the answers that lie in the repository
#   bash scripts/quickstart.sh --regenerate   # has the target answer the prompts anew
#   bash scripts/quickstart.sh --fast         # the same line with few prompts and steps, under 4 minutes
#
# Run it again after an interruption: a stage whose manifest fits is skipped, the one that was cut goes on. OUTPUTS=folder
# writes elsewhere than to outputs/.
set -euo pipefail

usage() {
  echo "usage: bash scripts/quickstart.sh [--fast] [--regenerate]" >&2
}

line=quickstart
outputs="$(realpath -m "${OUTPUTS:-$(dirname "${BASH_SOURCE[0]}")/../outputs}")"
answers=()
while [ $# -gt 0 ]; do
  case "$1" in
    --fast) line=quickstart_fast ;;
    --regenerate) answers=(data.answers=null) ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      echo "error: unknown flag '$1'" >&2
      usage
      exit 2
      ;;
  esac
  shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

stage() {
  printf '\n== python -m %s\n' "$*" >&2
  .venv/bin/python -m "$@" "outputs=$outputs"
}

{
  stage data "experiment=$line/data" ${answers[@]+"${answers[@]}"}
  stage train "experiment=$line/medusa"
  stage train "experiment=$line/eagle3"
} >&2
# The evaluation prints its table, then one line of JSON for programs.
mkdir -p "$outputs/eval"
stage eval "experiment=$line/eval" | tee "$outputs/eval/$line.out" | grep --line-buffered -v '^{"rows"' || [ "${PIPESTATUS[0]}" -eq 0 ]
stage scripts.export "experiment=$line/export"

echo
echo "report: $outputs/eval/$line/report.html"
echo "head for vLLM and SGLang: $outputs/export/$line"
