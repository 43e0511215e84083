"""A rollout engine as a Ray actor: keeps the payload in the object store and tells the driver only what it decides on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.config import RolloutSettings
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.imports import find
from megarl.network import interface_towards
from megarl.rollout.engine import Engine
from megarl.rollout.generate import Sampling, TokenPrompt, generate
from megarl.sync.fingerprint import Print


@dataclass(frozen=True)
class Response:
    """What the driver knows of one response."""

    prompt: int  # which of the call's prompts it answers
    text: str
    prompt_length: int
    length: int  # response tokens
    loss_tokens: int  # those of them that are learned from
    finished: bool  # ended by itself, not by the length limit
    payload: Any  # reference to the list of Sample of the prompt
    index: int  # place in that list


class RolloutWorker:
    """Holds one engine, and the tokenizer that turns its responses into text; its process holds nothing else.

    Args:
        label: names the engine in errors.
        engine: its class, as "module:Class".
    """

    def __init__(self, label: str, engine: str) -> None:
        self._engine: Engine = find(engine)(label)

    async def open(self, model: Path, dtype: str, settings: RolloutSettings, seed: int, gpu: bool) -> None:
        """Starts the engine, as `Engine.start` says, and loads the tokenizer.

        Args:
            model: the Hugging Face directory of both.
            dtype: of the weights, "float32" or "bfloat16".
            settings: of the engine.
            seed: of the run.
            gpu: whether the engine has GPUs.
        """
        self._tokenizer, self._timeout_s = load_tokenizer(model), settings.timeout_s
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_towards(ray.util.get_node_ip_address()))  # the trainer's
        await self._engine.start(model, dtype, settings, seed, gpu=gpu)

    async def respond(self, share: Sequence[tuple[int, list[int]]], sampling: Sampling) -> list[Response]:
        """The responses to each (number of the prompt, its tokens)."""
        prompts = [TokenPrompt(number, tokens) for number, tokens in share]
        responses = []
        for generated in await generate(self._engine, prompts, sampling, self._timeout_s):
            payload = ray.put(generated.samples)
            for index, sample in enumerate(generated.samples):
                responses.append(
                    Response(
                        prompt=int(generated.prompt_id),
                        text=decode(
                            self._tokenizer, sample.tokens[sample.prompt_length :].tolist(), finished=sample.finish_reason == "stop"
                        ),
                        prompt_length=sample.prompt_length,
                        length=sample.response_length,
                        loss_tokens=sample.loss_tokens,
                        finished=sample.finish_reason == "stop",
                        payload=payload,
                        index=index,
                    )
                )
        return responses

    # A weight update, as the WeightPublisher drives it: see Engine.

    async def connect(self, rendezvous: dict[str, Any], first_rank: int) -> None:
        await self._engine.connect(rendezvous, first_rank)

    async def start_update(self, timeout_s: float) -> None:
        await self._engine.start_update(timeout_s)

    async def load_bucket(self, header: dict[str, Any], timeout_s: float) -> None:
        await self._engine.load_bucket(header, timeout_s)

    async def finish_update(self, version: int, timeout_s: float) -> None:
        await self._engine.finish_update(version, timeout_s)

    async def fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        return await self._engine.fingerprints(timeout_s)
