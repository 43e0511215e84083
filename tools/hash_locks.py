"""Write tools/*.hashes: each package that setup.sh and tests/run.sh install, with the SHA-256 of every file that may provide it.

    python -m tools.hash_locks

Asks the package index, through uv, for the files of the pinned versions for CPython 3.12 and 3.11 on Linux, and through pip for the wheels
that run on 3.11 although their metadata asks for more (setup.sh installs these with --ignore-requires-python).
torch's CPU build is left out, because it is a different file on every index that has it.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).parent
NEWER = ("megatron-core",)  # its wheels for 3.11 ask for 3.12


@dataclass(frozen=True)
class Hashes:
    """What one file of hashes is written from."""

    lock: str
    machines: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # nothing: the whole lock

    def versions(self) -> dict[str, str]:
        """Return the pinned versions by package."""
        return {name: version for name, version in pinned(TOOLS / self.lock).items() if not self.only or name in self.only}


FILES = {
    "cpu": Hashes("cpu.lock", ("x86_64", "aarch64"), left_out=("torch",)),
    "gpu": Hashes("gpu.lock", ("x86_64",)),
    "triton": Hashes("gpu.lock", ("x86_64", "aarch64"), only=("triton",)),  # runs on a CPU in the tests of GPU kernels
}


def pinned(lock: Path) -> dict[str, str]:
    """Return the pinned versions by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE))


def files(versions: dict[str, str], machine: str) -> Iterator[tuple[str, str]]:
    """Yield (package, hash) for every file of these versions that a machine can install."""
    yield from resolved(versions, "3.12", machine)
    yield from resolved({package: version for package, version in versions.items() if package not in NEWER}, "3.11", machine)
    for package in versions.keys() & {*NEWER}:
        yield package, downloaded(f"{package}=={versions[package]}", "3.11", machine)


def resolved(versions: dict[str, str], python: str, machine: str) -> Iterator[tuple[str, str]]:
    """Yield (package, hash) for every file that uv would choose from."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--no-header", "--format", "pylock.toml"]
    platform = ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_40"]  # recent enough to accept every wheel
    lock = "".join(f"{package}=={version}\n" for package, version in versions.items())
    text = subprocess.run([*command, "--system-certs", *platform, "-"], input=lock, check=True, capture_output=True, text=True).stdout
    for package in tomllib.loads(text)["packages"]:
        for file in [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]:
            yield canonical(package["name"]), file["hashes"]["sha256"]


def downloaded(requirement: str, python: str, machine: str) -> str:
    """Return the hash of the wheel that pip takes where it does not look at the Python that is asked for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    with tempfile.TemporaryDirectory() as folder:
        platform = ["--python-version", python, "--platform", f"manylinux_2_28_{machine}", "--dest", folder]
        subprocess.run([*command, *platform, requirement], check=True)
        [wheel] = Path(folder).iterdir()
        return hashlib.sha256(wheel.read_bytes()).hexdigest()


def canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def main() -> None:
    for name, hashes in FILES.items():
        digests: dict[str, set[str]] = {}
        for package, digest in (file for machine in hashes.machines for file in files(hashes.versions(), machine)):
            digests.setdefault(package, set()).add(digest)
        lines = [
            " ".join([f"{package}=={version}", *(f"--hash=sha256:{digest}" for digest in sorted(digests[canonical(package)]))])
            for package, version in hashes.versions().items()
            if package not in hashes.left_out
        ]
        (TOOLS / f"{name}.hashes").write_text(f"# Written by tools/hash_locks.py of {hashes.lock}.\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
