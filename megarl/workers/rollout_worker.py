"""A rollout engine as a Ray actor: keeps the payload in the object store and tells the driver only what it decides on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import ray

from megarl.batch import Sample
from megarl.config import EnvironmentSettings, RolloutSettings
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.data.turns import TurnTokens
from megarl.environments.hosts import Host, guarantee, open_host
from megarl.imports import find
from megarl.models.hf import end_tokens
from megarl.network import choose_nccl_interface, interface_towards
from megarl.observe.output import keep_output
from megarl.response import EpisodeSummary, Response
from megarl.rollout.engine import Engine, Part, RolloutError
from megarl.rollout.episodes import Limits, Played, Start, play
from megarl.rollout.generate import Sampling, TokenPrompt, generate, request_for, request_seed, text_of
from megarl.rollout.parts import added, whole
from megarl.rollout.responder import Responder
from megarl.sync.fingerprint import Print


@dataclass(frozen=True)
class ExpertsWanted:
    """Of which responses of a call the experts of their tokens are kept, and how."""

    stages: Sequence[Sequence[int]]  # the model's MoE layers, as they are kept: each pipeline stage fetches its own
    layers: int  # of the model, dense ones too
    topk: int  # experts a token
    share: float  # of the responses, above 0

    def of(self, number: int) -> bool:
        """Whether those of a call's response, counted from 0, are kept: of the first n ceil(n x share), so the first in any case."""
        return ceil((number + 1) * self.share) > ceil(number * self.share)


@dataclass(frozen=True)
class Playing:
    """How responses become episodes."""

    environment: EnvironmentSettings
    limits: Limits
    system: str | None  # a message before each opening that begins with none


EnginePrompts = Sequence[Start]
"""Prompts for one engine, whose ids are their numbers."""


def ask(worker: Any, share: EnginePrompts, sampling: Sampling, experts: ExpertsWanted | None, playing: Playing | None = None) -> list[Any]:
    """Starts `RolloutWorker.respond`.

    Args:
        worker: the actor.
        share: its prompts.
        sampling: how many responses to each, and how they are drawn.
        experts: which experts are kept; None: none.
        playing: how responses become episodes; None: they do not.

    Returns:
        At once, references to all that it returns.
    """
    each = 1 + (0 if experts is None else len(experts.stages))
    return list(worker.respond.options(num_returns=1 + len(share) * sampling.n * each).remote(share, sampling, experts, playing))


def ask_more(
    worker: Any, start: Start, sampling: Sampling, experts: ExpertsWanted | None, tokens: int, open_: Mapping[int, Sequence[Any]]
) -> list[Any]:
    """Starts `RolloutWorker.go_on`.

    Args:
        worker: the actor.
        start: the prompt.
        sampling: how the responses are drawn.
        experts: which experts are kept; None: none.
        tokens: most that each response gets now.
        open_: by the response's number, references to its parts so far; none of those that begin.

    Returns:
        At once, references to all that it returns.
    """
    each = 1 + (0 if experts is None else len(experts.stages))
    counts = {index: len(parts) for index, parts in open_.items()}
    call = worker.go_on.options(num_returns=1 + len(open_) * each)
    return list(call.remote(start, sampling, experts, tokens, counts, *(part for parts in open_.values() for part in parts)))


def answered(responses: Sequence[Response], values: Sequence[Any], experts: ExpertsWanted | None) -> list[Response]:
    """The responses with references to their payloads.

    Args:
        responses: the first value of `respond`.
        values: references to the others.
        experts: what was asked for.
    """
    each = 1 + (0 if experts is None else len(experts.stages))
    own = [values[first : first + each] for first in range(0, len(values), each)]
    return [
        replace(response, payload=payload, experts=None if response.experts is None else [stages])
        for response, (payload, *stages) in zip(responses, own, strict=True)
    ]


@dataclass(frozen=True)
class _Said:
    """A response as far as it has got."""

    prompt: int  # its number
    index: int  # of the response to it
    sample: Sample
    text: str
    episode: EpisodeSummary | None = None
    added: Sample | None = None  # what of it this call has sampled, if not all: an `added` part
    done: bool = True


