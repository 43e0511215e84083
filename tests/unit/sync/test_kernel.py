"""The compiled function of the fingerprint: kept for the next process, and not needed where it cannot be had."""

from pathlib import Path

import pytest

from megarl.sync.kernel import compiled


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def _compiler(path: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def test_it_is_compiled_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled.__wrapped__() is not None
    (kept,) = folder.iterdir()
    _compiler(tmp_path / "cc", "exit 1", monkeypatch)
    assert compiled.__wrapped__() is not None
    assert list(folder.iterdir()) == [kept]


@pytest.mark.parametrize("body", ["exit 1", 'echo "no library" > "$6"'])  # $6: the output
def test_a_compiler_that_fails_leaves_the_work_to_torch(folder: Path, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path / "cc", body, monkeypatch)
    assert compiled.__wrapped__() is None
    assert [path.suffix for path in folder.iterdir()] in ([], [".so"]), "no unfinished work is left"


def test_a_machine_without_a_compiler_leaves_the_work_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert compiled.__wrapped__() is None
