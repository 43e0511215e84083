"""`megarl serve`: a reward model on Megatron ranks that scores over HTTP, for runs on other machines (`reward.source.type=http`).

The protocol is that of `megarl.rewards.http`; of a sample `prompt`, `response` and `finished` count. Its tokens are made as training makes
them: the prompt through the chat template (or `data.template`), the response, and the end token where it is finished.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from megarl.batch import Sample
from megarl.cluster.session import interface_address, ray_session
from megarl.config import ConfigError, ServeConfig
from megarl.data.prompts import Row, checked, tokenised
from megarl.data.tokenizer import check_size, check_template, encode, load_tokenizer
from megarl.rewards.http import token_of
from megarl.stages.checks import check_model, check_trained_head
from megarl.workers.plan import deal_scoring
from megarl.workers.reward import RewardWorker
from megarl.workers.worker_group import WorkerGroup, reserve_workers, start_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST = 256 << 20  # bytes of a request
IDLE_S = 60.0  # a client that sends nothing for so long is left


class Service:
    """Scores of samples as they come over the wire; one request at a time has the ranks."""

    def __init__(self, config: ServeConfig, tokenizer: PreTrainedTokenizerBase, ranks: WorkerGroup) -> None:
        self._config, self._tokenizer, self._ranks = config, tokenizer, ranks
        self._turn = threading.Lock()

    def scores(self, read: Sequence[Sample]) -> list[float]:
        """One score a sample. Raises whatever the ranks raise."""
        if not read:
            return []
        places, lengths = [(0, n) for n in range(len(read))], [len(one.tokens) for one in read]
        with self._turn:
            plan = deal_scoring([ray.put(list(read))], places, lengths, self._ranks.layout.dp, self._config.serve.micro_batch_tokens)
            found = self._ranks.rewards(plan)
        return [found[n] for n in range(len(read))]

    def read(self, samples: Sequence[Any]) -> list[Sample]:
        """The tokens of what a client has sent. ConfigError for a malformed or too long one; whatever the tokenizer raises."""
        settings, data = self._config.serve, self._config.data
        rows = []
        for number, sample in enumerate(samples):
            place = f"sample {number}"
            if not isinstance(sample, dict) or not isinstance(sample.get("response"), str):
                raise ConfigError(f"{place}: needs a text 'prompt' and a text 'response'")
            rows.append(
                Row(place, checked(sample.get("prompt"), place), sample["response"], {"finished": bool(sample.get("finished", True))})
            )
        limit, key = settings.max_tokens, "serve.max_tokens"
        prompts = tokenised(iter(rows), self._tokenizer, data.chat, data.template, limit, "data.samples", key)
        for row in rows:
            check_size(self._tokenizer, row.answer, limit, f"{row.place}: the response", key)
        responses = encode(self._tokenizer, [row.answer for row in rows], special=False) if rows else []
        read = []
        for prompt, response in zip(prompts, responses, strict=True):
            end = [self._tokenizer.eos_token_id] if prompt.meta["finished"] else []
            tokens = np.array([*prompt.ids, *response, *end], dtype=np.int32)
            if len(tokens) > limit:
                raise ConfigError(f"sample {prompt.id}: {len(tokens)} tokens are more than {key}={limit}")
            read.append(Sample(tokens, len(prompt.ids), np.zeros(len(tokens) - len(prompt.ids), np.float32), "stop" if end else "length"))
        return read


class Server(ThreadingHTTPServer):
    """Listens until it is told to stop, or until its ranks fail."""

    daemon_threads = True

    def __init__(self, config: ServeConfig, service: Service, host: str) -> None:
        super().__init__((host, config.serve.port), Handler)
        self.service, self.path = service, config.serve.path
        token = token_of(config.serve.token_env, "serve.token_env")
        self.authorization = None if token is None else f"Bearer {token}"
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Ends `serve_forever`; its caller raises the error."""
        self.failure = error
        threading.Thread(target=self.shutdown).start()  # it waits for the loop, which waits for nobody


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def do_POST(self) -> None:
        """Answers a batch of samples, or says in one line what is wrong with it."""
        status, answer = self._answer()
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for every request is too much."""

    def _answer(self) -> tuple[int, Any]:
        server, given = self.server, self.headers.get("Authorization", "")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST:
            self.close_connection = True
            return 413, {"error": f"a request needs a Content-Length of at most {LARGEST}"}
        body = self.rfile.read(int(length))
        if server.authorization is not None and not hmac.compare_digest(given.encode(), server.authorization.encode()):
            return 401, {"error": "another token is asked for"}
        if self.path != server.path:
            return 404, {"error": f"scores are at {server.path}"}
        try:
            asked = json.loads(body)
            samples = asked.get("samples") if isinstance(asked, dict) else None
            if not isinstance(samples, list):
                return 400, {"error": "the request has no list `samples`"}
            read = server.service.read(samples)
        except Exception as error:  # of the client's making: nothing has reached the ranks
            return 400, {"error": " ".join(str(error).split())}
        try:
            return 200, {"scores": server.service.scores(read)}
        except BaseException as error:
            server.fail(error)
            return 500, {"error": f"{type(error).__name__}: {error}"}


def check_serve(config: ServeConfig) -> None:
    """All checks of `megarl serve`."""
    hf = check_model(config, "value")
    check_trained_head(config.model.path, "model.path")
    token_of(config.serve.token_env, "serve.token_env")
    tokenizer, limit = load_tokenizer(config.model.path), config.serve.max_tokens
    if config.data.chat and not tokenizer.chat_template:
        raise ConfigError("data.chat: the tokenizer has no chat template; give data.template and data.chat=false")
    if config.data.chat:
        check_template(tokenizer, "data.chat")
    if limit > config.serve.micro_batch_tokens:
        raise ConfigError(f"serve.micro_batch_tokens={config.serve.micro_batch_tokens} is below serve.max_tokens={limit}")
    if limit > int(hf["max_position_embeddings"]):
        raise ConfigError(f"serve.max_tokens={limit}: the model takes {hf['max_position_embeddings']}")


def serve(config: ServeConfig) -> None:
    """Scores until it is interrupted. Raises what its ranks raised, should they fail."""
    check_serve(config)
    host = "127.0.0.1" if config.cluster.interface is None else interface_address(config.cluster.interface)
    with ray_session(config.cluster, config.layout.ranks):
        places = reserve_workers(config, ranks=config.layout.ranks)
        group = start_ranks(RewardWorker, config, config.layout, places, config.model.path)
        ranks = WorkerGroup(group, ("reward",), config.layout, config.cluster.phase_timeout_s)
        service = Service(config, load_tokenizer(config.model.path), ranks)
        with Server(config, service, host) as server:
            print(f"{config.name}: serving {config.model.path} at http://{host}:{server.server_port}{config.serve.path}", flush=True)
            server.serve_forever()
            if server.failure is not None:
                raise server.failure
