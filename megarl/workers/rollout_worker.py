"""A rollout engine as a Ray actor: keeps the payload in the object store and tells the driver only what it decides on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.config import RolloutSettings
from megarl.data.tokenizer import load_tokenizer
from megarl.rollout.engine import Prompt, Sampling
from megarl.rollout.vllm import RolloutEngine


@dataclass(frozen=True)
class Response:
    """What the driver knows of one response."""

    prompt_id: int
    text: str
    prompt_length: int
    length: int  # response tokens
    finished: bool  # ended by itself, not by the length limit
    payload: Any  # reference to the list of Sample of the prompt
    index: int  # place in that list


class RolloutWorker(RolloutEngine):
    """One engine; its process holds nothing else."""

    async def start(self, model: Path, dtype: str, settings: RolloutSettings, seed: int) -> None:  # type: ignore[override]
        self._tokenizer = load_tokenizer(model)
        await super().start(model, dtype, settings, seed)

    async def respond(self, share: Sequence[tuple[int, list[int], int]], sampling: Sampling) -> list[list[Response]]:
        """For each (prompt id, prompt tokens, seed) its responses."""
        generated = await self.generate([Prompt(id, tokens, seed) for id, tokens, seed in share], sampling)
        answers = []
        for group in generated:
            payload = ray.put(group.samples)
            answers.append(
                [
                    Response(
                        prompt_id=int(group.prompt_id),
                        text=self._tokenizer.decode(sample.tokens[sample.prompt_length :], skip_special_tokens=True),
                        prompt_length=sample.prompt_length,
                        length=sample.response_length,
                        finished=sample.finish_reason == "stop",
                        payload=payload,
                        index=index,
                    )
                    for index, sample in enumerate(group.samples)
                ]
            )
        return answers
