"""A teacher behind an OpenAI-compatible server that returns prompt_logprobs, as vLLM's does.

    GET  <url>/models         {"data": [{"id": "MODEL", "max_model_len": 4096}, ...]}
    POST <url>/completions    {"model": "MODEL", "prompt": [12, 7, ...], "prompt_logprobs": K, "max_tokens": 1, "temperature": 0}

    {"choices": [{"prompt_logprobs": [null, {"7": {"logprob": -0.5}, "3": {"logprob": -1.25}, ...}, ...]}]}

One entry for each token of the prompt: null for the first, and for each other one the log-probs, by token id, of the token itself and of
the K likeliest, at temperature 1. vLLM's server allows K up to its --max-logprobs, 20 by default, and prompts that leave room for the one
token of the answer in its max_model_len, which other servers need not tell.

Axes: T tokens that have tokens before them, C = 1 + K.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import ConfigError, TeacherServer
from megarl.data.tokenizer import decode, encode, load_tokenizer
from megarl.engines.engine import TokenScores
from megarl.host.http_calls import Fault, HttpQuestion, PermanentFault, Round, Server, ask_all, exchange
from megarl.host.http_client import token_of, unanswered

ENTRY, REST = 1024, 1 << 20  # bytes of an answer: for each log-prob, and for all else
PROBED = 200  # tokens of the text by which tokenizers are compared
TOO_MUCH = 1.001  # probabilities of different tokens that add up to more than this are none
LOOK_S = 1.0


def server_of(settings: TeacherServer, key: str) -> Server:
    """Return the server. Absent if its token is missing.

    Args:
        settings: the server's settings.
        key: their dotted key in the configuration.
    """
    token = token_of(settings.token_env, f"{key}.token_env")
    return Server(f"{settings.url.rstrip('/')}/completions", f"{key}.url: {settings.url}", token)


def score(server: Server, settings: TeacherServer, key: str, texts: Sequence[Sequence[int]], named: int) -> list[TokenScores]:
    """Return the scores of texts of at least two tokens each.

    Args:
        server: the server.
        settings: its settings.
        key: their dotted key in the configuration.
        texts: the tokens of each text.
        named: K.

    Raises:
        Unanswered: after a permanent fault, `settings.attempts` attempts for one text, or `settings.deadline_s` seconds.
    """

    def question(n: int) -> HttpQuestion[TokenScores]:
        return _question(settings.model, texts[n], named)

    return ask_all(server, settings, key, len(texts), question, settings.connections, lambda: None, LOOK_S)


def check_server(settings: TeacherServer, key: str, policy: Path, named: int, longest: int) -> None:
    """Check that a server has the model, that the longest context fits, that its tokenizer gives a text the policy's tokens, and that it
    returns prompt_logprobs.

    Args:
        settings: the server's settings.
        key: their dotted key in the configuration.
        policy: the policy's Hugging Face directory.
        named: K.
        longest: the most tokens of a context.

    Raises:
        ConfigError: it does not; if it does not answer, inside `elsewhere`, only a warning is printed.
    """
    server, tokenizer = server_of(settings, key), load_tokenizer(policy)
    models = Server(server.url.removesuffix("completions") + "models", server.place, server.token)
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    probe = decode(tokenizer, vocabulary[:: max(1, len(vocabulary) // PROBED)], finished=False)
    own = encode(tokenizer, [probe], special=False)[0][: min(PROBED, longest)]
    text = decode(tokenizer, own, finished=False)
    own = encode(tokenizer, [text], special=False)[0]

    def ask(place: Server, question: HttpQuestion[Any]) -> Any:
        return exchange(place, question, settings.timeout_s, f"{key}.timeout_s={settings.timeout_s:g}", Round())

    try:
        room_of = ask(models, HttpQuestion(None, REST, "its models", _rooms))
        if settings.model not in room_of:
            raise ConfigError(f"{key}.model: {settings.model!r} is not among the models of {settings.url}: {', '.join(room_of)}")
        if (room := room_of[settings.model]) <= longest:
            raise ConfigError(
                f"{key}: {settings.model} at {settings.url} takes {room:.0f} tokens (max_model_len), and the longest context has {longest} "
                "(rollout.max_prompt_tokens + rollout.max_response_tokens), with 1 more for the answer"
            )
        theirs = ask(server, _text_question(settings.model, text, len(own)))
        if theirs not in (own[1:], own):  # the latter of a server that begins every text with a special token
            place = next((n for n, (a, b) in enumerate(zip(theirs, own[1:], strict=False)) if a != b), min(len(theirs), len(own) - 1))
            raise ConfigError(
                f"{key}: the tokenizer of {settings.model} at {settings.url} differs from that of model.path={policy}: of {text!r:.60} it "
                f"makes {1 + len(theirs)} tokens and not {len(own)}, from token {place + 1} on others"
            )
        ask(server, _question(settings.model, own, named))
    except Fault as error:
        unanswered(f"{server.place}: {error}")


def _body(model: str, prompt: Any, named: int, **more: Any) -> bytes:
    body = {"model": model, "prompt": prompt, "prompt_logprobs": named, "max_tokens": 1, "temperature": 0, **more}
    return json.dumps(body).encode()


def _question(model: str, text: Sequence[int], named: int) -> HttpQuestion[TokenScores]:
    """Return the request for the scores of a text."""
    most = REST + ENTRY * len(text) * (1 + named)
    return HttpQuestion(_body(model, list(text), named), most, f"{len(text)} tokens", lambda answer: _scores(answer, text, named))


def _text_question(model: str, text: str, tokens: int) -> HttpQuestion[list[int]]:
    """Return the request for the tokens that the server makes of a text, without the first one; we make so many of it."""
    body = _body(model, text, 0, add_special_tokens=False)

    def read(answer: bytes) -> list[int]:
        return [next(iter(entry)) for entry in _entries(answer)]  # with K = 0 each has the token itself alone

    return HttpQuestion(body, REST + 4 * ENTRY * tokens, "a text", read)


def _scores(answer: bytes, text: Sequence[int], named: int) -> TokenScores:
    """Return what an answer says. Raises PermanentFault if it does not follow the protocol."""
    entries = _entries(answer)
    if len(entries) != len(text) - 1:
        raise PermanentFault(f"prompt_logprobs of {1 + len(entries)} tokens for {len(text)}")
    token_TC, logp_TC = np.empty((len(entries), 1 + named), np.int32), np.empty((len(entries), 1 + named), np.float32)
    for row, (token, entry) in enumerate(zip(text[1:], entries, strict=True)):
        best = sorted(entry, key=lambda one: -entry[one])[:named]
        if token not in entry or len(best) < named:
            has = "without the token itself" if token not in entry else f"of {len(entry)} tokens"
            raise PermanentFault(f"prompt_logprobs {has} at token {row + 1}, and {named} are asked for")
        if (total := math.fsum(map(math.exp, entry.values()))) > TOO_MUCH:
            raise PermanentFault(f"prompt_logprobs at token {row + 1} are no log-probs: their exponentials add up to {total:g}")
        token_TC[row], logp_TC[row] = [token, *best], [entry[token], *(entry[one] for one in best)]
    return TokenScores(token_TC, logp_TC)


def _entries(answer: bytes) -> list[dict[int, float]]:
    """Return the log-probs by token id of all tokens but the first. Raises PermanentFault if the answer does not have them."""
    try:
        _, *entries = json.loads(answer)["choices"][0]["prompt_logprobs"]
        logprobs = [{int(token): min(0.0, float(one["logprob"])) for token, one in entry.items()} for entry in entries]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise PermanentFault(f"the answer has no prompt_logprobs by token id: {answer[:60]!r}") from None
    if any(not entry or math.isnan(sum(entry.values())) for entry in logprobs):
        raise PermanentFault("prompt_logprobs that are empty or nan")
    return logprobs


def _rooms(answer: bytes) -> dict[str, float]:
    """Return the most tokens of a prompt and its answer for each model, infinity where the server does not say."""
    try:
        return {str(one["id"]): float(one.get("max_model_len") or math.inf) for one in json.loads(answer)["data"]}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise PermanentFault(f"the answer is no list of models: {answer[:60]!r}") from None
