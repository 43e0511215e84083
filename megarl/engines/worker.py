"""A rollout engine as a Ray actor: it leaves the payload in the object store and sends the driver only what it needs for decisions."""

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayError

from megarl.batch import Sample
from megarl.config import EnvironmentSettings, PromptFormat
from megarl.data.calls import JSON_CALLS, Calls
from megarl.data.images import ImageReader, answer_reader
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.data.turns import TurnTokens
from megarl.engines.actor import EngineActor
from megarl.engines.engine import Engine, Meeting, Part, RolloutError, Setup
from megarl.engines.episodes import Limits, Played, Start, play
from megarl.engines.generate import Sampling, generate, request_for, request_seed, text_of
from megarl.engines.member import MemberToStart
from megarl.engines.parts import added, whole
from megarl.engines.responder import Responder
from megarl.environments.hosts import Host, guarantee, host_of
from megarl.host.network import choose_nccl_interface, interface_towards, reserved_ports
from megarl.image_source import IMAGES
from megarl.models.hf import end_tokens
from megarl.response import EpisodeSummary, Response
from megarl.sync.fingerprint import Print

if TYPE_CHECKING:
    from megarl.environments.agents.host import AgentHost


@dataclass(frozen=True)
class ExpertsWanted:
    """For which responses of a call to keep the routed experts of their tokens, and in what form."""

    stages: Sequence[Sequence[int]]  # the model's MoE layers, grouped as they are kept: each pipeline stage fetches its own
    layers: int  # all layers of the model, including dense ones
    topk: int  # experts per token
    share: float  # share of the responses, above 0

    def of(self, number: int) -> bool:
        """Whether to keep the experts of a call's response `number`, from 0: ceil(n x share) of the first n, so always the first."""
        return ceil((number + 1) * self.share) > ceil(number * self.share)


@dataclass(frozen=True)
class Playing:
    """How responses become episodes."""

    environment: EnvironmentSettings
    limits: Limits
    data: PromptFormat  # how openings and turns are rendered
    tools: Sequence[dict[str, Any]] | None = None  # schemas of the tools that the policy may call
    rewriting: str | None = None  # for the console: what becomes of turns that the chat template rewrites


EnginePrompts = Sequence[Start]
"""Prompts for one engine; each one's id is its number."""


def values_each(experts: ExpertsWanted | None) -> int:
    """The number of return values for each response: its payload, and its experts for each stage."""
    return 1 if experts is None else 1 + len(experts.stages)


def ask(worker: Any, share: EnginePrompts, sampling: Sampling, experts: ExpertsWanted | None, playing: Playing | None = None) -> list[Any]:
    """Start `RolloutWorker.respond` and return at once.

    Args:
        worker: the actor.
        share: its prompts.
        sampling: how many responses to generate per prompt, and how they are sampled.
        experts: which responses' routed experts to keep; None: none.
        playing: how responses become episodes; None: they do not.

    Returns:
        A reference to each of its return values.
    """
    values = 1 + len(share) * sampling.n * values_each(experts)
    return list(worker.respond.options(num_returns=values).remote(share, sampling, experts, playing))


def ask_more(
    worker: Any, start: Start, sampling: Sampling, experts: ExpertsWanted | None, tokens: int, open_: Mapping[int, Sequence[Any]]
) -> list[Any]:
    """Start `RolloutWorker.go_on` and return at once.

    Args:
        worker: the actor.
        start: the prompt.
        sampling: how the responses are sampled.
        experts: which responses' routed experts to keep; None: none.
        tokens: the largest number of further tokens per response.
        open_: by the response's number, references to its parts so far; empty for a response that has not begun.

    Returns:
        A reference to each of its return values.
    """
    counts = {index: len(parts) for index, parts in open_.items()}
    call = worker.go_on.options(num_returns=1 + len(open_) * values_each(experts))
    return list(call.remote(start, sampling, experts, tokens, counts, *(part for parts in open_.values() for part in parts)))


