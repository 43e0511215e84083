"""The format of Anthropic's `/v1/messages`, as a translation from and to the chat format."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.data.messages import Message
from megarl.environments.agents.chat import Event, chat_request, read_limits, read_messages, unused
from megarl.environments.agents.contents import content_of, text_of
from megarl.environments.agents.questions import Answer, ChatRequest, Refusal

USED = {"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"}


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Read a request. Raises Refusal."""
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"], "system")})
    given = body.get("messages")
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise Refusal(400, "invalid_request_error", "messages must be a list of objects")
    for number, one in enumerate(given):
        messages += _message(one, f"message {number}")
    tools = body.get("tools")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(one, dict) and "input_schema" in one for one in tools)):
        raise Refusal(400, "invalid_request_error", "tools must be a list of tools with an input_schema; there are no server tools")
    schemas = None if not tools else [_schema(tool) for tool in tools]
    messages, schemas = read_messages(messages, schemas)
    choice = (body.get("tool_choice") or {}).get("type", "auto")
    return chat_request(messages, schemas, choice, unused(body, USED), read_limits(body, "max_tokens"))


def _message(one: dict[str, Any], place: str) -> list[Message]:
    """Return a message's blocks as messages: the results of tools are messages of their own."""
    role, content = one.get("role"), one.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refusal(400, "invalid_request_error", f"{place}: content must be a text or a list of blocks")
    results, spoken, calls, thoughts = list[Message](), list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for block in content:
        match block.get("type"):
            case "text" | "image":
                spoken.append(block)
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"type": "function", "id": block.get("id"), "function": function})
            case "tool_result":
                said = content_of(block.get("content"), place) or ""
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
            case other:
                raise Refusal(
                    400, "invalid_request_error", f"{place}: the type {other!r:.40} is not read: only texts, images and tools are"
                )
    message: Message = {"role": role, "content": content_of(spoken, place)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, *([message] if spoken or calls or thoughts or not results else [])]


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    return [*blocks, *({"type": "tool_use", "id": one.id, "name": one.name, "input": json.loads(one.arguments)} for one in answer.calls)]


def _reason(answer: Answer) -> str:
    return "max_tokens" if not answer.finished else "tool_use" if answer.calls else "end_turn"


def write(answer: Answer, model: str) -> dict[str, Any]:
    """Write the answer."""
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens}
    head = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": model}
    return {**head, "content": _blocks(answer), "stop_reason": _reason(answer), "stop_sequence": None, "usage": usage}


def events(answer: Answer, body: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a streamed answer."""
    whole = write(answer, body["model"])
    yield _event("message_start", message={**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}})
    empty: dict[str, Any]
    for index, block in enumerate(whole["content"]):
        match block["type"]:
            case "text":
                empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
            case "thinking":
                empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
            case _:
                empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_start", index=index, content_block={**block, **empty})
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta={"stop_reason": whole["stop_reason"], "stop_sequence": None}, usage=whole["usage"])
    yield _event("message_stop")


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def error(refusal: Refusal) -> dict[str, Any]:
    """Write the answer to a refused request."""
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    return {"type": "error", "error": {"type": kinds.get(refusal.status, "invalid_request_error"), "message": f"{refusal.code}: {refusal}"}}
