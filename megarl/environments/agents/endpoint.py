"""The HTTP endpoint at which the agents of one sandbox ask the policy, each with a key of its own.

Its server is aiohttp's with bounded resources. A streamed answer has the events of the client's format, and is sent when it is whole; until
then comments keep the connection alive, since clients give up on one that is silent.
"""

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from megarl.environments.agents import chat, messages, responses
from megarl.environments.agents.questions import Answer, ChatRequest, Policy, Refusal
from megarl.host.http_server import BoundedServer, Refused, receive
from megarl.text.display import printable

LARGEST = 16 << 20  # bytes of a request
MOST_REFUSED = 100  # requests of one episode that may be refused; it ends with the next one
OPEN = 16  # requests of one agent that are open; the connections of further ones wait
SHOWN = 500  # characters of an error
ALIVE_S = 10.0  # between comments of a stream that waits for its answer
END_S = 0.1  # for answers to agents that have ended


@dataclass(frozen=True)
class Format:
    """One of the endpoint's formats."""

    read: Callable[[Mapping[str, Any]], ChatRequest]
    write: Callable[[Answer, str], dict[str, Any]]
    events: Callable[[Answer, Mapping[str, Any]], Iterator[chat.Event]]
    last: str | None = "[DONE]"  # what ends a stream, as data
    error: Callable[[Refusal], dict[str, Any]] = chat.error


FORMATS = {
    "/v1/chat/completions": Format(chat.read_chat, chat.write_chat, chat.chat_events),
    "/v1/completions": Format(chat.read_text, chat.write_text, chat.text_events),
    "/v1/responses": Format(responses.read, responses.write, responses.events, last=None),
    "/v1/messages": Format(messages.read, messages.write, messages.events, last=None, error=messages.error),
}


class Session:
    """What connects one running agent with the policy.

    Args:
        policy: the policy in its episode.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.open = 0  # requests that are being answered
        self.refused = 0
        self.begin()
        self.flooded = asyncio.Event()  # set when too many requests were refused

    def begin(self) -> None:
        """Note that the agent begins, or got an answer."""
        self.last = asyncio.get_running_loop().time()

    async def ask(self, question: ChatRequest) -> Answer:
        """Return the policy's answer. Raises Refusal."""
        self.open += 1
        try:
            return await self.policy.answer(question)
        finally:
            self.open -= 1
            self.begin()

    def idle(self) -> float:
        """Return the seconds since the agent had something to wait for."""
        return 0.0 if self.open else asyncio.get_running_loop().time() - self.last

    def refuse(self) -> None:
        """Count a refused request."""
        self.refused += 1
        if self.refused > MOST_REFUSED:
            self.flooded.set()


class Endpoint:
    """Answers the requests of agents; `sessions` has those that run, by their keys.

    Args:
        model: the name of the policy.
        listener: a listening socket.
        agents: the most agents that ask at a time.
        notes: what agents have asked for in vain, by name, shared by all endpoints of a run.
    """

    def __init__(self, model: str, listener: socket.socket, agents: int, notes: set[str]) -> None:
        self.sessions: dict[str, Session] = {}
        self._model, self._listener, self._notes = model, listener, notes
        listener.setblocking(False)
        self._server = BoundedServer(self._answer, _malformed, OPEN * agents)
        self._accepting = asyncio.create_task(self._server.accept(listener))

    async def close(self) -> None:
        """Close the listener and every connection."""
        self.stop()
        await self._server.end(END_S)
        self._listener.close()

    def stop(self) -> None:
        """Accept no further connection."""
        self._accepting.cancel()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        kind, session = FORMATS.get(request.path, FORMATS["/v1/chat/completions"]), self._session(request)
        try:
            if session is None:
                raise Refusal(401, "invalid_api_key", "this is not the key of an episode that runs here")
            if request.path == "/v1/models":
                return _json(200, {"object": "list", "data": [{"id": self._model, "object": "model", "created": 0, "owned_by": "megarl"}]})
            if request.path not in FORMATS:
                raise Refusal(404, "not_found", f"there are {', '.join(FORMATS)}")
            if request.method != "POST":
                raise Refusal(405, "method_not_allowed", "a completion is asked for with POST")
            body = await _body(request)
            if body.get("model") != self._model:
                other = f"{body.get('model')!r:.80}"
                raise Refusal(404, "model_not_found", f"there is no model {other}: environment.source.model={self._model}")
            question = _question(kind, body)
            self._note(question)
            if question.stream:
                return await _stream(request, kind, session, question, body)
            return _json(200, kind.write(await session.ask(question), self._model))
        except Refusal as refusal:
            if session is not None:
                session.refuse()
            return _json(refusal.status, kind.error(refusal))

    def _session(self, request: web.BaseRequest) -> Session | None:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        return self.sessions.get(bearer.strip() if bearer and scheme.lower() == "bearer" else request.headers.get("x-api-key", ""))

    def _note(self, question: ChatRequest) -> None:
        for name, value in question.unused.items():
            if name not in self._notes and len(self._notes) < MOST_REFUSED:
                self._notes.add(name)
                shown = printable(f"{name}={value!r:.60}")
                print(f"megarl: warning: an agent asks for {shown}: not used; sampling is the configuration's", file=sys.stderr, flush=True)


async def _body(request: web.BaseRequest) -> dict[str, Any]:
    read = bytearray()
    try:
        await receive(request, LARGEST, read.extend)
    except Refused as refused:
        raise Refusal(refused.status, "invalid_request", str(refused)) from None
    try:
        body = json.loads(read)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refusal(400, "invalid_json", "the body must be a JSON object")
    return body


def _malformed(status: int, text: str) -> web.Response:
    """Answer what is no valid HTTP."""
    return _json(status, chat.error(Refusal(status, "invalid_request", text)))


def _question(kind: Format, body: dict[str, Any]) -> ChatRequest:
    try:
        return kind.read(body)
    except Refusal:
        raise
    except Exception as error:  # a client may send anything anywhere
        raise Refusal(400, "invalid_request", f"{type(error).__name__}: {error}"[:SHOWN]) from None


async def _stream(
    request: web.BaseRequest, kind: Format, session: Session, question: ChatRequest, body: Mapping[str, Any]
) -> web.StreamResponse:
    """Send the policy's answer as a stream. Raises Refusal before the stream has begun; later it is the stream's last event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    response.force_close()
    asking = asyncio.ensure_future(session.ask(question))
    try:
        while not (await asyncio.wait([asking], timeout=ALIVE_S))[0]:
            with suppress(ConnectionError):  # what the policy says to a client that is gone counts all the same
                await response.prepare(request)
                await response.write(b": waiting for the policy\n\n")
        events, last = kind.events(await asking, body), kind.last
    except Refusal as refusal:
        if not response.prepared:
            raise
        session.refuse()
        events, last = iter([("error", kind.error(refusal))]), None
    finally:
        asking.cancel()
    await response.prepare(request)
    for name, data in events:
        await response.write((f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(data)}\n\n".encode())
    if last is not None:
        await response.write(f"data: {last}\n\n".encode())
    await response.write_eof()
    return response


def _json(status: int, answer: dict[str, Any]) -> web.Response:
    """Return a response that closes the connection, so that idle ones take no room."""
    response = web.json_response(answer, status=status)
    response.force_close()
    return response
