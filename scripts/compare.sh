#!/usr/bin/env bash
# Every head on the same answers of SmolLM2-135M, once through in the same order (seed 0), then measured side by side.
#
#   bash scripts/compare.sh            # hours on 2 CPU cores; the same command goes on after an interruption
#   OUTPUTS=/big/disk bash scripts/compare.sh
#
# Needs the answers in ../shared/data/answers. Results and what they say: docs/comparison.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
outputs="${OUTPUTS:-outputs}"

stage() { .venv/bin/python -m "$@" "outputs=$outputs"; }
head() { # NAME SETTINGS...: one head of the comparison
  local name="$1"
  shift
  stage train experiment=compare/train "name=compare-$name" "$@"
}

medusa=(head=medusa head.num_heads=4)
eagle1=(head=eagle1 head.num_kv_heads=9 'train.loss.feature={smooth_l1: 1.0}' 'train.loss.terms={kl: 0.1}')
eagle3=(head=eagle3 head.num_kv_heads=9 head.ttt_steps=4 train.eval_rows=54)
mtp=(head=mtp head.num_kv_heads=9 head.train_steps=4)
mlp=(head=mlp head.num_heads=4)
lstm=(head=lstm head.num_heads=4)
block=(head=block head.num_kv_heads=9 'head.taps=[2,8,15,21,27]')

answers=../shared/data/answers/smollm2-135m-train-t07

stage data experiment=compare/data

head eagle3 "${eagle3[@]}"
head eagle1 "${eagle1[@]}"
head medusa "${medusa[@]}"
head mtp "${mtp[@]}"
head mlp "${mlp[@]}"
head lstm "${lstm[@]}"
head block "${block[@]}"
head hass "${eagle1[@]}" head.train_steps=4

# the loss that is the acceptance at T = 1 itself
head eagle3-alpha "${eagle3[@]}" 'train.loss.terms={neg_log_alpha: 1.0}'

# where the heads start; docs/comparison.md compares these at step 302
head eagle3-random "${eagle3[@]}" head.init=random
head eagle3-target "${eagle3[@]}" head.init=target
head block-random "${block[@]}" head.init=random
head eagle1-target "${eagle1[@]}" head.init=target
head mtp-target "${mtp[@]}" head.init=target
head mlp-target "${mlp[@]}" head.init=target
head lstm-target "${lstm[@]}" head.init=target
head medusa-own "${medusa[@]}" head.shared_lm_head=false
head medusa-own-random "${medusa[@]}" head.shared_lm_head=false head.init=random

# the two leading heads on twice as many tokens
stage data experiment=compare/more
stage data experiment=compare/data2
twice=("dataset=$outputs/data/compare2" target.dtype=bfloat16 train.steps=1288 train.eval_every=644 train.save_every=644)
head eagle3-2x "${eagle3[@]}" "${twice[@]}"
head mlp-2x "${mlp[@]}" "${twice[@]}"

# and on three times as many, of which as many as compare/data has are answers to our own questions
stage data experiment=compare/more name=compare-more3 data.limit=1100
stage data experiment=compare/data2 name=compare3 \
  "data.source=[$answers.jsonl,$answers-more.jsonl,$outputs/data/compare-more3/train.jsonl]"
thrice=("dataset=$outputs/data/compare3" target.dtype=bfloat16 train.steps=1678 train.eval_every=839 train.save_every=839)
head eagle3-3x "${eagle3[@]}" "${thrice[@]}"
head mlp-3x "${mlp[@]}" "${thrice[@]}"

stage eval experiment=compare/eval
stage eval experiment=compare/variants