class RolloutWorker:
    """Holds one engine, and the tokenizer that turns its responses into text; its process holds nothing else.

    Args:
        label: names the engine in errors.
        engine: its class, as "module:Class".
        environment: variables that it looks at when it is imported.
        run: the run's directory, which keeps what the engine's processes print.
    """

    def __init__(self, label: str, engine: str, environment: Mapping[str, str], run: Path) -> None:
        keep_output(run, label)
        os.environ.update(environment)
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
        blank: bool,
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
            blank: whether the directory's weights are left unread, as a sync will bring some.
            devices: the GPUs of those ranks; none: those that this process has.
        """
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        self._tokenizer, self._ends, self._timeout_s = load_tokenizer(model), end_tokens(model), settings.timeout_s
        choose_nccl_interface(interface_towards(ray.util.get_node_ip_address()))  # the trainer's
        await self._engine.start(model, dtype, settings, seed, gpu=gpu, report_experts=report_experts, sleeps=sleeps, blank=blank)
        self._responder = Responder(self._engine, settings.timeout_s)

    async def guarantee(self, environment: EnvironmentSettings) -> str | None:
        """`megarl.environments.hosts.guarantee`, of this machine."""
        return guarantee(environment)

    async def respond(
        self, share: EnginePrompts, sampling: Sampling, experts: ExpertsWanted | None = None, playing: Playing | None = None
    ) -> list[Any]:
        """The responses to each prompt, or the episodes that it begins. Several calls may be under way at once.

        Args:
            share: the prompts.
            sampling: how many responses to each, and how they are drawn.
            experts: which experts are kept; None: none.
            playing: how responses become episodes; None: they do not.

        Returns:
            As values of their own, which belong to the caller and outlive this process: the responses without their payloads; then of each
            the payload and, where experts are wanted at all, those of its tokens for each stage, or None. See `ask`.

        Raises:
            RolloutError: experts that are wanted were not reported.
        """
        said = await (self._generate(share, sampling) if playing is None else self._play(share, sampling, playing))
        return self._told(said, sampling, experts)

    async def go_on(
        self, start: Start, sampling: Sampling, experts: ExpertsWanted | None, tokens: int, counts: Mapping[int, int], *begun: Sample
    ) -> list[Any]:
        """So many more `tokens` of some responses to a prompt, at most.

        A token's draw depends on the response's seed and on its position, so that where a response was cut does not matter.

        Args:
            start: has the prompt.
            sampling: of whole responses.
            experts: that are wanted of those that are done.
            tokens: more of each.
            counts: which of the responses to the prompt, and of how many parts each is so far.
            *begun: these parts, one response after the other.

        Returns:
            As `respond` does, but that of a response that is not done there is no text and the payload is what this call has added to it.
            The experts are in any case those of the tokens that this call has added, and of the one before these.
        """
        given, longest = iter(begun), len(start.tokens) + sampling.max_tokens
        parts = {index: list(islice(given, count)) for index, count in counts.items()}
        requests = []
        for index, before in parts.items():
            there = np.concatenate([part.tokens for part in before]).tolist() if before else start.tokens
            most = min(tokens, longest - len(there))
            request = request_for((start.id, index), there, most, sampling, request_seed(sampling.seed, start.id, index))
            requests.append(replace(request, by_position=True, experts_from=len(there) - 1 if before else 0))
        told = []
        for (index, before), said in zip(parts.items(), await self._responder.all(requests, self._timeout_s), strict=True):
            more = added(said) if before else said
            sample, done = whole([*before, more]) if before else said, said.finish_reason != "length" or len(said.tokens) == longest
            text = text_of(sample, sampling, self._tokenizer, self._ends) if done else ""
            told.append(_Said(int(start.id), index, sample, text, added=more, done=done))
        return self._told(told, sampling, experts)

    def _told(self, said: Sequence[_Said], sampling: Sampling, experts: ExpertsWanted | None) -> list[Any]:
        """What `respond` returns."""
        responses, payloads = list[Response](), list[Any]()
        for one in said:
            sample, new = one.sample, one.added or one.sample
            wanted = experts is not None and experts.of(one.prompt * sampling.n + one.index) and sample.loss_tokens > 0
            responses.append(
                Response(
                    prompt=one.prompt,
                    text=one.text,
                    prompt_length=sample.prompt_length,
                    length=sample.response_length,
                    loss_tokens=sample.loss_tokens,
                    finished=sample.finish_reason == "stop",
                    payload=None,
                    index=one.index,
                    experts=[] if wanted else None,
                    episode=one.episode,
                    weight_versions=sample.weight_versions,
                )
            )
            payloads.append(replace(sample if one.done else new, routed_experts=None))
            if experts is not None:
                payloads += self._kept(new, experts) if wanted else [None] * len(experts.stages)
        return [responses, *payloads]

    async def _generate(self, share: EnginePrompts, sampling: Sampling) -> list[_Said]:
        prompts = [TokenPrompt(start.id, start.tokens) for start in share]
        return [
            _Said(int(generated.prompt_id), index, sample, text_of(sample, sampling, self._tokenizer, self._ends))
            for generated in await generate(self._responder, prompts, sampling, self._timeout_s)
            for index, sample in enumerate(generated.samples)
        ]

    async def _play(self, share: EnginePrompts, sampling: Sampling, playing: Playing) -> list[_Said]:
        if self._host is None or self._host[0] != playing.environment:
            if self._host is not None:
                self._host[1].close()
            self._host = playing.environment, open_host(playing.environment)

        def said(turn: Sample) -> str:
            return text_of(turn, sampling, self._tokenizer, self._ends)

        turns = TurnTokens(self._tokenizer, playing.system)
        played = await play(self._responder, self._host[1], turns, said, share, sampling, playing.limits, self._timeout_s)
        return [
            _Said(int(start.id), index, one.sample, one.text, self._episode(one))
            for start, episodes in zip(share, played, strict=True)
            for index, one in enumerate(episodes)
        ]

    def _episode(self, played: Played) -> EpisodeSummary:
        sample, opening, rest = played.sample, "", ""
        if played.turns:
            opening = decode(self._tokenizer, sample.tokens[: sample.prompt_length].tolist(), finished=False)
            rest = decode(self._tokenizer, sample.tokens[sample.prompt_length :].tolist(), finished=False)
        return EpisodeSummary(played.reward, played.turns, played.error, played.info, opening, rest)

    def _kept(self, sample: Sample, wanted: ExpertsWanted) -> list[Any]:
        """The experts of a sample's tokens, an array [T, L, K] for each pipeline stage."""
        found = sample.routed_experts
        if found is None:
            raise RolloutError(f"{self._engine.label}: reports no routed experts; routing.sample=0 asks for none")
        expected = (len(sample.tokens) - bool(sample.prompt_length), wanted.layers, wanted.topk)  # a part begins with the token before it
        if found.shape != expected:
            raise RolloutError(f"{self._engine.label}: reports routed experts {list(found.shape)}, and the model has {list(expected)}")
        return [found[:, list(stage)] for stage in wanted.stages]

    async def ping(self, timeout_s: float) -> None:
        """Raises EngineDead or RolloutTimeout where a process of the engine has ended or does not answer."""
        await self._engine.ping(timeout_s)

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
