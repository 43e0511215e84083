"""`megarl serve`: a reward model on Megatron ranks that scores over HTTP, for runs on other machines (`reward.source.type=http`).

The protocol is that of `megarl.rewards.http`; of each sample only `prompt`, `response` and `finished` are used. Samples are tokenised as
in training: the prompt through the chat template (or `data.template`), the response, and the end token if it is finished. Images are in the
prompt's messages, as OpenAI's servers take them, each with its bytes; they go to the ranks with the sample, and to no file.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from megarl.batch import Sample
from megarl.checks.without_engines import TOKEN_KEY, check_serve
from megarl.cluster import watch
from megarl.cluster.actor_group import ActorGroup, WorkerLate, raise_cause
from megarl.cluster.process_kinds import demand, files, processes
from megarl.cluster.session import interface_address, ray_session
from megarl.config import ConfigError, ServeConfig
from megarl.data.answers import text_of
from megarl.data.messages import Message, arguments_of, checked, tools_of
from megarl.data.prompts import Renderer
from megarl.data.rows import Row
from megarl.data.tokenizer import check_size, decode, encode
from megarl.driver.rank_group import RankGroup, reserve_workers, reward_scores, start_ranks
from megarl.environments.agents.contents import content_of
from megarl.host.http_client import token_of
from megarl.images import Image
from megarl.ranks.reward import RewardWorker
from megarl.ranks.step_plan import deal_scoring
from megarl.rewards.server import RewardServer

DOING = "serve"
TAIL = 8  # tokens at the end of a prompt that may open the response's thinking


class RankWatch:
    """Looks after ranks that nobody may be waiting for: a server without clients would not miss them.

    Args:
        group: the ranks.
        timeout_s: the longest time for a rank to answer, behind what it is scoring.
    """

    def __init__(self, group: ActorGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._asked: dict[Any, tuple[int, float]] = {}  # by the reference of the answer: the rank, and when it was asked

    def look(self) -> None:
        """Raise WorkerDied if a rank has ended, WorkerLate if one does not answer, and what the session's watch has seen. Never waits."""
        watch.check(DOING, {self._group.kind: self._group.actors})
        ready = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)[0] if self._asked else []
        for reference in ready:
            rank, _ = self._asked.pop(reference)
            try:
                ray.get(reference)
            except RayError as error:
                raise_cause(error, f"{self._group.kind} {rank}", DOING)
        for rank, since in self._asked.values():
            if time.monotonic() - since > self._timeout_s:
                raise WorkerLate(f"{DOING}: no answer within {self._timeout_s:g} s from {self._group.kind} {rank}", self._timeout_s)
        waited_for = {rank for rank, _ in self._asked.values()}
        for rank, actor in enumerate(self._group.actors):
            if rank not in waited_for:
                self._asked[actor.__ray_ready__.remote()] = rank, time.monotonic()


