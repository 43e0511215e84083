#!/usr/bin/env bash
# A stranger's hour: a model, a tokenizer, prompts, a reward, conversations and preferences of one's own, through every verb. Some minutes.
#
#     bash examples/own_task/hour.sh DIRECTORY     (README.md says what each command does)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?a directory to work in, such as runs/own}
[[ ! -e $out ]] || { echo "hour: error: $out is there already: name another directory" >&2; exit 2; }
command -v megarl >/dev/null || PATH=$here/../../.venv/bin:$PATH
command -v megarl >/dev/null || { echo "hour: error: no megarl: bash tools/setup.sh makes it" >&2; exit 2; }

python "$here/make.py" "$out"
cp "$here"/my_*.py "$here/eval.yaml" "$out"
PS4=$'\n$ ' # each command is shown before it runs
set -x
cd "$out"

megarl init tiny talks.jsonl --cpu --out sft.yaml
megarl init tiny calls.jsonl --cpu --out calls.yaml
megarl data calls.yaml --rows 1

megarl sft sft.yaml name=sft optimizer.lr=3e-3 sft.steps=200 sft.batch_size=32
megarl generate runs/sft/model "Capitals: cat" --n 4 --max-tokens 8

megarl sft calls.yaml name=calls model.path=runs/sft/model optimizer.lr=3e-3 optimizer.decay=cosine sft.steps=300
megarl eval eval.yaml name=eval-calls model.path=runs/calls/model environment.source='{type: tools, tools: [my_tools:upper]}' rollout.max_prompt_tokens=96 rollout.max_response_tokens=96
megarl samples runs/eval-calls --most 2

megarl init runs/sft/model prompts.jsonl --cpu --out rl.yaml
megarl train rl.yaml name=rl optimizer.lr=3e-4 rollout.samples_per_prompt=8 rollout.max_response_tokens=8 train.prompts_per_step=16

megarl init runs/sft/model pairs.jsonl --cpu --out dpo.yaml
megarl dpo dpo.yaml name=dpo data.eval.path=pairs_heldout.jsonl dpo.steps=30

megarl eval eval.yaml
megarl eval eval.yaml name=eval-dpo model.path=runs/dpo/model
megarl samples runs/rl --worst --most 2
megarl compare runs/rl runs/dpo
