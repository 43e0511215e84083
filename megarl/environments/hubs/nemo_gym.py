"""Environments of NeMo Gym: its resources servers, over HTTP. Its package is needed where they run, and not here (written for 0.4.0).

    environment:
      source: {type: function, path: "megarl.environments.hubs.nemo_gym:NemoGym", params: {url: "http://127.0.0.1:8000"}}
      sandbox: {network: true}

A row of its data sets is sent as it is. With tools, `/seed_session` begins, each call goes to the path of its name, and a turn without a
call to `/verify`; with `gymnasium: true`, `/reset` begins, and each turn goes to `/step`. This module is imported in the sandbox.
"""

import http.cookiejar
import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

CLOSED_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MAX_BYTES = 1 << 20
PARAMS = "responses_create_params"


class NemoGym:
    """One episode.

    Args:
        url: the server's address.
        gymnasium: whether it is one of those with `/reset` and `/step`.
        timeout_s: time limit of a request.
    """

    def __init__(self, url: str, gymnasium: bool = False, timeout_s: float = 60.0) -> None:
        self._url, self._gymnasium, self._timeout_s = url.rstrip("/"), gymnasium, timeout_s
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())  # the session's
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)

    def reset(self, seed: int, task: dict[str, Any]) -> list[dict[str, str]] | None:
        """Begin a session. Return the row's prompt and what a gymnasium server says first; None keeps the prompt as it is."""
        prompt, meta = task["prompt"], task["meta"]
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self._row = {**meta, PARAMS: {**(meta.get(PARAMS) or {}), "input": given}}
        self._output: list[dict[str, Any]] = []
        begun = self._post("reset" if self._gymnasium else "seed_session", self._row)
        observation = begun.get("observation") if self._gymnasium else None
        return None if observation is None else [*given, {"role": "user", "content": observation}]

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[Any, float, bool]:
        """Answer a turn."""
        if self._gymnasium:
            self._output = [self._message(text)]
            answer = self._post("step", self._answered())
            over = bool(answer["terminated"] or answer["truncated"])
            return answer.get("observation"), float(answer["reward"]), over
        calls = CLOSED_CALL.findall(text) if finished else []
        if not calls:
            self._output.append(self._message(text))
            return None, float(self._post("verify", self._answered())["reward"]), True
        return [{"role": "tool", "content": self._called(call)} for call in calls], 0.0, False

    def _called(self, text: str) -> str:
        """Make a call, and return what the tool says, or what is wrong with the call."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call["arguments"]
            if not re.fullmatch(r"\w+", name) or name in ("verify", "seed_session", "aggregate_metrics"):
                raise ValueError(f"there is no tool {name}")
            answer = json.dumps(self._post(name, arguments))
        except (ValueError, KeyError, TypeError) as fault:
            return f"error: {fault}"
        number = f"call_{len(self._output)}"
        self._output.append({"type": "function_call", "call_id": number, "name": name, "arguments": json.dumps(arguments)})
        self._output.append({"type": "function_call_output", "call_id": number, "output": answer})
        return answer

    def _message(self, text: str) -> dict[str, Any]:
        parts = [{"type": "output_text", "text": text, "annotations": []}]
        return {"type": "message", "id": f"msg_{len(self._output)}", "role": "assistant", "status": "completed", "content": parts}

    def _answered(self) -> dict[str, Any]:
        """The row, with the policy's response in the form of OpenAI's Responses API."""
        response = {"id": "resp", "object": "response", "created_at": 0, "model": "policy", "output": self._output}
        return {**self._row, "response": {**response, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}}

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        """Send a request. Raises ValueError for one that the server refuses (422), and OSError if it fails otherwise."""
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return json.loads(answer.read(MAX_BYTES))
        except urllib.error.HTTPError as error:
            reason = error.read(500).decode(errors="replace")
            raise (ValueError if error.code in (404, 422) else OSError)(f"/{path}: status {error.code}: {reason}") from None