def answered(responses: Sequence[Response], values: Sequence[Any], experts: ExpertsWanted | None) -> list[Response]:
    """Add references to their payloads and experts to the responses.

    Args:
        responses: the first return value of `respond`.
        values: references to the other return values.
        experts: the argument of the call.
    """
    each = values_each(experts)
    own = [values[first : first + each] for first in range(0, len(values), each)]
    return [
        replace(response, payload=payload, experts=None if response.experts is None else [stages])
        for response, (payload, *stages) in zip(responses, own, strict=True)
    ]


_Part = tuple[Response, Sample]
"""What a call has sampled of a response: the response, with its payload itself in place of a reference, and the sample with the experts."""


def _response(prompt: int, index: int, sample: Sample, text: str, episode: EpisodeSummary | None = None) -> Response:
    """Describe the response number `index` to a prompt, or what has been sampled of it so far; its payload is the sample itself."""
    return Response(
        prompt=prompt,
        text=text,
        prompt_length=sample.prompt_length,
        length=sample.response_length,
        loss_tokens=sample.loss_tokens,
        finished=sample.finish_reason == "stop",
        payload=sample,
        index=index,
        episode=episode,
        weight_versions=sample.weight_versions,
        starts=sample.starts,
        sampled=sample.version_tokens,
        images=sample.images,
    )


