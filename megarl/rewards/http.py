"""Score responses through a user's server: any program that speaks this protocol.

    POST <url>    Content-Type: application/json    Authorization: Bearer <token>, where token_env names one
    {"samples": [{"prompt": "2+2=", "response": "4", "answer": "4", "meta": {...}, "finished": true}, ...]}

    200    {"scores": [1.0, {"score": 0.5, "format": 1.0}, null, ...]}

With `images`, the prompt of a sample with images is the whole conversation as OpenAI's servers take it; each image is a part with the
file's own bytes, {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}. A request has at most `MOST_IMAGES` bytes of
them, and a response whose prompt alone has more has no score. The health check then has "images": true, which a server that would not see
them may refuse.

One score per sample, in order: a finite number, or an object with a finite number under `score` and parts of the score under other keys
(entries that are not finite numbers are left out, except a text under `feedback`). null, alone or under `score`, is no score: the response
takes no part. `meta` is the prompt source's metadata of the prompt. An empty list of samples is a health check, answered with an empty list
of scores. A request may be repeated with the same samples, so scoring must have no side effects.

Failed connections, late answers and the statuses 408, 429 and 5xx are retried (`megarl.host.http_calls`). However scoring fails, the
outcome is RewardUnavailable, and never a score of 0.
"""

import json
from collections.abc import Sequence
from typing import Any, Self

from megarl.config import ConfigError, HttpReward
from megarl.config.section import web_address
from megarl.data.images import sent
from megarl.host.http_calls import Fault, HttpQuestion, PermanentFault, Round, Server, Unanswered, ask_all, exchange
from megarl.host.http_client import token_of, unanswered
from megarl.rewards.score import LOOK_S, Look, RewardUnavailable, Score, ScoreRequest, no_look
from megarl.rewards.verifiers import Abstained, BadReturn, read_return
from megarl.text.display import one_line

LARGEST_SCORE = 1 << 16  # bytes of the answer per sample
MAX_URL = 4096  # characters
MAX_PART = 60  # characters of the name of a part of a score
MOST_IMAGES = 32 << 20  # bytes of the images of a request as data URLs
TOO_LARGE = "images too large"


def check(source: HttpReward, key: str = "reward.source") -> None:
    """Raise ConfigError if the token is missing or the server does not answer a request without samples, which is sent once.

    Args:
        source: the settings of the server.
        key: the dotted key of these settings in the configuration.
    """
    token = token_of(source.token_env, f"{key}.token_env")
    try:
        url, place = address(source, key)
    except ConfigError as error:
        unanswered(str(error))
        return
    try:
        exchange(
            Server(url, place, token), _question([], source.images), source.timeout_s, f"{key}.timeout_s={source.timeout_s:g}", Round()
        )
    except Fault as error:
        unanswered(f"{place}: {error}")


def address(source: HttpReward, key: str) -> tuple[str, str]:
    """Return a server's address, and its description for messages. Raises ConfigError if `url_file` holds no address."""
    if source.url is not None:
        return source.url, f"{key}.url: {source.url}"
    assert source.url_file is not None, "as the configuration has checked"
    place = f"{key}.url_file: {source.url_file}"
    try:
        with source.url_file.open(encoding="utf-8") as file:
            url = web_address(file.read(MAX_URL).strip())
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None
    return url, f"{place}: {url}"


class HttpScorer:
    """The client of a reward server.

    Args:
        source: the settings of the server.
        connections: the number of batches, of `source.batch_size` responses each, that may be in flight at a time.
        require_finished: score responses cut by the length limit 0, without sending them.
        key: the dotted key of these settings in the configuration.
        look: see `Look`.
    """

    guarantee = None

    def __init__(
        self, source: HttpReward, connections: int, require_finished: bool, key: str = "reward.source", look: Look = no_look
    ) -> None:
        self._source, self._connections, self._require_finished, self._key, self._look = source, connections, require_finished, key, look
        self._server = Server(*address(source, key), token_of(source.token_env, f"{key}.token_env"))

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score per request, in order. With `require_finished`, responses cut by the length limit score 0 without being sent.

        Raises RewardUnavailable after a permanent fault, `source.attempts` attempts of one batch, or `source.deadline_s` seconds.
        """
        scores = [Score(0.0, scored=False)] * len(requests)
        numbers = [n for n, request in enumerate(requests) if request.finished or not self._require_finished]
        sizes = [_size(request) if self._source.images else 0 for request in requests]
        for n in numbers:
            if sizes[n] > MOST_IMAGES:
                scores[n] = Score(None, error=f"{TOO_LARGE}: {sizes[n]} bytes as data URLs, more than {MOST_IMAGES}")
        batches = _batches([n for n in numbers if sizes[n] <= MOST_IMAGES], sizes, self._source.batch_size)

        def question(batch: int) -> HttpQuestion[list[Score]]:
            return _question([requests[n] for n in batches[batch]], self._source.images)

        try:
            answers = ask_all(self._server, self._source, self._key, len(batches), question, self._connections, self._look, LOOK_S)
        except Unanswered as error:
            raise RewardUnavailable(str(error)) from None
        for batch, answer in zip(batches, answers, strict=True):
            for n, score in zip(batch, answer, strict=True):
                scores[n] = score
        return scores

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


def _size(request: ScoreRequest) -> int:
    """Return how many bytes the images of a response's prompt have as data URLs."""
    return sum(4 * len(image.read()) // 3 for image in request.images)


def _batches(numbers: Sequence[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Group responses, in order: at most so many, and `MOST_IMAGES` bytes of images, in each group."""
    batches, size = list[list[int]](), 0
    for n in numbers:
        if not batches or len(batches[-1]) == most or size + sizes[n] > MOST_IMAGES:
            batches.append([])
            size = 0
        batches[-1].append(n)
        size += sizes[n]
    return batches


def _question(requests: Sequence[ScoreRequest], images: bool) -> HttpQuestion[list[Score]]:
    """Return the request that asks for these responses' scores. `images`: those of the prompts are sent."""
    prompts = [sent(ask.given, ask.images) if images and ask.images else ask.prompt for ask in requests]
    samples = [
        {"prompt": prompt, "response": ask.response, "answer": ask.answer, "meta": ask.meta, "finished": ask.finished}
        for prompt, ask in zip(prompts, requests, strict=True)
    ]
    asked = {"samples": samples, **({"images": True} if images and not samples else {})}
    body, count = json.dumps(asked, default=str).encode(), len(samples)
    return HttpQuestion(body, LARGEST_SCORE * (count + 1), f"{count} samples", lambda text: _read(text, count))


def _read(text: bytes, samples: int) -> list[Score]:
    """Return the scores in an answer. Raises PermanentFault if it does not follow the protocol."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        raise PermanentFault(f"the answer is not JSON: {text[:60]!r}") from None
    scores = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(scores, list):
        raise PermanentFault(f"the answer has no list `scores`: {text[:60]!r}")
    if len(scores) != samples:
        raise PermanentFault(f"{len(scores)} scores for {samples} samples")
    results = []
    for n, score in enumerate(scores):
        try:
            value, parts = read_return(score, f"score {n} of {samples}:")
        except Abstained:
            results.append(Score(None, error="abstained"))
            continue
        except BadReturn as error:
            raise PermanentFault(str(error)) from None
        results.append(Score.of(value, {one_line(name, MAX_PART): part for name, part in parts.items()}))
    return results
