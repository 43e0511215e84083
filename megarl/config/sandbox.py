"""What a process that works on responses may do."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.section import EnvironmentVariable, Place, Section


class SandboxSettings(Section):
    """The sandbox in which responses are scored (see megarl/sandbox/README.md for what it guarantees on which kernel)."""

    require: Literal["limits", "landlock", "namespaces"] = "limits"
    """Refuse to start where the machine cannot shut processes in as far as this."""
    memory_gb: Annotated[float, Field(gt=0, le=1 << 20)] = 8.0
    """Most address space of one process."""
    network: bool = False
    """Let a function of your own reach the network, and with it every service that trusts this machine."""
    readable: list[Place] = []
    """Files and directories that a function of your own reads, beside its code."""
    env: list[EnvironmentVariable] = []
    """Environment variables that it is given."""
