"""Measure what fp8 engines cost a policy in accuracy: `python -m tools.measure_fp8 MODEL [--prompts 64] [--tokens 32]`.

One CPU engine after another answers questions of spell_backward: in float32, and with rollout.quantization=fp8. The weights come through
the sync that a run uses. Each row has the gap between the log-probs that the engine sampled with and transformers' float32 log-probs of the
same tokens, and the bytes sent; the last line has the CPU seconds to quantise a gigabyte of bfloat16 weights.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megarl.config import RolloutSettings
from megarl.engines.engine import Setup
from megarl.engines.generate import Sampling, TokenPrompt, generate
from megarl.engines.responder import Responder
from megarl.engines.vllm.engine import VllmEngine
from megarl.engines.vllm.launch import environment
from megarl.models.description import ModelDescription
from megarl.models.hf import Checkpoint
from megarl.sync.fingerprint import Fingerprinter, check
from megarl.sync.quantize import as_expected, quantize
from megarl.sync.send import Sender
from megarl.sync.wire import TensorName

TIMEOUT_S = 600.0
Quantization = Literal["fp8"] | None


class Row(NamedTuple):
    engine: str
    tokens: int
    mean: float  # |log-prob of engine - of transformers|
    worst: float
    kl: float  # mean log-prob of engine - of transformers: an estimate of the divergence
    megabytes: float


def stream(model: Path, quantization: str | None) -> Iterator[tuple[TensorName, Tensor]]:
    """The directory's weights as rank 0 sends them to a float32 engine."""
    expected = ModelDescription.read(model).update("float32", quantization)
    with Checkpoint(model) as checkpoint:
        yield from as_expected(((name, checkpoint.read(name)) for name in expected if name in checkpoint.tensors), expected)


async def measured(model: Path, prompts: list[TokenPrompt], tokens: int, quantization: Quantization, reference: Any) -> Row:
    """Sync an engine, let it answer, and compare its log-probs."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    settings = RolloutSettings(
        max_prompt_tokens=longest, max_response_tokens=tokens, kv_cache_mb=256, timeout_s=TIMEOUT_S, quantization=quantization
    )
    engine, prints = VllmEngine(f"engine {quantization or 'float32'}"), Fingerprinter()
    await engine.start(Setup(model, "float32", settings, 1, gpu=False, blank=True))
    try:
        loop, sender = (
            asyncio.get_running_loop(),
            Sender("shm", workers=1, host="127.0.0.1", bucket_mb=64, timeout_s=TIMEOUT_S, device=torch.device("cpu")),
        )

        def announce(header: dict[str, Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(engine.load_buckets([header], TIMEOUT_S), loop).result

        try:
            await engine.start_update(TIMEOUT_S)
            sent = await asyncio.to_thread(sender.send, stream(model, quantization), announce, prints.add)
            await engine.finish_update(1, TIMEOUT_S)
            check(prints.digest(), await engine.fingerprints(TIMEOUT_S), engine.label)
        finally:
            sender.close()
        sampling = Sampling(n=4, temperature=1.0, max_tokens=tokens, seed=1)
        generated = await generate(Responder(engine, TIMEOUT_S), prompts, sampling, TIMEOUT_S)
    finally:
        await engine.close()
    gaps = torch.cat(
        [
            torch.from_numpy(sample.rollout_logp) - logp(reference, sample.tokens.tolist(), sample.prompt_length)
            for answer in generated
            for sample in answer.samples
        ]
    )
    sizes, engine_name = gaps.abs(), quantization or "float32"
    return Row(engine_name, len(gaps), float(sizes.mean()), float(sizes.max()), float(gaps.mean()), sent.nbytes / 2**20)


@torch.no_grad()
def logp(model: Any, tokens: list[int], prompt_length: int) -> Tensor:
    """transformers' log-probs of the response."""
    ids = torch.tensor([tokens])
    return model(ids).logits[0, prompt_length - 1 : -1].log_softmax(-1).gather(1, ids[0, prompt_length:, None]).squeeze(1)


def seconds_per_gb() -> float:
    """The CPU seconds to quantise 2^30 bytes of bfloat16 experts, in the stacks in which they are exported."""
    stack = torch.randn(32, 768, 2048).bfloat16()
    begun = time.process_time()
    quantize(stack)
    return (time.process_time() - begun) * 2**30 / stack.nbytes


def questions(model: Path, count: int) -> list[TokenPrompt]:
    """Questions of the quickstart's task, in the model's chat template."""
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    data = reasoning_gym.create_dataset("spell_backward", min_word_len=3, max_word_len=8, seed=1_000_000_000, size=count)
    chats = ([{"role": "user", "content": one["question"]}] for one in data)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [TokenPrompt(index, tokenizer(text, add_special_tokens=False)["input_ids"]) for index, text in enumerate(texts)]


def main() -> None:
    parser = argparse.ArgumentParser(description="The log-prob gap of fp8 engines.")
    parser.add_argument("model", type=Path, help="a Hugging Face directory whose sizes are multiples of 128")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="longest response")
    given = parser.parse_args()
    for name, value in environment(gpu=False).items():
        os.environ.setdefault(name, value)
    from transformers import AutoModelForCausalLM

    prompts = questions(given.model, given.prompts)
    reference = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    print("| engine | tokens | mean gap | max gap | mean log-ratio | MB sent |\n|---|---|---|---|---|---|")
    kinds: tuple[Quantization, ...] = (None, "fp8")
    for quantization in kinds:
        row = asyncio.run(measured(given.model, prompts, given.tokens, quantization, reference))
        print(f"| {row.engine} | {row.tokens} | {row.mean:.2e} | {row.worst:.2e} | {row.kl:.1e} | {row.megabytes:.2f} |")
    print(f"quantisation of 1 GB of bfloat16: {seconds_per_gb():.1f} CPU seconds")


if __name__ == "__main__":
    main()
