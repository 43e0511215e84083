"""A rollout engine as a Ray actor: keeps the payload in the object store and tells the driver only what it decides on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from megarl.batch import Sample
from megarl.config import EnvironmentSettings, RolloutSettings
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.data.turns import TurnTokens
from megarl.environments.hosts import Host, open_host
from megarl.imports import find
from megarl.network import interface_towards
from megarl.rollout.engine import Engine, Part, RolloutError
from megarl.rollout.episodes import Limits, Played, Start, play
from megarl.rollout.generate import Sampling, TokenPrompt, generate
from megarl.sync.fingerprint import Print


@dataclass(frozen=True)
class Episode:
    """What the driver knows of an episode of several turns."""

    reward: float  # what the environment gave in all turns
    turns: int
    error: str | None  # how the environment failed
    info: Mapping[str, float]  # what it said of itself last
    opening: str  # what the policy read first
    transcript: str  # all that followed, its own turns and the answers to them


@dataclass(frozen=True)
class Response:
    """What the driver knows of one response."""

    prompt: int  # which of the call's prompts it answers
    text: str  # of an episode the last turn's
    prompt_length: int
    length: int  # response tokens
    loss_tokens: int  # those of them that are learned from
    finished: bool  # ended by itself, not by the length limit
    payload: Any  # reference to the Sample, without its experts
    index: int  # which of the responses to the prompt
    experts: Sequence[Any] | None = None  # references to the experts of its tokens, one for each of `ExpertsWanted.stages`
    episode: Episode | None = None  # where an environment answered


@dataclass(frozen=True)
class ExpertsWanted:
    """Of which responses of a call the experts of their tokens are kept, and how."""

    stages: Sequence[Sequence[int]]  # the model's MoE layers, as they are kept: each pipeline stage fetches its own
    layers: int  # of the model, dense ones too
    topk: int  # experts a token
    every: int  # one response in so many, the first included


class RolloutWorker:
    """Holds one engine, and the tokenizer that turns its responses into text; its process holds nothing else.

    Args:
        label: names the engine in errors.
        engine: its class, as "module:Class".
    """

    def __init__(self, label: str, engine: str) -> None:
        self._engine: Engine = find(engine)(label)
        self._host: tuple[EnvironmentSettings, Host] | None = None

    async def open(
        self,
        model: Path,
        dtype: str,
        settings: RolloutSettings,
        seed: int,
        gpu: bool,
        report_experts: bool,
        sleeps: bool,
        devices: Sequence[str],
    ) -> None:
        """Starts the engine, as `Engine.start` says, and loads the tokenizer.

        Args:
            model: the Hugging Face directory of both.
            dtype: of the weights, "float32" or "bfloat16".
            settings: of the engine.
            seed: of the run.
            gpu: whether the engine has GPUs.
            report_experts: whether its samples say which experts their tokens were sent to.
            sleeps: whether it leaves its devices to ranks in between.
            devices: the GPUs of those ranks; none: those that this process has.
        """
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        self._tokenizer, self._timeout_s = load_tokenizer(model), settings.timeout_s
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface_towards(ray.util.get_node_ip_address()))  # the trainer's
        await self._engine.start(model, dtype, settings, seed, gpu=gpu, report_experts=report_experts, sleeps=sleeps)

    async def respond(
        self, share: Sequence[tuple[int, list[int]]], sampling: Sampling, experts: ExpertsWanted | None = None
    ) -> list[Response]:
        """The responses to each (number of the prompt, its tokens). RolloutError where experts that are wanted were not reported."""
        prompts = [TokenPrompt(number, tokens) for number, tokens in share]
        return [
            self._response(
                int(generated.prompt_id),
                index,
                sample,
                self._text(sample.tokens[sample.prompt_length :].tolist(), sample.finish_reason == "stop", sampling),
                sampling,
                experts,
            )
            for generated in await generate(self._engine, prompts, sampling, self._timeout_s)
            for index, sample in enumerate(generated.samples)
        ]

    async def play(
        self,
        starts: Sequence[Start],
        sampling: Sampling,
        limits: Limits,
        environment: EnvironmentSettings,
        experts: ExpertsWanted | None = None,
    ) -> list[Response]:
        """The episodes that begin with each start, whose id is the number of the prompt. RolloutError as of `respond`."""
        if self._host is None or self._host[0] != environment:
            if self._host is not None:
                self._host[1].close()
            self._host = environment, open_host(environment)

        def text_of(tokens: list[int], finished: bool) -> str:
            return self._text(tokens, finished, sampling)

        turns = TurnTokens(self._tokenizer)
        played = await play(self._engine, self._host[1], turns, text_of, starts, sampling, limits, self._timeout_s)
        return [
            self._response(int(start.id), index, one.sample, one.text, sampling, experts, self._episode(one))
            for start, episodes in zip(starts, played, strict=True)
            for index, one in enumerate(episodes)
        ]

    def _episode(self, played: Played) -> Episode:
        sample, opening, rest = played.sample, "", ""
        if played.turns:
            opening = decode(self._tokenizer, sample.tokens[: sample.prompt_length].tolist(), finished=False)
            rest = decode(self._tokenizer, sample.tokens[sample.prompt_length :].tolist(), finished=False)
        return Episode(played.reward, played.turns, played.error, played.info, opening, rest)

    def _response(
        self,
        prompt: int,
        index: int,
        sample: Sample,
        text: str,
        sampling: Sampling,
        experts: ExpertsWanted | None,
        episode: Episode | None = None,
    ) -> Response:
        wanted = experts is not None and (prompt * sampling.n + index) % experts.every == 0 and sample.loss_tokens > 0
        return Response(
            prompt=prompt,
            text=text,
            prompt_length=sample.prompt_length,
            length=sample.response_length,
            loss_tokens=sample.loss_tokens,
            finished=sample.finish_reason == "stop",
            payload=ray.put(replace(sample, routed_experts=None)),
            index=index,
            experts=self._kept(sample, experts) if wanted and experts is not None else None,
            episode=episode,
        )

    def _text(self, tokens: list[int], finished: bool, sampling: Sampling) -> str:
        """The text of a response, without the token that ended it; a token that completed a stop text stays."""
        ends = (self._tokenizer.eos_token_id, *sampling.stop_token_ids)
        return decode(self._tokenizer, tokens, finished=finished and (not sampling.stop or tokens[-1] in ends))

    def _kept(self, sample: Sample, wanted: ExpertsWanted) -> list[Any]:
        """The experts of a sample's tokens in the object store, an array [T, L, K] for each pipeline stage."""
        found = sample.routed_experts
        if found is None:
            raise RolloutError(f"{self._engine.label}: reports no routed experts; routing.sample=0 asks for none")
        expected = (len(sample.tokens) - 1, wanted.layers, wanted.topk)
        if found.shape != expected:
            raise RolloutError(f"{self._engine.label}: reports routed experts {list(found.shape)}, and the model has {list(expected)}")
        return [ray.put(found[:, list(stage)]) for stage in wanted.stages]

    async def sleep(self, keep_weights: bool, timeout_s: float) -> None:
        await self._engine.sleep(timeout_s, keep_weights=keep_weights)

    async def wake(self, part: Part, timeout_s: float) -> None:
        await self._engine.wake(part, timeout_s)

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
