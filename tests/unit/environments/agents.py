"""Agents of the tests: sound ones over public clients, and some that do what none should. Imported in the sandbox."""

import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openai import BadRequestError, OpenAI

Client: Any = OpenAI  # the types of its arguments are for people who write them by hand
MODEL = "parrot"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
Task = dict[str, Any]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tools_in_chat(task: Task) -> float:
    """OpenAI's loop: a call, its result, the answer; then a turn without a word of the tools' calls."""
    return _tools_in_chat(CALL, "<think>\nhm")


def tools_in_xml(task: Task) -> float:
    """The same with a model that writes each argument between marks, and whose template begins its reasoning."""
    arguments = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in {"a": 2, "b": 3}.items())
    return _tools_in_chat(f"<tool_call>\n<function=add>\n{arguments}</function>\n</tool_call>", "hm")


def _tools_in_chat(written: str, thought: str) -> float:
    client, messages = Client(), [user(f"say {thought}\n</think>\n\nso {written}")]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    [choice] = first.choices
    assert (choice.finish_reason, choice.message.content, choice.message.reasoning_content) == ("tool_calls", "so", "hm"), choice
    [call] = choice.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 3}
    messages += [choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "say 5"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, tool_choice="auto")
    assert (
        second.choices[0].message.content == "5"
        and second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
    )
    refused = client.chat.completions.create(model=MODEL, messages=[user(f"say {written}")], tools=TOOLS, tool_choice="none")
    assert refused.choices[0].message.tool_calls is None and refused.choices[0].message.content == written
    return 1.0


def streams(task: Task) -> float:
    """OpenAI's streams, and its older endpoint."""
    client = Client()
    with client.chat.completions.stream(model=MODEL, messages=[user(f"say {CALL}")], tools=TOOLS) as stream:
        chat = stream.get_final_completion()
    assert chat.choices[0].message.tool_calls and chat.choices[0].message.tool_calls[0].function.arguments == '{"a": 2, "b": 3}'
    parts = client.chat.completions.create(
        model=MODEL,
        messages=[user("say one two")],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(parts)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one two"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
    text = client.completions.create(model=MODEL, prompt="say three", max_tokens=50, stop=["re"])
    assert (text.choices[0].text, text.choices[0].finish_reason) == ("th", "stop")
    more = client.completions.create(model=MODEL, prompt="say threethre say four")  # which goes on from what was sampled
    assert more.choices[0].text == "four"
    streamed = client.completions.create(model=MODEL, prompt="say three", stream=True)
    assert "".join(one.choices[0].text for one in streamed) == "three"
    return 1.0


def waits(task: Task) -> float:
    """A stream whose answer comes later than its client waits for a byte."""
    client = Client(timeout=1.0, max_retries=0)
    parts = client.chat.completions.create(model=MODEL, messages=[user("say at last")], stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "at last"
    return 1.0


def responses(task: Task) -> float:
    """OpenAI's newest endpoint, with a function and a stream."""
    client, items = Client(), [user(f"say so {CALL}")]
    tools = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    with client.responses.stream(model=MODEL, input=items, tools=tools, instructions="be brief") as stream:
        assert "response.function_call_arguments.done" in [event.type for event in stream]
        first = stream.get_final_response()
    [message, call] = first.output
    assert (message.content[0].text, call.name, json.loads(call.arguments)) == ("so", "add", {"a": 2, "b": 3})
    items += [*(one.model_dump(exclude_none=True) for one in first.output)]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "say 5"}]
    with client.responses.stream(model=MODEL, input=items, tools=tools, instructions="be brief") as stream:
        seen = [event.type for event in stream]
        second = stream.get_final_response()
    assert second.output_text == "5", second
    assert "response.output_text.delta" in seen, seen
    assert seen[-1] == "response.completed", seen
    return 1.0


