"""A teacher on an engine of its own, or on a server, as a Ray actor: it scores finished samples and keeps the columns in the object store.

Axes: T entries of a context, C = 1 + N tokens that are scored at each: the context's own, and the N likeliest. K tokens of a column.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import ray

from megarl.batch import Sample
from megarl.config import TeacherServer
from megarl.data.taught import with_rest
from megarl.engines.actor import EngineActor
from megarl.engines.engine import Engine, RolloutError, Setup, Text, TokenScores
from megarl.engines.teacher_server import score
from megarl.host.http_calls import Server, Unanswered
from megarl.host.network import choose_nccl_interface, interface_towards
from megarl.images import within
from megarl.rewards.score import RewardUnavailable

COLUMN = "teacher_logp"
SPARE = 16  # more tokens are named, if a teacher's vocabulary is larger than the policy's, since some may not be the policy's

Unit = Sequence[tuple[int, int, int]]
"""Samples whose columns are stored together: each is a number of the S axis (see `ranks.step_plan`), which of the responses given beside
it it belongs to, and which of that response's contexts it is."""
Stored = list[tuple[list[int], Any]]
"""The columns, in the form of `ranks.assemble.Columns`."""


@dataclass(frozen=True)
class Columns:
    """What is kept of a teacher's scores."""

    top_k: int | None  # of so many of the likeliest tokens, one by one, and of all others together; None: of the context's own tokens
    vocabulary: int  # the policy's: tokens from this id on are never named

    def column(self, scores: TokenScores) -> np.ndarray:
        """Return the column of a context, float32 [T], or [T, 2 K + 1]: K token ids, their log-probs, and that of all others.

        Raises:
            RolloutError: fewer than K tokens of the policy's are among those that the teacher names.
        """
        if self.top_k is None:
            return scores.logp_TC[:, 0]
        token_TN, logp_TN = scores.token_TC[:, 1:], scores.logp_TC[:, 1:]
        known_TN = token_TN < self.vocabulary
        if len(known_TN) and (fewest := int(known_TN.sum(1).min())) < self.top_k:
            raise RolloutError(
                f"distillation.top_k={self.top_k}: of {token_TN.shape[1]} tokens that the teacher names at one place, {fewest} are of "
                f"the policy's vocabulary of {self.vocabulary}"
            )
        order_TK = np.argsort(~known_TN, axis=1, kind="stable")[:, : self.top_k]
        token_TK, logp_TK = np.take_along_axis(token_TN, order_TK, 1), np.take_along_axis(logp_TN, order_TK, 1)
        return with_rest(token_TK, logp_TK)

    def store(self, units: Sequence[Unit], texts: Sequence[Text], scores: Sequence[TokenScores]) -> Stored:
        """Put the columns of each unit into the object store.

        Args:
            units: the samples.
            texts: each sample's context, from `contexts`.
            scores: those of each text of at least two tokens.
        """
        scored, nothing = iter(scores), np.empty((0, 1 + (self.top_k or 0)), np.float32)
        column_S = iter([self.column(next(scored) if len(text.tokens) > 1 else TokenScores(nothing, nothing)) for text in texts])
        return [([sample for sample, _, _ in unit], ray.put([{COLUMN: next(column_S)} for _ in unit])) for unit in units]


def contexts(units: Sequence[Unit], responses: Sequence[Sample]) -> list[Text]:
    """Return each sample's context, in order.

    Args:
        units: the samples.
        responses: the responses that they belong to.
    """
    bounds = [[*pairwise((0, *response.starts, len(response.tokens)))] for response in responses]

    def text(response: Sample, start: int, end: int) -> Text:
        return Text(response.tokens[start:end].tolist(), within(response.images, start, end))

    return [text(responses[n], *bounds[n][context]) for unit in units for _, n, context in unit]


def named(top_k: int | None, vocabulary: int, policy: int) -> int:
    """Return how many tokens a teacher has to name.

    Args:
        top_k: `distillation.top_k`.
        vocabulary: the size of the teacher's vocabulary.
        policy: the size of the policy's.
    """
    return 0 if top_k is None else top_k + min(SPARE, max(0, vocabulary - policy))


class EngineTeacher(EngineActor):
    """Holds one engine of a teacher."""

    async def open(self, setup: Setup, columns: Columns, timeout_s: float) -> None:
        """Start the engine.

        Args:
            setup: what it runs.
            columns: what is kept of its scores.
            timeout_s: the time limit for the samples of a step.
        """
        self._engine: Engine = self._engine_class(self._label)
        self._columns, self._timeout_s = columns, timeout_s
        choose_nccl_interface(interface_towards(ray.util.get_node_ip_address()))
        await self._engine.start(setup)

    async def score(self, units: Sequence[Unit], payload_N: Sequence[Any]) -> Stored:
        """Score samples.

        Args:
            units: the samples.
            payload_N: references to the responses that they belong to.
        """
        texts = contexts(units, await asyncio.gather(*payload_N))
        scored = await self._engine.score([text for text in texts if len(text.tokens) > 1], self._timeout_s)
        return self._columns.store(units, texts, scored)

    async def close(self) -> None:
        """End the engine's processes."""
        await self._engine.close()


class ServerTeacher:
    """The client of a teacher's server.

    Args:
        settings: the server's settings.
        key: their dotted key in the configuration.
        server: the server, with its token.
        columns: what is kept of its scores.
    """

    def __init__(self, settings: TeacherServer, key: str, server: Server, columns: Columns) -> None:
        self._settings, self._key, self._server, self._columns = settings, key, server, columns

    def score(self, units: Sequence[Unit], payload_N: Sequence[Any]) -> Stored:
        """Score samples; arguments as `EngineTeacher.score` has them.

        Raises:
            RewardUnavailable: the server does not score them, after all attempts; or not the policy's tokens.
        """
        texts = contexts(units, ray.get(list(payload_N)))
        questions = [text.tokens for text in texts if len(text.tokens) > 1]
        try:
            scored = score(self._server, self._settings, self._key, questions, self._columns.top_k or 0)
            return self._columns.store(units, texts, scored)
        except (Unanswered, RolloutError) as error:
            raise RewardUnavailable(str(error)) from None
