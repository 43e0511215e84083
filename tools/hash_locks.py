"""Write tools/cpu.hashes and tools/gpu.hashes: each package that setup.sh installs, with the SHA-256 of every file that may provide it.

    python -m tools.hash_locks

Asks the package index, through uv, for the files of the pinned versions for CPython 3.11 on Linux.
torch's CPU build is left out, because it is a different file on every index that has it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

TOOLS = Path(__file__).parent
PLATFORMS = {"cpu": ("x86_64", "aarch64"), "gpu": ("x86_64",)}
LEFT_OUT = {"cpu": ("torch",), "gpu": ()}


def pinned(lock: Path) -> dict[str, str]:
    """Return the pinned versions by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE))


def files(lock: Path, machine: str) -> Iterator[tuple[str, str]]:
    """Yield (package, hash) for every file of the lock's versions that a machine can install."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--no-header", "--format", "pylock.toml"]
    platform = ["--python-version", "3.11", "--python-platform", f"{machine}-manylinux_2_40"]  # recent enough to accept every wheel
    text = subprocess.run([*command, "--system-certs", *platform, str(lock)], check=True, capture_output=True, text=True).stdout
    for package in tomllib.loads(text)["packages"]:
        for file in [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]:
            yield canonical(package["name"]), file["hashes"]["sha256"]


def canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def main() -> None:
    for name, machines in PLATFORMS.items():
        lock = TOOLS / f"{name}.lock"
        found: dict[str, set[str]] = {}
        for package, digest in (file for machine in machines for file in files(lock, machine)):
            found.setdefault(package, set()).add(digest)
        lines = [
            " ".join([f"{package}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(found[canonical(package)]))])
            for package, version in pinned(lock).items()
            if package not in LEFT_OUT[name]
        ]
        (TOOLS / f"{name}.hashes").write_text(f"# Written by tools/hash_locks.py of {lock.name}.\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