class Service:
    """A reward model behind `megarl.rewards.server`: tokenises what clients send, and has the ranks score it.

    Args:
        micro_batch_tokens: most tokens that a rank processes at once.
        renderer: tokenises the prompts.
        ranks: the ranks that hold the model.
        timeout_s: the time limit of one scoring.
    """

    def __init__(self, micro_batch_tokens: int, renderer: Renderer, ranks: RankGroup, timeout_s: float) -> None:
        self._micro_batch_tokens, self._renderer, self._ranks, self._timeout_s = micro_batch_tokens, renderer, ranks, timeout_s

    @property
    def sees(self) -> bool:
        """Whether prompts may have images."""
        return self._renderer.reader is not None

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Return one score per sample, for at least one sample. Raises whatever the ranks raise."""
        payloads, lengths = [ray.put(one) for one in samples], [len(one.tokens) for one in samples]
        plan = deal_scoring(payloads, lengths, self._ranks.layout.dp, self._micro_batch_tokens)
        return reward_scores(self._ranks, plan, len(samples), self._timeout_s)

    def read(self, samples: Sequence[Any]) -> list[Sample]:
        """Tokenise a client's samples. Raises ConfigError if one is malformed or too long, and whatever the tokenizer raises."""
        tokenizer, limit, key = self._renderer.tokenizer, self._renderer.most, self._renderer.limit_key
        rows = []
        for number, sample in enumerate(samples):
            place = f"sample {number}"
            if not isinstance(sample, dict) or not isinstance(sample.get("response"), str):
                raise ConfigError(f"{place}: needs a text 'prompt' and a text 'response'")
            given, images = self._seen(sample.get("prompt"), place)
            chat = given if isinstance(given, str) and given.strip() else checked(given, place)  # what is said may be messages in JSON
            meta = sample["meta"] if isinstance(sample.get("meta"), dict) else {}
            tools, arguments = tools_of(meta, place), arguments_of(meta, place)
            # Before the chat template, whose memory is unbounded in this thread. All keys count, since a template may read any of them.
            rendered = json.dumps([chat, tools, arguments], ensure_ascii=False)
            check_size(tokenizer, rendered, limit, f"{place}: the prompt, as JSON", key)
            rows.append(Row(place, chat, sample["response"], {"finished": bool(sample.get("finished", True))}, tools, arguments, images))
        prompts = self._renderer.all(iter(rows))
        read_before = [decode(tokenizer, prompt.tokens[-TAIL:], finished=False) for prompt in prompts]
        texts = [self._renderer.response(before, text_of(row.answer)) for before, row in zip(read_before, rows, strict=True)]
        for row, text in zip(rows, texts, strict=True):
            check_size(tokenizer, text, limit, f"{row.place}: the response", key)
        responses = encode(tokenizer, texts, special=False) if rows else []
        tokenised = []
        for prompt, response in zip(prompts, responses, strict=True):
            end = [tokenizer.convert_tokens_to_ids(self._renderer.end)] if prompt.meta["finished"] else []
            tokens = np.array([*prompt.ids, *response, *end], dtype=np.int32)
            if len(tokens) > limit:
                raise ConfigError(f"sample {prompt.id}: {len(tokens)} tokens are more than {key}={limit}")
            tokenised.append(
                Sample(
                    tokens,
                    len(prompt.ids),
                    np.zeros(len(tokens) - len(prompt.ids), np.float32),
                    "stop" if end else "length",
                    images=prompt.images,
                )
            )
        return tokenised

    def _seen(self, prompt: Any, place: str) -> tuple[Any, Sequence[Image]]:
        """Return a prompt with marks for its images, and these. Raises ConfigError for an image that is not taken."""
        reader, messages = self._renderer.reader, list[Message]()
        if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
            return prompt, ()
        for n, message in enumerate(prompt):
            content, where = message.get("content"), f"{place}: message {n}"
            parts = content_of(content, where) if isinstance(content, list) else content
            if isinstance(parts, list) and reader is None:
                raise ConfigError(f"{where}: the model sees no images")
            if isinstance(parts, list) and message.get("role") == "assistant":
                raise ConfigError(f"{where}: images of the assistant are not read")
            if not isinstance(parts, list) and not isinstance(content, str | None):
                return prompt, ()  # which `checked` refuses: parts that are all texts, or no parts
            messages.append({**message, "content": parts})
        try:
            return (prompt, ()) if reader is None else reader.heard(messages)
        except ConfigError as error:
            raise type(error)(f"{place}: {error}") from None


def serve(config: ServeConfig) -> None:
    """Serve scores until interrupted. Raises the ranks' error if they fail, also while no client asks for scores."""
    renderer = check_serve(config)
    host = "127.0.0.1" if config.cluster.interface is None else interface_address(config.cluster.interface)
    kinds = demand(config)
    with ray_session(config.cluster, processes(kinds), files(config)[0]):
        [places] = reserve_workers(config, kinds)
        group = start_ranks(RewardWorker, config, config.layout, places, config.model.path)
        ranks, timeout_s = RankGroup(group.kind, group.actors, ("reward",), config.layout), config.cluster.phase_timeout_s
        service = Service(config.serve.micro_batch_tokens, renderer, ranks, timeout_s)
        token = token_of(config.serve.token_env, TOKEN_KEY)
        with RewardServer(service, host, config.serve.port, config.serve.path, token) as server:
            print(f"{config.name}: serving {config.model.path} at http://{host}:{server.port}{config.serve.path}", flush=True)
            server.wait(RankWatch(group, 2 * timeout_s).look)
