"""Tie vLLM's coordinator of data-parallel ranks to the engine that starts it."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import coordinator

from megarl.patching import expect
from megarl.rollout.vllm.lifetime import die_with_parent

_run = coordinator.DPCoordinatorProc.run_coordinator


class Coordinator(coordinator.DPCoordinatorProc):
    """vLLM's coordinator, which ends with its parent."""

    @staticmethod
    def run_coordinator(*arguments: Any, **named: Any) -> None:
        die_with_parent()
        _run(*arguments, **named)


def install() -> None:
    """Let vLLM start this coordinator.

    Its own process (vllm/v1/engine/coordinator.py:90) outlives a parent that is killed.
    """
    if coordinator.DPCoordinatorProc is Coordinator:
        return
    expect(coordinator.DPCoordinator.__init__, "target=DPCoordinatorProc.run_coordinator", "daemon=True")
    coordinator.DPCoordinatorProc = Coordinator
