"""A server as `megarl.engines.teacher_server` asks one: transformers' model behind the part of OpenAI's protocol that it reads."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from megarl.data.tokenizer import encode, load_tokenizer

Change = Callable[[dict[str, Any], int], tuple[int, Any]]
NAME = "teacher"


def honest(reply: dict[str, Any], number: int) -> tuple[int, Any]:
    return 200, reply


class TeacherServer:
    """Answers for a model; `change` turns each answer, numbered from 1, into a status and what is sent; `bodies` is what was asked."""

    def __init__(self, path: Path, change: Change) -> None:
        from transformers import AutoModelForCausalLM

        self._model, self._tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), load_tokenizer(path)
        self.bodies: list[dict[str, Any]] = []
        self.room: int | None = None  # the most tokens of a prompt and its answer, which it tells
        self._lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                room = {} if outer.room is None else {"max_model_len": outer.room}
                self._send(200, {"data": [{"id": NAME, **room}, {"id": "other"}]})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.bodies.append(asked)
                    self._send(*change({"choices": [{"prompt_logprobs": outer.scored(asked)}]}, len(outer.bodies)))

            def _send(self, status: int, reply: Any) -> None:
                body = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """A client that has given up is gone."""

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def scored(self, asked: dict[str, Any]) -> list[Any]:
        prompt, count = asked["prompt"], asked["prompt_logprobs"]
        tokens = encode(self._tokenizer, [prompt], special=False)[0] if isinstance(prompt, str) else prompt
        with torch.no_grad():
            logp_TV = self._model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        found: list[Any] = [None]
        for token, row_V in zip(tokens[1:], logp_TV, strict=False):
            best = [token, *row_V.topk(count).indices.tolist()]
            found.append({str(one): {"logprob": float(row_V[one]), "decoded_token": ""} for one in best})
        return found


@contextmanager
def serving(path: Path, change: Change = honest) -> Iterator[TeacherServer]:
    server = TeacherServer(path, change)
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
