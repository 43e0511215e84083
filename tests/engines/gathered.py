"""An engine all of whose members are in this process, so that its tests need no Ray."""

from typing import ClassVar

from megarl.engines.engine import Meeting, Setup
from megarl.engines.vllm.engine import VllmEngine
from megarl.engines.vllm.member import VllmMember
from megarl.host.network import reserved_ports

HERE = "127.0.0.1"


class GatheredEngine(VllmEngine):
    """Starts its other members before itself, and ends them after itself."""

    member: ClassVar[type[VllmMember]] = VllmMember

    async def start(self, setup: Setup, meeting: Meeting | None = None) -> list[int]:
        self.members = [self.member(f"{self.label} member {rank}") for rank in range(1, setup.settings.dp)]
        with reserved_ports(HERE, 1) as [port]:
            if self.members:
                meeting = Meeting(HERE, port)
                for rank, member in enumerate(self.members, 1):
                    member.start(setup, meeting, rank)
            pids = await super().start(setup, meeting)
        for member in self.members:
            pids += member.settle()
        return pids

    async def close(self) -> None:
        await super().close()
        for member in self.members:
            member.close()
