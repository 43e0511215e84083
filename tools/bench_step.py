"""Compare an RL step with TRL's: `python -m tools.bench_step [--rounds 3] [--steps 8] [--longest 32] [--trl [PYTHON]]`.

GRPO on 64 prompts with 8 responses of up to 32 tokens each, from a mixture of experts with a million parameters, in float32, with one
update per step and a reward that costs nothing; two cores. `--longest 256` makes the lengths long-tailed, since the model ends a response
at each token with about the same probability. Four sides alternate, each in processes of its own:

- megarl with one rank and one engine, and with two of each;
- TRL's GRPOTrainer, which generates with transformers (`--trl` installs it into a throw-away environment over this one's packages, or
  takes the Python of one that has it);
- bare parts: vLLM's own LLM.generate, then forward, backward and AdamW of transformers' model on its outputs, and nothing else.

A step is timed as a whole, from drawing its prompts to new weights in the generator. The first two are left out. The table shows medians of
the rounds. Exit status: 1 if two ranks and two engines take longer per token than TRL, or 15 % longer than the bare parts; with long tails,
if they take longer than a quarter of TRL's time.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS, SAMPLES, LONGEST = 64, 8, 32
PROMPT = 32  # most tokens of a prompt
FILLING = 2  # steps that are not measured
CORES = 2
LR = 1e-5
BOUNDS = {"trl": 1.0, "bare": 1.15}  # the most time per token that megarl with all cores may take, relative to the side's
TAILED = {"trl": 0.25}  # the same if responses are longer than LONGEST
TOKEN_KB = 4  # of an engine's KV cache: keys and values of 4 layers of 128 numbers each
ALL_CORES = "megarl, 2 ranks, 2 engines"
OVERRIDES = {"megarl, 1 rank, 1 engine": (), ALL_CORES: ("layout.ranks=2", "rollout.replicas=2")}
CONFIG = """
name: job
seed: 1
run_dir: {here}
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false}}
optimizer: {{lr: {lr}}}
algorithm: {{type: grpo}}
data:
  chat: false
  train: {{type: file, path: {here}/prompts.jsonl, prompt_key: prompt, answer_key: answer}}
  eval: {{type: file, path: {here}/held_out.jsonl, prompt_key: prompt, answer_key: answer}}
reward: {{source: {{type: function, path: "{reward}"}}}}
rollout:
  {{samples_per_prompt: {samples}, max_prompt_tokens: {prompt}, max_response_tokens: {longest}, max_num_seqs: 512, kv_cache_mb: {cache}}}
sync: {{transport: shm}}
log: {{tensorboard: false}}
train: {{steps: {steps}, prompts_per_step: {prompts}, micro_batch_tokens: 8192, eval_at_start: false, eval_every: 0}}
"""


def letters(response: str) -> float:
    """The reward: the share of letters."""
    return sum(map(str.isalpha, response)) / max(1, len(response))


def write_prompts(path: Path, count: int) -> None:
    """Write `count` prompts as JSON lines."""
    draw = random.Random(1)
    path.write_text("\n".join(json.dumps({"prompt": f"spell {draw.randrange(10**6)} backward", "answer": ""}) for _ in range(count)))


def words(here: Path, steps: int) -> None:
    """Write prompts for all steps to `prompts.jsonl`."""
    write_prompts(here / "prompts.jsonl", PROMPTS * steps)
    write_prompts(here / "held_out.jsonl", 2)


def prompts_of(here: Path) -> list[str]:
    """Read the prompts that `words` wrote."""
    return [json.loads(line)["prompt"] for line in (here / "prompts.jsonl").read_text().splitlines()]


def cache_mb(longest: int) -> int:
    """The size of a KV cache with room for all responses at once."""
    return max(128, PROMPTS * SAMPLES * (PROMPT + longest) * TOKEN_KB // 1024)


# --- the sides: each prints the seconds of its steps and the mean length of the responses


def megarl(here: Path, overrides: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Run megarl through its command line; `start` is the time in seconds from the command to the first step."""
    from megarl.observe.writers import read_json_lines

    metrics, begun = here / "job" / "metrics.jsonl", time.perf_counter()

    def learned() -> list[dict[str, Any]]:
        return [row for row in read_json_lines(metrics) if "actor/lr" in row] if metrics.exists() else []

    with (here / "log").open("w") as log:
        command = [sys.executable, "-m", "megarl.cli", "train", str(here / "job.yaml"), *overrides]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None and not learned():
            time.sleep(0.02)
        stepped = time.perf_counter() - begun
        if process.wait():
            raise RuntimeError((here / "log").read_text()[-3000:])
    rows = learned()
    assert len(rows) == steps, len(rows)
    length = statistics.fmean(row["response_length/mean"] for row in rows)
    seconds = [row["perf/time_per_step"] for row in rows]
    return {"seconds": seconds, "length": length, "start": stepped - seconds[0]}


def trl(here: Path, model: Path, steps: int, longest: int) -> dict[str, Any]:
    """Run GRPOTrainer with megarl's defaults for the settings that both have."""
    from datasets import Dataset  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    seconds, lengths = list[float](), list[float]()

    class Clock(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = time.perf_counter()
            seconds.append(now - getattr(self, "ended", self.begun))  # the batch, generation included, is made before on_step_begin
            self.ended = now

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(statistics.fmean(map(len, completion_ids)))
        return [letters(text) for text in completions]

    settings = GRPOConfig(
        output_dir=str(here / "trl"),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=longest,
        max_steps=steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=1,
    )
    GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        reward,
        settings,
        Dataset.from_list([{"prompt": text} for text in prompts_of(here)]),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[Clock()],
    ).train()
    return {"seconds": seconds, "length": statistics.fmean(lengths)}