def anthropic(task: Task) -> float:
    """Anthropic's client, with a tool and a stream."""
    from anthropic import Anthropic

    client: Any = Anthropic()
    tool = {"name": "add", "description": "Adds.", "input_schema": TOOLS[0]["function"]["parameters"]}
    messages = [user(f"say <think>\nhm\n</think>\n\nso {CALL}")]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "system": "be brief", "tools": [tool]}
    first = client.messages.create(messages=messages, **asked)
    [thought, text, call] = first.content
    assert (thought.thinking, text.text, call.name, call.input) == ("hm", "so", "add", {"a": 2, "b": 3})
    assert first.stop_reason == "tool_use"
    answers = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "say 5"}]}]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": answers}]
    with client.messages.stream(messages=messages, **asked) as stream:
        second = stream.get_final_message()
    assert second.content[-1].text == "5" and second.usage.output_tokens > 0 and second.stop_reason == "end_turn"
    return 1.0


def post(path: str, body: Any, key: str | None = None, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """A request by hand; its status and its JSON."""
    place = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=20)
    sent = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY'] if key is None else key}", **(headers or {})}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, sent)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def chat(text: str = "say x", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [user(text)], **more}


def shown(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}}


def messages_by_hand(task: Task) -> float:
    """Anthropic's endpoint without its package."""
    status, answer = post(
        "/v1/messages",
        {"model": MODEL, "max_tokens": 99, "messages": [user("say a b")]},
        "",
        {"x-api-key": os.environ["ANTHROPIC_API_KEY"]},
    )
    assert (status, answer["content"][0]["text"], answer["stop_reason"]) == (200, "a b", "end_turn"), answer
    status, answer = post("/v1/messages", {"model": "other", "messages": [user("say a")]})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    return 1.0


