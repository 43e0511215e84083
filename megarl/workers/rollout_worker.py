"""A rollout engine as a Ray actor: keeps the payload in the object store and tells the driver only what it decides on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.config import RolloutSettings
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.rollout.engine import EngineInfo, Prompt, Sampling
from megarl.rollout.vllm import RolloutEngine


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


class RolloutWorker(RolloutEngine):
    """One engine; its process holds nothing else."""

    async def open(self, model: Path, dtype: str, settings: RolloutSettings, seed: int, gpu: bool) -> EngineInfo:
        """`start`, and the tokenizer that turns responses into text."""
        self._tokenizer = load_tokenizer(model)
        return await self.start(model, dtype, settings, seed, gpu=gpu)

    async def respond(self, share: Sequence[tuple[int, list[int]]], sampling: Sampling) -> list[Response]:
        """The responses to each (number of the prompt, its tokens)."""
        responses = []
        for generated in await self.generate([Prompt(number, tokens) for number, tokens in share], sampling):
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
