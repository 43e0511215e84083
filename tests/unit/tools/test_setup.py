"""What tools/setup.sh says before it downloads anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


class Machine:
    """A copy of what setup.sh reads, a virtual environment that is a script, and programs that come before the real ones."""

    def __init__(self, root: Path, header: bool) -> None:
        self.root, self.include = root, root / "include" / "python3.12"
        shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for name in ("pyproject.toml", "megarl/__init__.py"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        self.include.mkdir(parents=True)
        if header:
            (self.include / "Python.h").touch()
        for venv in (".venv", ".venv-gpu"):
            self.program(f"{venv}/bin/python", f'case "$*" in *sysconfig*) echo {self.include};; "-m pip --version") ;; *) exit 1;; esac')
        self.program("bin/g++", "exit 0")

    def program(self, name: str, script: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.root / name).chmod(0o755)

    def without(self, *programs: str) -> str:
        """A PATH that has the programs that setup.sh calls, but for these."""
        folder = self.root / "few"
        folder.mkdir(exist_ok=True)
        for name in sorted(
            {"bash", "sh", "cat", "grep", "sha256sum", "cut", "dirname", "sort", "head", "getconf", "rm", "gcc"} - {*programs}
        ):
            if (found := shutil.which(name)) is not None and not (folder / name).exists():
                (folder / name).symlink_to(found)
        return f"{self.root / 'bin'}:{folder}"

    def setup(self, *arguments: str, **variables: str) -> list[str]:
        """Run setup.sh, which has to fail; return its lines."""
        variables = {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "HOME": str(self.root)} | variables
        done = subprocess.run(["bash", self.root / "tools" / "setup.sh", *arguments], env=variables, capture_output=True, text=True)
        assert done.returncode == 1
        return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("echo glibc 2.17", "the packages need glibc 2.28 or later (RHEL 8), and this machine has 2.17"),
        ("exit 1", "the packages need glibc 2.28 or later, and this machine has another C library"),
        (
            "echo glibc 2.28",
            "llguidance has no wheel for glibc 2.28: install Rust (cargo), which builds it, or use glibc 2.31 or later (RHEL 9, ",
        ),
    ],
)
def test_a_c_library_without_wheels_is_refused(tmp_path: Path, said: str, why: str) -> None:
    machine = Machine(tmp_path, header=True)
    machine.program("bin/getconf", said)
    for arguments in ([], ["--gpu"]):
        [line] = machine.setup(*arguments, PATH=machine.without("cargo"))
        assert line.startswith(f"setup: error: {why}")


def test_a_compiler_that_does_not_know_the_language_of_torch_is_refused(tmp_path: Path) -> None:
    machine = Machine(tmp_path, header=True)
    machine.program("bin/g++", 'case "$*" in *c++20*) exit 1;; esac')
    [line] = machine.setup("--gpu")
    assert line.startswith("setup: error: transformer-engine-torch is built here and needs g++ 10 or later")


@pytest.mark.parametrize("glibc", ["2.28", "2.31", "2.100"])
def test_what_is_built_here_needs_a_compiler_and_headers(tmp_path: Path, glibc: str) -> None:
    machine = Machine(tmp_path, header=False)
    machine.program("bin/getconf", f"echo glibc {glibc}")
    machine.program("bin/cargo", "exit 1")
    missing = f"there is no {machine.include}/Python.h: install python3.12-dev (Debian, Ubuntu) or python3.12-devel (RHEL), or "
    [line] = machine.setup("--gpu")
    assert line.startswith(f"setup: error: transformer-engine-torch and pycosat are built here, and {missing}")
    assert machine.setup()[0].startswith(f"setup: pycosat is built here, and {missing}")
    (machine.include / "Python.h").touch()
    assert "Python.h" not in "".join(machine.setup("--gpu"))


def test_a_machine_without_a_compiler_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, header=True)
    [line] = machine.setup("--gpu", PATH=machine.without("gcc", "cc", "clang"))
    assert line == "setup: error: transformer-engine-torch and pycosat are built here, and there is no C compiler (gcc)"


def interpreter(version: str, builds: str) -> str:
    """A Python that makes environments of itself, whose pip gets nothing but torch's CPU build for the given versions."""
    return f"""case "$*" in
        *sysconfig*) echo /usr/include/python{version} ;;
        "-c "*) case "$2" in *"!= '{version}'"*) ;; *) exit 1 ;; esac ;;
        --version) echo Python {version}.1 ;;
        "-m venv --clear "*) mkdir -p $4/bin && cp "$0" $4/bin/python ;;
        *" torch==2.13.0+cpu") case " {builds} " in *" {version} "*) ;; *) exit 1 ;; esac ;;
        *) exit 1 ;;
    esac"""


@pytest.mark.parametrize(
    ("here", "builds", "lines"),
    [
        ("3.11 3.12", "3.11 3.12", ["making .venv with Python 3.12.1"]),
        ("3.11", "3.11 3.12", ["making .venv with Python 3.11.1 (no Python 3.12 is here)"]),
        (
            "3.11 3.12",
            "3.11",
            ["making .venv with Python 3.12.1", "making .venv with Python 3.11.1 (no index has torch's CPU build for Python 3.12.1)"],
        ),
        (
            "3.11 3.12",
            "",
            [
                "making .venv with Python 3.12.1",
                "making .venv with Python 3.11.1 (no index has torch's CPU build for Python 3.12.1)",
                "making .venv with Python 3.12.1 (nor for Python 3.11.1)",
                "no index has torch's CPU build for Python 3.12.1 (PIP_EXTRA_INDEX_URL names others): taking the CUDA build, 3.5 GB more",
            ],
        ),
    ],
)
def test_the_first_python_with_a_cpu_build_of_torch_is_taken_and_the_line_says_why(
    tmp_path: Path, here: str, builds: str, lines: list[str]
) -> None:
    machine = Machine(tmp_path, header=True)
    shutil.rmtree(tmp_path / ".venv")
    for version in here.split():
        machine.program(f"bin/python{version}", interpreter(version, builds))
    path = machine.without("python3.11", "python3.12", "cargo")
    for name in ("tee", "awk", "mkdir", "cp", "tail", "uname"):
        if (place := shutil.which(name)) is not None:
            (tmp_path / "few" / name).symlink_to(place)
    said = [line.removeprefix("setup: ") for line in machine.setup(PATH=path)]
    assert [line for line in said if line.startswith(("making", "no index"))] == lines
    assert said[-1].startswith("error: pip failed")
    shutil.rmtree(tmp_path / ".venv")
    last = machine.setup(PATH=path, PYTHON="python3.11")
    assert last[0] == "setup: making .venv with Python 3.11.1"
    shutil.rmtree(tmp_path / ".venv")
    assert machine.setup(PATH=path, PYTHON="python2") == ["setup: error: PYTHON=python2 is no Python 3.12 or 3.11 with venv"]
