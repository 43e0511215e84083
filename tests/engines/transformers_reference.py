"""What the rollout tests compare with: transformers' model with other weights, its most likely tokens and log-probs, and a local sender."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.engines.engine import Engine
from megarl.engines.generate import Generated, Sampling, TokenPrompt
from megarl.engines.generate import generate as generate_within
from megarl.engines.responder import Responder
from megarl.sync.fingerprint import Fingerprinter, Print
from megarl.sync.send import Sender

TIMEOUT_S = 300.0  # ends what hangs
PROMPTS = [
    TokenPrompt(0, [5, 6, 7, 8]),
    TokenPrompt("one", [9, 10, 11]),
    TokenPrompt(2, [20, 21, 22, 23, 24, 25]),
    TokenPrompt(3, [40, 3, 77]),
]


async def generate(engine: Engine, prompts: Sequence[TokenPrompt], sampling: Sampling) -> list[Generated]:
    return await generate_within(Responder(engine, TIMEOUT_S), prompts, sampling, TIMEOUT_S)


def other_weights(path: Path, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of `path` with random weights of its own, sharp enough that its greedy choices differ from seed to seed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if "embed" in name or "lm_head" in name else 0.08
            draw = torch.randn(weight.shape, generator=generator)
            weight.copy_(scale * draw if weight.ndim > 1 else 1 + 0.1 * draw)
    return model.to(dtype).eval()


def checkpoint(model: Any) -> list[tuple[str, Tensor]]:
    """The weights under the names of a checkpoint: transformers keeps the experts of a layer stacked."""
    named: list[tuple[str, Tensor]] = []
    for name, weight in model.state_dict().items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(weight):
                gate, up = both.chunk(2)
                named += [(f"{prefix}.{expert}.gate_proj.weight", gate), (f"{prefix}.{expert}.up_proj.weight", up)]
        elif leaf == "down_proj":
            named += [(f"{prefix}.{expert}.down_proj.weight", down) for expert, down in enumerate(weight)]
        else:
            named.append((name, weight))
    return named


class Trainer:
    """Rank 0 of the trainer as far as an engine can tell: the real sender, in a thread of its own."""

    def __init__(self, engine: Engine, transport: str, workers: int = 1, delta: int | None = None, overlap: bool = False) -> None:
        self._engine, self._loop, self._version = engine, asyncio.get_running_loop(), 0
        self._transport, self._overlap = transport, overlap
        self._options: dict[str, Any] = {"workers": workers, "host": "127.0.0.1", "bucket_mb": 1, "timeout_s": TIMEOUT_S, "delta": delta}
        self._sender: Sender | None = None

    async def update(self, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Print]:
        """One update of several buckets; layers lie across them. Returns the fingerprints of what was sent."""
        sent = await self.begin(tensors)
        await self._engine.finish_update(self._version, TIMEOUT_S)
        return sent.digest()

    async def begin(self, tensors: Sequence[tuple[str, Tensor]]) -> Fingerprinter:
        """What of an update comes before its end."""
        sent = Fingerprinter()
        if self._sender is None:
            self._sender = Sender(self._transport, device=torch.device("cpu"), **self._options)
            await asyncio.to_thread(self._sender.connect, lambda meeting: self._do(self._engine.connect([meeting], 1)))
        self._version += 1
        if not self._overlap:
            await self._engine.start_update(TIMEOUT_S)
        take = self._engine.receive_buckets if self._overlap else self._engine.load_buckets
        try:
            self.moved = await asyncio.to_thread(
                self._sender.send, tensors, lambda header: self._do(take([header], TIMEOUT_S)), sent.add, self._version
            )
        except BaseException:
            self._sender = None  # it has closed itself
            raise
        assert self.moved.tensors == len(tensors)
        if self._overlap:
            await self._engine.start_update(TIMEOUT_S)
            await self._engine.load_received(TIMEOUT_S)
        return sent

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> Callable[[], object]:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result


@torch.no_grad()
def assert_greedy(model: Any, response: Sequence[int], prompt: Sequence[int], count: int, end: int) -> None:
    """Every token is transformers' most likely one after those before it, up to and with the end token or the `count`-th."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    assert list(response) == logits.argmax(-1).tolist()
    assert end not in response[:-1] and (response[-1] == end or len(response) == count)


@torch.no_grad()
def logp(model: Any, tokens: Sequence[int], prompt_length: int, temperature: float) -> Tensor:
    """transformers' log-probs of the response tokens under the temperature, float32 [response]."""
    ids = torch.tensor([list(tokens)])
    logits = model(ids).logits[0, prompt_length - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, prompt_length:, None]).squeeze(1)
