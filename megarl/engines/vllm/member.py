"""A further member of a vLLM engine: a data-parallel rank in a process of its own, perhaps on another node."""

import asyncio
from pathlib import Path
from typing import Any

import psutil

from megarl.engines.engine import Meeting, Member, Setup
from megarl.engines.vllm.launch import EXTENSION, engine_arguments, launch_member, open_directory, remove_files, unlink_shared_memory
from megarl.host.network import own_address
from megarl.models.description import ModelDescription

ENDED_S = 10.0  # longest wait for a killed process to end


class VllmMember(Member):
    """vLLM's engine core for one data-parallel rank, with its workers. The first member's front end schedules and calls it."""

    extension = EXTENSION

    def __init__(self, label: str) -> None:
        self._label = label
        self._manager: Any = None
        self._directory: Path | None = None

    def start(self, setup: Setup, meeting: Meeting, rank: int) -> None:
        """Must run in a thread that lives as long as the engine, as VllmEngine.start."""
        model = ModelDescription.read(setup.model, drop_images=setup.drop_images)
        self._directory = open_directory(setup.gpu, own_address(meeting.host))
        arguments = engine_arguments(setup, model) | {"worker_extension_cls": self.extension}
        self._manager = launch_member(self._label, arguments, model, meeting, rank, gpu=setup.gpu)

    def settle(self) -> list[int]:
        [core] = self._manager.processes
        pids = [core.pid, *(worker.pid for worker in psutil.Process(core.pid).children(recursive=True))]
        unlink_shared_memory(pids)
        self._remove_files()
        return pids

    async def ended(self) -> str:
        [process] = self._manager.processes
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(process.sentinel, ended.set)
        await ended.wait()
        loop.remove_reader(process.sentinel)
        process.join(ENDED_S)
        return f"pid {process.pid}: exit code {process.exitcode}"

    def close(self) -> None:
        if self._manager is not None:
            self._manager.shutdown(timeout=0)
        self._remove_files()

    def _remove_files(self) -> None:
        if self._directory is not None:
            remove_files(self._directory)
