"""What a process that runs scorers, environments or tools may do."""

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.section import EnvironmentVariable, Place, Section


class SandboxSettings(Section):
    """The sandbox of scorers, environments and tools (see megarl/sandbox/guarantees.md for what it guarantees on which kernel)."""

    require: Literal["limits", "landlock", "namespaces"] = "limits"
    """Refuse to start if the machine cannot isolate processes at least this well."""
    memory_gb: Annotated[float, Field(gt=0, le=1 << 20)] = 8.0
    """Maximum address space of one process."""
    network: bool = False
    """Let your own function use the network, and thus reach every service that trusts this machine."""
    readable: list[Place] = []
    """Files and directories that your own function may read, besides its code."""
    env: list[EnvironmentVariable] = []
    """Environment variables to pass to your own function."""
