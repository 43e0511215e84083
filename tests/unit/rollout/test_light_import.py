"""A CPU engine's process imports vLLM without torch's compilers and without a chat server, and they are there for whoever asks."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from megarl.rollout.vllm import light_import
from megarl.rollout.vllm.launch import environment

IMPORT = """
import sys, types
from megarl.rollout.vllm.light_import import STAND_INS, light_import
with light_import():
    import vllm.v1.engine.async_llm, vllm.renderers.hf, vllm.model_executor.layers.quantization.online.base, vllm.v1.worker.cpu_worker
heavy = ("torch._dynamo", "torch._inductor", "openai", "vllm.parser")
print(sorted(name for name in sys.modules if name in STAND_INS or name.startswith(heavy)))
"""


def test_an_engine_imports_no_compiler_and_no_chat_server() -> None:
    environ = {**os.environ, **environment(gpu=False)}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environ, capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n", done.stderr


def test_after_the_import_everything_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in light_import.STAND_INS if name in sys.modules]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(vars(torch), "_dynamo", vars(torch).get("_dynamo"))
    compiles = torch.compile
    with light_import.light_import():
        stand_in = importlib.import_module("torch._dynamo")
        assert stand_in.disable(len) is len and stand_in.disable(reason="none")(len) is len
        assert torch.compile(len) is len and torch.compile(dynamic=True)(len) is len
        with pytest.raises(AttributeError):
            stand_in.optimize  # noqa: B018
    assert torch.compile is compiles and not any(name in sys.modules for name in light_import.STAND_INS)
    assert torch._dynamo.decorators.mark_unbacked(torch.zeros(1), 0) is None
    monkeypatch.setattr(importlib, "import_module", lambda name: {"torch._dynamo": sys}[name])
    assert torch._dynamo.version is sys.version
