"""A further member of a rollout engine as a Ray actor: a data-parallel rank, perhaps on another node than the first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.engines.actor import EngineActor
from megarl.engines.engine import Meeting, Member, Setup
from megarl.host.network import choose_nccl_interface, interface_towards


@dataclass(frozen=True)
class MemberToStart:
    """How to start the actor of a member; the engine's own process does it, so that it ends with that."""

    options: Mapping[str, Any]  # Ray's options of the actor
    arguments: Sequence[Any]  # of EngineMember

    def create(self, name: str) -> Any:
        """Start the actor under a name by which others find it (see `Watch`), and return at once."""
        return ray.remote(EngineMember).options(**self.options, name=name).remote(*self.arguments)


class EngineMember(EngineActor):
    """Holds the processes of one member.

    Args:
        label, engine, environment, run: as of `EngineActor`.
        devices: the GPUs of the ranks that it shares devices with; empty: this process's own GPUs.
    """

    def __init__(self, label: str, engine: str, environment: Mapping[str, str], run: Path, devices: Sequence[str]) -> None:
        own_devices = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        super().__init__(label, engine, {**environment, **own_devices}, run)
        self._member: Member = self._engine_class.member(label)

    async def open(self, setup: Setup, meeting: Meeting, rank: int) -> None:
        """Start the processes (see `Member.start`)."""
        choose_nccl_interface(interface_towards(ray.util.get_node_ip_address()))  # the interface that the trainer uses
        try:
            self._member.start(setup, meeting, rank)
        except BaseException:
            self._member.close()
            raise

    async def settle(self) -> None:
        """Remove the files that the start has left, once the engine has started."""
        self._member.settle()

    async def ended(self) -> str:
        """Wait until a process has ended; return which. What is left is ended, too."""
        how = await self._member.ended()
        self._member.close()
        return how