class RolloutWorker(EngineActor):
    """Holds one engine and the tokenizer that turns its responses into text."""

    def __init__(self, label: str, engine: str, environment: Mapping[str, str], run: Path) -> None:
        super().__init__(label, engine, environment, run)
        self._engine: Engine = self._engine_class(label)
        self._reader: ImageReader | None = None
        self._host: tuple[EnvironmentSettings, Host | AgentHost] | None = None
        self._turns: tuple[Playing, TurnTokens] | None = None

    async def open(self, setup: Setup, devices: Sequence[str], members: Sequence[MemberToStart]) -> None:
        """Start the engine and load the tokenizer.

        Args:
            setup: what the engine runs; the tokenizer is that of its model.
            devices: the GPUs of the ranks that it shares devices with; empty: this process's own GPUs.
            members: its other members.
        """
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        self._tokenizer, self._ends, self._timeout_s = load_tokenizer(setup.model), end_tokens(setup.model), setup.settings.timeout_s
        longest = setup.settings.max_prompt_tokens + setup.settings.max_response_tokens
        limit_key, kept = "rollout.max_prompt_tokens + rollout.max_response_tokens", self._run / IMAGES
        self._reader = answer_reader(setup.model, setup.pixels, longest, limit_key, kept, drop_images=setup.drop_images)
        address = ray.util.get_node_ip_address()
        choose_nccl_interface(interface_towards(address))  # the interface that the trainer uses
        if not members:
            await self._engine.start(setup)
        else:
            name = ray.get_runtime_context().get_actor_id()
            with reserved_ports(address, 1) as [port]:
                meeting, actors = Meeting(address, port), [member.create(f"{name}/{rank}") for rank, member in enumerate(members, 1)]
                await asyncio.gather(*(actor.open.remote(setup, meeting, rank) for rank, actor in enumerate(actors, 1)))
                self._mind(actors)
                await self._engine.start(setup, meeting)
            await asyncio.gather(*(actor.settle.remote() for actor in actors))
        self._responder = Responder(self._engine, setup.settings.timeout_s)

    def _mind(self, members: Sequence[Any]) -> None:
        """Tell the engine when a member has ended; in a thread, since the engine's start blocks this one."""
        self._members = members  # Ray ends an actor that nothing refers to

        def wait() -> None:
            ends = {member.ended.remote(): rank for rank, member in enumerate(members, 1)}
            [end], _ = ray.wait(list(ends))
            try:
                how = ray.get(end)
            except RayError as error:
                how = str(error).splitlines()[0]
            self._engine.lose(f"its member {ends[end]} has ended ({how})")

        threading.Thread(target=wait, daemon=True).start()

    async def guarantee(self, environment: EnvironmentSettings) -> str | None:
        """Return what `megarl.environments.hosts.guarantee` says on this machine."""
        return guarantee(environment)

    async def respond(
        self, share: EnginePrompts, sampling: Sampling, experts: ExpertsWanted | None = None, playing: Playing | None = None
    ) -> list[Any]:
        """Generate the responses to each prompt, or play the episodes that it begins. Several calls may run concurrently.

        Args:
            share: the prompts.
            sampling: how many responses to generate per prompt, and how they are sampled.
            experts: which responses' routed experts to keep; None: none.
            playing: how responses become episodes; None: they do not.

        Returns:
            Separate return values (see `ask`), which belong to the caller and outlive this process: the responses without their payloads;
            then for each response its payload and, if `experts` is given, its tokens' experts for each stage, or None if they are not kept.

        Raises:
            RolloutError: the engine did not report experts that are wanted.
        """
        parts = await (self._generate(share, sampling) if playing is None else self._play(share, sampling, playing))
        return self._return_values(parts, sampling, experts)

    async def go_on(
        self, start: Start, sampling: Sampling, experts: ExpertsWanted | None, tokens: int, counts: Mapping[int, int], *begun: Sample
    ) -> list[Any]:
        """Sample up to `tokens` further tokens of some responses to a prompt.

        A token's random draw depends on the response's seed and on its position, so it does not matter where a response was cut.

        Args:
            start: the prompt.
            sampling: how whole responses are sampled.
            experts: which responses' routed experts to keep; None: none.
            tokens: the largest number of further tokens per response.
            counts: by the response's number, how many parts it has so far.
            *begun: all of these parts, one response after the other.

        Returns:
            The same as `respond`, except that an unfinished response has no text, and its payload is only the part that this call added.
            Even for a finished response, the experts are only those of the tokens that this call added, and of the token before them.
        """
        given, longest = iter(begun), len(start.tokens) + sampling.max_tokens
        earlier = {index: list(islice(given, count)) for index, count in counts.items()}
        requests = []
        for index, before in earlier.items():
            context = np.concatenate([part.tokens for part in before]).tolist() if before else start.tokens
            most = min(tokens, longest - len(context))
            request = request_for((start.id, index), context, most, sampling, request_seed(sampling.seed, start.id, index))
            requests.append(replace(request, by_position=True, images=start.images, experts_from=len(context) - 1 if before else 0))
        parts = list[_Part]()
        for (index, before), answer in zip(earlier.items(), await self._responder.all(requests, self._timeout_s), strict=True):
            more = added(answer) if before else answer
            sample = whole([*before, more]) if before else answer
            done = answer.finish_reason != "length" or len(answer.tokens) == longest
            text = text_of(sample, sampling, self._tokenizer, self._ends) if done else ""
            response = _response(int(start.id), index, sample, text)
            parts.append((response if done else replace(response, payload=more), more))
        return self._return_values(parts, sampling, experts)

    def _return_values(self, parts: Sequence[_Part], sampling: Sampling, experts: ExpertsWanted | None) -> list[Any]:
        """Make the return values of `respond`."""
        responses, values = list[Response](), list[Any]()
        for response, sampled in parts:
            number = response.prompt * sampling.n + response.index
            wanted = experts is not None and experts.of(number) and response.loss_tokens > 0
            responses.append(replace(response, payload=None, experts=[] if wanted else None))
            values.append(replace(response.payload, routed_experts=None))
            if experts is not None:
                values += self._kept(sampled, experts) if wanted else [None] * len(experts.stages)
        return [responses, *values]

    async def _generate(self, share: EnginePrompts, sampling: Sampling) -> list[_Part]:
        return [
            (_response(int(generated.prompt_id), index, sample, text_of(sample, sampling, self._tokenizer, self._ends)), sample)
            for generated in await generate(self._responder, share, sampling, self._timeout_s)
            for index, sample in enumerate(generated.samples)
        ]

    async def _play(self, share: EnginePrompts, sampling: Sampling, playing: Playing) -> list[_Part]:
        if self._turns is None or self._turns[0] != playing:
            self._turns = playing, TurnTokens(self._tokenizer, playing.data, playing.tools, self._reader)
        if self._host is None or self._host[0] != playing.environment:
            if self._host is not None:
                self._host[1].close()
            calls = Calls(self._turns[1].template.calls or JSON_CALLS, playing.tools or ())
            self._host = playing.environment, host_of(playing.environment, calls)

        def turn_text(turn: Sample) -> str:
            return text_of(turn, sampling, self._tokenizer, self._ends)

        played = await play(self._responder, self._host[1], self._turns[1], turn_text, share, sampling, playing.limits, self._timeout_s)
        return [
            (_response(int(start.id), index, one.sample, one.text, self._episode(one)), one.sample)
            for start, episodes in zip(share, played, strict=True)
            for index, one in enumerate(episodes)
        ]

    def _episode(self, played: Played) -> EpisodeSummary:
        sample, opening, transcript = played.sample, "", ""
        if played.turns:
            opening = decode(self._tokenizer, sample.tokens[: sample.prompt_length].tolist(), finished=False)
            bounds = pairwise([sample.prompt_length, *sample.starts, len(sample.tokens)])
            for follows, (begin, end) in zip(("", *played.follows), bounds, strict=True):
                sampled = begin if sample.loss_mask is None else begin + int(sample.loss_mask[begin - sample.prompt_length :].argmax())
                transcript += follows + decode(self._tokenizer, sample.tokens[sampled:end].tolist(), finished=False)
        if self._reader is not None:
            opening, transcript = (self._reader.shown(text, self._tokenizer) for text in (opening, transcript))
        return EpisodeSummary(
            played.reward, played.turns, played.error, played.info, opening, transcript, played.unreadable, *played.prefill
        )

    def _kept(self, sample: Sample, wanted: ExpertsWanted) -> list[Any]:
        """The experts of a sample's tokens, an array [T, L, K] for each pipeline stage."""
        experts_TLK = sample.routed_experts
        if experts_TLK is None:
            raise RolloutError(f"{self._engine.label}: reports no routed experts; routing.sample=0 asks for none")
        # The experts of an `added` part, which has no prompt, begin with those of the token before it.
        expected = [len(sample.tokens) - len(sample.starts) - bool(sample.prompt_length), wanted.layers, wanted.topk]
        shape = list(experts_TLK.shape)
        if shape != expected:
            raise RolloutError(f"{self._engine.label}: reports routed experts {shape}, and the model has {expected}")
        return [experts_TLK[:, list(stage)] for stage in wanted.stages]

    async def ping(self, timeout_s: float) -> None:
        """Raise EngineDead or RolloutTimeout if a process of the engine has ended or does not answer."""
        await self._engine.ping(timeout_s)

    async def sleep(self, keep_weights: bool, timeout_s: float) -> None:
        await self._engine.sleep(timeout_s, keep_weights=keep_weights)

    async def wake(self, part: Part, timeout_s: float) -> None:
        await self._engine.wake(part, timeout_s)

    # The calls of a weight update, which the WeightPublisher makes; see Engine.

    async def connect(self, rendezvous: list[dict[str, Any]], first_rank: int) -> None:
        await self._engine.connect(rendezvous, first_rank)

    async def start_update(self, timeout_s: float) -> None:
        await self._engine.start_update(timeout_s)

    async def load_buckets(self, headers: list[dict[str, Any]], timeout_s: float) -> None:
        await self._engine.load_buckets(headers, timeout_s)

    async def receive_buckets(self, headers: list[dict[str, Any]], timeout_s: float) -> None:
        await self._engine.receive_buckets(headers, timeout_s)

    async def load_received(self, timeout_s: float) -> None:
        await self._engine.load_received(timeout_s)

    async def finish_update(self, version: int, timeout_s: float) -> None:
        await self._engine.finish_update(version, timeout_s)

    async def load_adapter(self, weights: bytes, config: dict[str, Any], version: int, timeout_s: float) -> None:
        await self._engine.load_adapter(weights, config, version, timeout_s)

    async def adapter_fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        return await self._engine.adapter_fingerprints(timeout_s)

    async def drafted(self, timeout_s: float) -> tuple[int, int]:
        return await self._engine.drafted(timeout_s)

    async def fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        return await self._engine.fingerprints(timeout_s)
