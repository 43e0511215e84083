"""What Triton compiles its driver with on a GPU node. The errors are those of triton 3.7.1 on machines that lack something."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.checks import machine
from megarl.cluster import fitness
from megarl.config import ClusterSettings, ConfigError
from megarl.parallel import toolchain
from tests.rows import rows

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
FAILED = subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/x/cuda_utils.c", "-O3", "-shared", "-l:libcuda.so.1"])
NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs with gcc alone, and the headers of Python, as this process sees them."""
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(toolchain, "headers", lambda: tmp_path)
    return tmp_path


def test_a_machine_without_a_compiler_or_headers_is_told_what_to_install(tools: Path) -> None:
    assert toolchain.lacking() is None
    assert (toolchain.lacking({"PATH": "/nowhere"}) or "").startswith("no C compiler: no gcc or clang in PATH, and CC is not set; Triton, ")
    (tools / "clang").touch(mode=0o755)
    (tools / "gcc").unlink()
    assert toolchain.lacking() is None
    assert toolchain.lacking({"CC": str(tools / "clang")}) is None
    for chosen in ("ccache gcc", "/nowhere/icc"):  # Triton would start a program of this name
        assert (toolchain.lacking({"PATH": str(tools), "CC": chosen}) or "").startswith(f"no C compiler: CC={chosen} is not a program")
    (tools / "Python.h").unlink()
    assert (toolchain.lacking() or "").startswith(f"{tools}/Python.h is missing: install {PYTHON}-dev (Debian, Ubuntu) or {PYTHON}-devel ")


def test_the_headers_are_looked_for_where_they_are() -> None:
    assert toolchain.headers().name == PYTHON and toolchain.headers().is_relative_to(sys.base_prefix)


def test_what_triton_fails_with_is_told_in_one_line_that_names_no_gpu(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/home/u/.triton")
    said = "warning: unused\n/usr/bin/ld: cannot find -l:libcuda.so.1: No such file\ncollect2: error: ld returned 1 exit status\n"
    cache = "/home/u/.triton"
    told = [
        (FAILED, "/usr/bin/gcc fails with status 1: /usr/bin/ld: cannot find -l:libcuda.so.1: No such file; Triton"),
        (AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"), "no libcuda.so.1 in `ldconfig -p` or LD_LIBRARY_PATH"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/sbin/ldconfig"), "no libcuda.so.1 in `ldconfig -p` or LD_LIBRARY_PATH"),
        (OSError(errno.ENOSPC, "No space left on device"), f"TRITON_CACHE_DIR={cache}: [Errno 28] No space left on device; Triton"),
        (OSError(errno.EROFS, "Read-only file system", cache), f"TRITON_CACHE_DIR={cache}: [Errno 30] Read-only file system"),
        (ImportError(f"{cache}/x.so: failed to map segment from shared object"), f"TRITON_CACHE_DIR={cache}: {cache}/x.so: failed to map"),
    ]
    for error, line in told:
        assert (toolchain.fault(error, said) or "").startswith(line) and not line.startswith(fitness.GPU)
    assert toolchain.fault(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")) is None, "that is the GPU's"
    (tools / "gcc").unlink()
    assert (toolchain.fault(NO_COMPILER) or "").startswith("no C compiler: ")
    (tools / "gcc").touch(mode=0o755)
    (tools / "Python.h").unlink()
    assert (toolchain.fault(FAILED, "x.c:1:10: fatal error: Python.h: No such file or directory") or "").startswith(f"{tools}/Python.h is")


# A GPU that computes, and Triton in a state of this test's choice.
PRETEND = """
    import contextlib, sys, torch, types
    from megarl.parallel import backend
    from megarl.parallel.toolchain import fault

    torch.version.cuda, ones = "13.0", torch.ones
    torch.ones = lambda *shape, device: ones(*shape)
    torch.cuda.mem_get_info = lambda n: (1 << 40, 1 << 40)
    torch.cuda.device = lambda n: contextlib.nullcontext()

    def touches(function):
        backend.importlib.import_module = lambda name: types.SimpleNamespace(touch=function)

"""


TOUCHED = [
    ("sys.modules['triton'] = None", "Triton does not load (import of triton halted; None in sys.modules); bash tools/setup.sh --gpu"),
    ("touches(lambda device: fault(RuntimeError('Failed to find C compiler')))", "no C compiler: no gcc or clang in PATH"),
    ("touches(lambda device: 1 / 0)", "GPU 0: division by zero"),
    ("touches(lambda device: None)", None),
]


@pytest.mark.parametrize(("triton", "line"), rows(TOUCHED, TOUCHED[1:2]))
def test_the_test_of_a_node_compiles_a_kernel(triton: str, line: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    program = f"{textwrap.dedent(PRETEND)}\n{triton}\nsys.exit(backend.touch_gpus(int(sys.argv[1])))"
    said = fitness.sick_gpus(1, 300.0, program)
    assert said is None if line is None else (said or "").startswith(line), said


def test_a_session_of_its_own_on_gpus_is_refused_without_a_compiler(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus_here", lambda: 8)
    machine.check_cluster(ClusterSettings(gpus=True), [])
    (tools / "gcc").unlink()
    machine.check_cluster(ClusterSettings(gpus=False), [])
    with pytest.raises(ConfigError, match=r"^cluster.gpus=true: no C compiler: no gcc or clang in PATH"):
        machine.check_cluster(ClusterSettings(gpus=True), [])


def test_the_compiler_s_complaint_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`touch` keeps what the compiler prints. Triton itself is not needed for that."""
    kernel = SimpleNamespace(jit=lambda function: function, language=SimpleNamespace(constexpr=int))
    monkeypatch.setitem(sys.modules, "triton", kernel)
    monkeypatch.setitem(sys.modules, "triton.language", kernel.language)
    monkeypatch.delitem(sys.modules, "megarl.parallel.touch", raising=False)
    from megarl.parallel import touch

    class Failing:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return self

        def __call__(self, numbers: torch.Tensor, count: int) -> None:
            os.write(2, b"x.c:3:10: fatal error: error writing to /tmp/x.s: No space left on device\n")
            raise FAILED

    monkeypatch.setattr(touch, "_count", Failing())
    monkeypatch.setattr(toolchain, "lacking", lambda: None)
    assert "error writing to /tmp/x.s: No space left on device" in (touch.touch("cpu") or "")
    monkeypatch.delitem(sys.modules, "megarl.parallel.touch")  # which has the stand-in