def bare(here: Path, model: Path, steps: int, longest: int) -> dict[str, Any]:
    """Run vLLM and transformers with nothing in between: no rewards, no new weights in the engine, no checks."""
    import torch
    import vllm
    from transformers import AutoModelForCausalLM

    engine = vllm.LLM(
        str(model),
        dtype="float32",
        max_model_len=PROMPT + longest,
        max_num_seqs=512,
        kv_cache_memory_bytes=cache_mb(longest) << 20,
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=8192,
        disable_log_stats=True,
    )
    policy = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR)
    texts, seconds, lengths = prompts_of(here), list[float](), list[float]()
    for step in range(steps):
        begun = time.perf_counter()
        chosen = texts[step * PROMPTS : (step + 1) * PROMPTS]
        outputs = engine.generate(chosen, vllm.SamplingParams(n=SAMPLES, max_tokens=longest), use_tqdm=False)
        pairs = [(list(one.prompt_token_ids or ()), list(response.token_ids)) for one in outputs for response in one.outputs]
        tokens = sum(len(response) for _, response in pairs)
        optimizer.zero_grad()
        together = 8192 // (PROMPT + longest)  # at the greatest length, as many tokens as one of megarl's micro-batches
        for first in range(0, len(pairs), together):
            part = pairs[first : first + together]
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt + response) for prompt, response in part], batch_first=True)
            mask = torch.zeros(ids.shape)
            present = torch.zeros_like(ids)
            for row, (prompt, response) in enumerate(part):
                mask[row, len(prompt) : len(prompt) + len(response)] = 1.0
                present[row, : len(prompt) + len(response)] = 1
            logits = policy(ids, attention_mask=present).logits[:, :-1]
            logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (-(logp * mask[:, 1:]).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
        lengths.append(tokens / len(pairs))
    return {"seconds": seconds, "length": statistics.fmean(lengths)}


# --- the whole run


def in_own_process(python: str, side: str, here: Path, model: Path, steps: int, longest: int) -> dict[str, Any]:
    """Run a side in a process of its own, and return what it prints last."""
    from megarl.engines.vllm.launch import environment

    variables = {**os.environ, **environment(gpu=False), "OMP_NUM_THREADS": str(CORES), "PYTHONPATH": str(ROOT)}
    command = [python, __file__, "--side", side, str(here), str(model), "--steps", str(steps), "--longest", str(longest)]
    done = subprocess.run(command, env=variables, cwd=here, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{side}: {done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a response, at most")
    parser.add_argument("--trl", nargs="?", const="", metavar="PYTHON", help="measure TRL, too: install it, or take this Python's")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)  # this process is one side
    given = parser.parse_args()
    if given.side:
        side, here, model = given.side[0], *map(Path, given.side[1:])
        print(json.dumps({"trl": trl, "bare": bare}[side](here, model, given.steps, given.longest)))
        return 0

    from tools.bench_losses import install_peers
    from tools.make_tiny_model import build

    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tiny"
        parameters = build(model, layers=4, hidden=128, experts=8, expert_hidden=128, seed=1)
        peer = given.trl if given.trl or given.trl is None else install_peers(str(Path(scratch) / "trl"))
        sides = [*OVERRIDES, *([] if peer is None else ["trl"]), "bare"]
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(given.rounds):
            for index, side in enumerate(sides):
                here = Path(scratch) / f"{number}-{index}"
                here.mkdir()
                words(here, given.steps)
                if side in OVERRIDES:
                    settings = {
                        "prompts": PROMPTS,
                        "reward": f"tools.bench_step:{letters.__name__}",
                        "samples": SAMPLES,
                        "prompt": PROMPT,
                        "longest": given.longest,
                        "steps": given.steps,
                        "lr": LR,
                    }
                    (here / "job.yaml").write_text(CONFIG.format(here=here, model=model, cache=cache_mb(given.longest), **settings))
                    one = megarl(here, OVERRIDES[side], given.steps)
                else:
                    one = in_own_process(peer if side == "trl" and peer else sys.executable, side, here, model, given.steps, given.longest)
                results[side].append(one)
                started = f", begun after {one['start']:.1f} s" if "start" in one else ""
                print(f"round {number + 1}, {side}: {statistics.fmean(one['seconds'][FILLING:]):.2f} s a step{started}", flush=True)
    seconds = {side: statistics.median(statistics.fmean(one["seconds"][FILLING:]) for one in rounds) for side, rounds in results.items()}
    print(f"\n{parameters:,} parameters, {PROMPTS} prompts of {SAMPLES} responses; medians of {given.rounds} rounds\n")
    lengths = {side: statistics.fmean(one["length"] for one in rounds) for side, rounds in results.items()}
    per_token = {side: seconds[side] / lengths[side] for side in seconds}
    ratios = {side: per_token[ALL_CORES] / own for side, own in per_token.items()}
    print("| | s a step | tokens a response | tokens a second | megarl with all cores over it, of a token |\n|---|---|---|---|---|")
    for side, own in seconds.items():
        print(f"| {side} | {own:.2f} | {lengths[side]:.1f} | {PROMPTS * SAMPLES / per_token[side]:,.0f} | {ratios[side]:.2f} |")
    starts = {side: statistics.median(one["start"] for one in results[side]) for side in OVERRIDES}
    print("\nFrom the command to the first step: " + ", ".join(f"{side} {start:.1f} s" for side, start in starts.items()))
    bounds = BOUNDS if given.longest == LONGEST else TAILED
    missed = {side: bound for side, bound in bounds.items() if ratios.get(side, 0.0) > bound}
    for side, bound in missed.items():
        print(f"MISSED: megarl takes {ratios[side]:.2f} times as long as {side}, at most {bound:g} is wanted")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