def refused(task: Task) -> dict[str, float]:
    """Each bad request is told what is wrong, and the episode goes on."""
    path, deep = "/v1/chat/completions", b"[" * 100_000
    cases: list[tuple[int, str, Any]] = [
        (401, "key", post(path, chat(), "guessed")),
        (401, "key", post(path, chat(), "")),
        (404, "no model 'gpt-9'", post(path, chat() | {"model": "gpt-9"})),
        (404, "there are", post("/v1/embeddings", {})),
        (400, "JSON", post(path, b"{")),
        (400, "JSON", post(path, deep)),
        (413, "bytes", post(path, b" " * (17 << 20))),
        (400, "characters", post(path, chat("x" * (1 << 20)))),
        (400, "messages", post(path, {"model": MODEL, "messages": 7})),
        (400, "only texts", post(path, {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "input_audio"}]}]})),
        (400, "nothing is fetched", post(path, {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]})),
        (400, "the model sees none", post(path, {"model": MODEL, "messages": [{"role": "user", "content": [shown(b"a picture")]}]})),
        (413, "bytes", post(path, {"model": MODEL, "messages": [{"role": "user", "content": [shown(bytes(16 << 20))]}]})),
        (400, "assistant", post(path, {"model": MODEL, "messages": [user("a"), {"role": "assistant", "content": "b"}]})),
        (400, "needs a text 'role'", post(path, {"model": MODEL, "messages": [{"content": "a"}]})),
        (400, "one answer", post(path, chat(n=3))),
        (400, "whole number", post(path, chat(max_tokens=-1))),
        (400, "tools", post(path, chat(tools=[3]))),
        (400, "tokens are from 0", post("/v1/completions", {"model": MODEL, "prompt": [1 << 40]})),
        (400, "nothing is stored", post("/v1/responses", {"model": MODEL, "input": "a", "previous_response_id": "resp_0"})),
        (400, "not read", post("/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "document"}]}]})),
        (400, "AttributeError", post("/v1/messages", {"model": MODEL, "messages": [user("a")], "tool_choice": "x"})),
    ]
    for expected, part, (status, answer) in cases:
        assert status == expected and part in answer["error"]["message"], (expected, part, status, answer)
    assert post(path, chat("say fine"))[1]["choices"][0]["message"]["content"] == "fine"
    return {"reward": 0.5, "cases": float(len(cases))}


def no_call(task: Task) -> float:
    return 1.0


def another_model(task: Task) -> float:
    Client(max_retries=0).chat.completions.create(model="gpt-9", messages=[user("say x")])
    return 1.0


def raises(task: Task) -> float:
    post("/v1/chat/completions", chat())
    raise ValueError("mine")


def killed(task: Task) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def hangs(task: Task) -> float:
    post("/v1/chat/completions", chat())
    time.sleep(600)
    return 1.0


def no_reward(task: Task) -> None:
    post("/v1/chat/completions", chat())


def not_a_number(task: Task) -> str:
    post("/v1/chat/completions", chat())
    return "much"


def too_much(task: Task) -> list[str]:
    post("/v1/chat/completions", chat())
    return ["x" * (1 << 20)]


def floods(task: Task) -> float:
    while True:
        post("/v1/chat/completions", chat(n=2))


def half_open(task: Task) -> float:
    """Hundreds of connections that never say anything, or half of it, and one that is answered."""
    place = urlsplit(os.environ["OPENAI_BASE_URL"])
    held = [socket.create_connection((str(place.hostname), int(place.port or 0))) for _ in range(12)]
    for number, one in enumerate(held):
        one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n" + (b"\r\n{" if number % 2 else b""))
    status, _ = post("/v1/chat/completions", chat())
    assert status == 200
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # it ends with the agent
    return float(left.pid > 0)


def goes_away(task: Task) -> float:
    """A client that does not wait for its answer, and one that does."""
    place = urlsplit(os.environ["OPENAI_BASE_URL"])
    gone = http.client.HTTPConnection(str(place.hostname), place.port)
    gone.request(
        "POST", "/v1/chat/completions", json.dumps(chat("say slowly")), {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    )
    time.sleep(0.3)
    gone.close()
    return 1.0 if post("/v1/chat/completions", chat())[0] == 200 else 0.0


def leaves_its_key(task: Task) -> float:
    """Leaves its key, and a process that escapes and asks after the end."""
    home = Path(os.environ["HOME"])
    (home / "key").write_text(os.environ["OPENAI_API_KEY"])
    assert post("/v1/chat/completions", chat())[0] == 200
    if os.fork() == 0:
        os.setsid()
        (home / "escaped").touch()
        time.sleep(1)
        (home / "late").write_text(str(post("/v1/chat/completions", chat())[0]))
        os._exit(0)
    while not (home / "escaped").exists():  # the end of the episode would end it
        time.sleep(0.01)
    return 1.0


def finds_a_key(task: Task) -> float:
    """Asks with the key of an episode that has ended."""
    home = Path(os.environ["HOME"])
    assert post("/v1/chat/completions", chat(), (home / "key").read_text())[0] == 401
    while not (home / "late").exists():
        time.sleep(0.1)
    time.sleep(0.2)
    assert (home / "late").read_text() == "401"
    return float(post("/v1/chat/completions", chat())[0] == 200)


def unscored(task: Task) -> None:
    post("/v1/chat/completions", chat("say the last answer"))


def until_refused(task: Task) -> float:
    """Asks for ever, and does not know of limits."""
    messages, client = [user("say x")], Client()
    while True:
        said = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, user("say x")]


def forgets(task: Task) -> float:
    """Begins anew when its context is full."""
    messages, client, forgot = [user("say x")], Client(), 0
    for _ in range(5):
        try:
            said = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
            messages += [
                {"role": "assistant", "content": said},
                user("say x, and this is a long way of saying it, which fills the context soon"),
            ]
        except BadRequestError as error:
            assert error.code == "context_length_exceeded", error
            messages, forgot = [user("say x")], forgot + 1
    return float(forgot)


def by_name(task: Task) -> Any:
    """The agent that the prompt names."""
    return globals()[task["prompt"]](task)


def main() -> None:
    """A command: reads the task, asks, prints the reward last."""
    task = json.load(sys.stdin)
    said = Client().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=[user(f"say {task['prompt']}")])
    print("a line of its own")
    if said.choices[0].message.content == "bad":
        sys.exit(3)
    print(json.dumps({"reward": 0.25, "seed": task["seed"]}))


if __name__ == "__main__":
    main()
