"""The formats of OpenAI's `/v1/chat/completions` and `/v1/completions`."""

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.data.messages import Message, checked_chat
from megarl.environments.agents.contents import content_of, details_of, texts_of
from megarl.environments.agents.questions import Answer, ChatRequest, Refusal

Event = tuple[str | None, dict[str, Any]]  # an event of a stream: its name, and its data
USED = {"model", "messages", "prompt", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"}


def read_messages(messages: Any, tools: Any) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Return checked messages and tools of the chat format; a content with images is a list of parts (`content_of`). Raises Refusal."""
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise Refusal(400, "invalid_messages", "messages must be a list of objects, at least one")
    contents = [content_of(one.get("content"), f"message {n}") for n, one in enumerate(messages)]
    texts = [one if content is None else {**one, "content": texts_of(content)} for one, content in zip(messages, contents, strict=True)]
    try:
        said = checked_chat(texts, "the conversation", False)
    except ValueError as error:
        raise Refusal(400, "invalid_messages", str(error)) from None
    for n, content in enumerate(contents):
        if isinstance(content, list):
            if said[n]["role"] not in ("user", "tool"):
                raise Refusal(400, "invalid_content", f"message {n}: images are read of users and tools, not of {said[n]['role']!r:.40}")
            said[n] = {**said[n], "content": content}
    if said[-1]["role"] == "assistant":
        raise Refusal(400, "invalid_messages", "the last message is the assistant's, whom the policy plays; it begins its answers itself")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise Refusal(400, "invalid_tools", "tools must be a list of schemas")
    return said, tools or None


def read_limits(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the arguments of ChatRequest that all formats share. `names`: the keys of the client's limit. Raises Refusal."""
    most = next((body[name] for name in names if body.get(name) is not None), None)
    stop = body.get("stop", body.get("stop_sequences")) or []
    stops = [stop] if isinstance(stop, str) else stop
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise Refusal(400, "invalid_limit", f"{most!r:.40}: the limit of tokens must be a whole number above 0")
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops) or len(stops) > 16:
        raise Refusal(400, "invalid_stop", f"stop={stop!r:.80}: a text, or a list of at most 16 texts")
    return {"max_tokens": most, "stop": stops, "stream": body.get("stream") is True}


def unused(body: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    """Return what a client asks for and does not get."""
    return {name: value for name, value in body.items() if name not in used and not (value is None or value is False or value in ([], {}))}


def chat_request(
    messages: list[Message], tools: list[dict[str, Any]] | None, choice: str | None, more: dict[str, Any], limits: dict[str, Any]
) -> ChatRequest:
    """Return the request for an answer to a conversation.

    Args:
        messages: from `read_messages`, as are the tools.
        tools: the tools.
        choice: the client's choice of tools; None: it has none. One that would require a call is not used.
        more: what else the client asks for and does not get.
        limits: from `read_limits`.
    """
    if choice not in (None, "auto", "none"):
        more = {**more, "tool_choice": choice}
    return ChatRequest(messages, tools=tools, calls=tools is not None and choice != "none", unused=more, **limits)


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Read a request to `/v1/chat/completions`. Raises Refusal."""
    if body.get("n") not in (None, 1):
        raise Refusal(400, "invalid_n", f"n={body['n']!r:.40}: a request has one answer")
    messages, tools = read_messages(body.get("messages"), body.get("tools"))
    choice, more = body.get("tool_choice"), unused(body, USED | {"n"}) | details_of(body["messages"])
    return chat_request(messages, tools, choice, more, read_limits(body, "max_completion_tokens", "max_tokens"))


def read_text(body: Mapping[str, Any]) -> ChatRequest:
    """Read a request to `/v1/completions`. Raises Refusal."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    tokens = isinstance(prompt, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in prompt)
    if not (isinstance(prompt, str) or tokens) or not prompt:
        raise Refusal(400, "invalid_prompt", "prompt must be one text, or the tokens of one")
    for name, default in (("n", 1), ("best_of", 1), ("echo", False), ("suffix", None)):
        if body.get(name) not in (None, default, ""):
            raise Refusal(400, f"invalid_{name}", f"{name}={body[name]!r:.40}: a request has one answer, without its prompt")
    more = unused(body, USED | {"n", "best_of", "echo", "suffix"})
    return ChatRequest(prompt=prompt, calls=False, unused=more, **read_limits(body, "max_tokens"))


def usage(answer: Answer) -> dict[str, int]:
    """Return an answer's tokens in OpenAI's form."""
    total = answer.prompt_tokens + answer.tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": total}


def chat_reason(answer: Answer) -> str:
    """Return why an answer ended."""
    return "length" if not answer.finished else "tool_calls" if answer.calls else "stop"


def chat_calls(answer: Answer) -> list[dict[str, Any]]:
    """Return an answer's calls in OpenAI's form."""
    return [{"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in answer.calls]


def write_chat(answer: Answer, model: str) -> dict[str, Any]:
    """Write the answer to `/v1/chat/completions`."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content if answer.content or not answer.calls else None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = chat_calls(answer)
    choice = {"index": 0, "message": message, "finish_reason": chat_reason(answer), "logprobs": None}
    return {**_head(answer, model, "chatcmpl", "chat.completion"), "choices": [choice], "usage": usage(answer)}


def chat_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a streamed answer to `/v1/chat/completions`."""
    head = _head(answer, body["model"], "chatcmpl", "chat.completion.chunk")

    def chunk(delta: dict[str, Any], reason: str | None = None) -> Event:
        return None, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}

    yield chunk({"role": "assistant", "content": ""})
    if answer.reasoning is not None:
        yield chunk({"reasoning_content": answer.reasoning})
    if answer.content:
        yield chunk({"content": answer.content})
    if answer.calls:
        yield chunk({"tool_calls": [{"index": index, **call} for index, call in enumerate(chat_calls(answer))]})
    yield chunk({}, chat_reason(answer))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield None, {**head, "choices": [], "usage": usage(answer)}


def write_text(answer: Answer, model: str) -> dict[str, Any]:
    """Write the answer to `/v1/completions`."""
    choice = {"index": 0, "text": answer.content, "finish_reason": chat_reason(answer), "logprobs": None}
    return {**_head(answer, model, "cmpl", "text_completion"), "choices": [choice], "usage": usage(answer)}


def text_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a streamed answer to `/v1/completions`."""
    yield None, write_text(answer, body["model"])


def _head(answer: Answer, model: str, prefix: str, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{answer.number}", "object": kind, "created": 0, "model": model}


def error(refusal: Refusal) -> dict[str, Any]:
    """Write the answer to a refused request."""
    return {"error": {"message": str(refusal), "type": refusal.code, "code": refusal.code, "param": None}}
