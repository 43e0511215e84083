"""The format of OpenAI's `/v1/responses`, translated from and to the chat format. Nothing is stored: each request has its whole input."""

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.data.messages import Message
from megarl.environments.agents.chat import Event, chat_request, read_limits, read_messages, unused
from megarl.environments.agents.contents import content_of, details_of, text_of
from megarl.environments.agents.questions import Answer, ChatRequest, Refusal

USED = {"model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "store"}


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Read a request. Raises Refusal."""
    if body.get("previous_response_id") or body.get("conversation"):
        raise Refusal(400, "unsupported", "nothing is stored: send the whole input instead of previous_response_id or conversation")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(one, dict) for one in items):
        raise Refusal(400, "invalid_input", "input must be a text or a list of items")
    for number, item in enumerate(items):
        _add(messages, item, f"item {number}")
    tools = body.get("tools") or None
    if tools is not None and (
        not isinstance(tools, list) or not all(isinstance(one, dict) and one.get("type") == "function" for one in tools)
    ):
        raise Refusal(400, "invalid_tools", "tools must be a list of functions; there are no built-in tools")
    schemas = None if tools is None else [{"type": "function", "function": _function(tool)} for tool in tools]
    messages, schemas = read_messages(messages, schemas)
    more = unused(body, USED) | details_of(items)
    return chat_request(messages, schemas, body.get("tool_choice"), more, read_limits(body, "max_output_tokens"))


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}


def _add(messages: list[Message], item: dict[str, Any], place: str) -> None:
    """Add an item to the messages: the reasoning, text and calls of one answer are one message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content_of(item.get("output"), place)})
        return
    if kind == "message" and item.get("role") != "assistant":
        messages.append({"role": item.get("role"), "content": content_of(item.get("content"), place)})
        return
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    match kind:
        case "message":
            messages[-1]["content"] += text_of(item.get("content"), place) or ""
        case "reasoning":
            messages[-1]["reasoning_content"] = text_of(item.get("content") or item.get("summary") or "", place)
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            messages[-1].setdefault("tool_calls", []).append({"type": "function", "id": item.get("call_id"), "function": function})
        case _:
            raise Refusal(400, "invalid_input", f"{place}: the type {kind!r:.40} is not read: only texts and functions are")


def _items(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        thought: list[dict[str, Any]] = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{answer.number}", "summary": [], "content": thought, "status": "completed"})
    if answer.content or not answer.calls:
        content = [{"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": f"msg_{answer.number}", "role": "assistant", "status": "completed", "content": content})
    for one in answer.calls:
        call = {"call_id": one.id, "name": one.name, "arguments": one.arguments}
        items.append({"type": "function_call", "id": f"fc_{one.id}", "status": "completed", **call})
    return items


def write(answer: Answer, model: str) -> dict[str, Any]:
    """Write the answer."""
    ended: dict[str, Any] = {"status": "completed", "incomplete_details": None}
    if not answer.finished:
        ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    usage = {
        **{"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens, "total_tokens": answer.prompt_tokens + answer.tokens},
        **{"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
    }
    head = {"id": f"resp_{answer.number}", "object": "response", "created_at": 0, "model": model, "error": None, "metadata": {}}
    tail = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "instructions": None, "temperature": None, "top_p": None}
    return {**head, **ended, "output": _items(answer), "usage": usage, **tail}


def events(answer: Answer, body: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of a streamed answer."""
    whole, number = write(answer, body["model"]), 0

    def event(name: str, /, **data: Any) -> Event:
        nonlocal number
        number += 1
        return name, {"type": name, "sequence_number": number - 1, **data}

    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("response.output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"})
        if item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        elif item["type"] == "message":
            [part] = item["content"]
            yield event("response.content_part.added", **place, content_index=0, part={**part, "text": ""})
            yield event("response.output_text.delta", **place, content_index=0, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **place, content_index=0, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, content_index=0, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed" if answer.finished else "response.incomplete", response=whole)
