"""What vLLM is imported with on a CPU (tests/e2e/test_engines.py: all of a start)."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from megarl.engines.vllm import light_import


def test_after_the_import_everything_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in light_import.STAND_INS if name in sys.modules]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(vars(torch), "_dynamo", vars(torch).get("_dynamo"))
    monkeypatch.setattr(torch, "_check_with", torch._check_with)
    compiles = torch.compile
    with light_import.light_import():
        stand_in = importlib.import_module("torch._dynamo")
        assert stand_in.disable(len) is len and stand_in.disable(reason="none")(len) is len
        assert torch.compile(len) is len and torch.compile(dynamic=True)(len) is len
        with pytest.raises(AttributeError):
            stand_in.optimize  # noqa: B018
        later = importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping
        assert later.__module__ == light_import.__name__
    assert torch.compile is compiles and not any(name in sys.modules for name in light_import.STAND_INS)
    assert "experts" in str(later("mixtral"))  # the real one's answer
    torch._check(True)
    with pytest.raises(RuntimeError, match="no such size"):
        torch._check(False, lambda: "no such size")
    assert torch._dynamo.decorators.mark_unbacked(torch.zeros(1), 0) is None
    monkeypatch.setattr(importlib, "import_module", lambda name: {"torch._dynamo": sys, "torch._dynamo.decorators": sys}[name])
    assert torch._dynamo.version is sys.version and torch._dynamo.decorators.version is sys.version
