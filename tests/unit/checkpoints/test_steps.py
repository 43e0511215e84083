"""Step directories: complete or absent, and what is wrong with one is named. No torch, no ranks."""

import errno
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from megarl.checkpoints import step_writer
from megarl.checkpoints.files import FileRecord, HashedFile, StoredFile, write_file
from megarl.checkpoints.step_writer import StepWriter, mark_damaged
from megarl.checkpoints.steps import Entry, Manifest, encode, listing, verify
from megarl.checkpoints.verify import main
from megarl.config import ConfigError
from megarl.errors import DamagedFile
from tests.whole_steps import newest

SHARD = bytes(range(256)) * 40
LARGE = 16 << 20  # bytes that are written at a time past the page cache


def save(root: Path, step: int, keep_last: int = 100, keep_every: int = 0) -> Path:
    """A step directory with a model's shard and two files of the run."""
    aside = StepWriter(root, step)
    aside.begin(["policy"])
    files = {
        name: write_file(aside.path / name, data)
        for name, data in {"policy/__0_0.distcp": SHARD, "policy/common.pt": b"PK", "trainer.json": b'{"cursor": 7}'}.items()
    }
    models = {"policy": {"model_type": "qwen3_moe", "vocab_size": 128, "optimizer": {"steps": step, "adam_step": step}}}
    manifest = Manifest(step, 2, {"ranks": 2, "tp": 2}, {"torch": "2.13.0"}, models, files)
    aside.commit(manifest, keep_last=keep_last, keep_every=keep_every)
    return root / f"step_{step:06d}"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    elsewhere.rename(path.parents[2] / "elsewhere")


def other_step(path: Path) -> None:
    path.write_text(encode(Manifest(9, 1, {}, {}, {}, {})).decode())


def outside(path: Path) -> None:
    path.write_bytes(encode(Manifest(2, 1, {}, {}, {}, {"../step_000001/trainer.json": FileRecord(13, "0" * 32)})))


def listed_pickle(path: Path) -> None:
    """A pickle that the manifest names."""
    record = write_file(path.with_name("state.pkl"), pickle.dumps({}))
    path.write_bytes(encode(Manifest(2, 1, {}, {}, {}, {"state.pkl": record})))


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped byte": ("policy/__0_0.distcp", flip, "policy/__0_0.distcp: flipped: its hash is not the manifest's"),
    "truncated": ("policy/__0_0.distcp", truncate, "policy/__0_0.distcp: truncated: 10239 bytes of 10240"),
    "missing": ("policy/__0_0.distcp", Path.unlink, "policy/__0_0.distcp: missing"),
    "longer": ("trainer.json", lambda path: path.write_bytes(b'{"cursor": 77}'), "trainer.json: longer: 14 bytes of 13"),
    "extra file": ("extra.safetensors", lambda path: path.write_bytes(b"x"), "extra.safetensors: extra: not in the manifest"),
    "pickle": ("extra.json", lambda path: path.write_bytes(pickle.dumps({})), "extra.json: extra: not in the manifest, a pickle"),
    "named pickle": ("policy/x.pt", lambda path: path.write_bytes(b"PK"), "policy/x.pt: extra: not in the manifest, a pickle"),
    "pickle in the manifest": ("manifest.json", listed_pickle, "state.pkl: a pickle, which is never loaded"),
    "link": ("policy/__0_0.distcp", link, "policy/__0_0.distcp: not a plain file"),
    "linked folder": ("more", lambda path: path.symlink_to(path.parent / "policy"), "more: extra: not in the manifest"),
    "no manifest": ("manifest.json", Path.unlink, "manifest.json: missing"),
    "flipped manifest": ("manifest.json", flip, "manifest.json: "),
    "truncated manifest": ("manifest.json", lambda path: path.write_bytes(path.read_bytes()[:100]), "manifest.json: damaged: "),
    "manifest of lists": ("manifest.json", lambda path: path.write_text("[]"), "manifest.json: damaged: "),
    "another step's": ("manifest.json", other_step, "manifest.json: of step 9, in a directory of step 2"),
    "found when it was loaded": (
        "damaged.txt",
        lambda path: mark_damaged(path.parent, "policy/__0_0.distcp: w: flipped"),
        "damaged.txt: policy/__0_0.distcp: w: flipped",
    ),
    "a way out": ("manifest.json", outside, "manifest.json: names '../step_000001/trainer.json', which is not inside the directory"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_step_before_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    file, harm, fault = DAMAGE[name]
    save(tmp_path, 1)
    harm(save(tmp_path, 2) / file)
    skipped: list[Entry] = []
    good = newest(tmp_path, skipped.append)
    assert good is not None and good.manifest.step == 1
    [entry] = skipped
    assert entry.step == 2 and any(line.startswith(fault) for line in entry.faults), entry.faults
    assert main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert fault in shown and "damaged" in shown and "good" in shown
    assert verify(save(tmp_path, 2)).saved is not None, "saved again, it is whole"


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    step = save(tmp_path, 1)
    whole = (step / "manifest.json").read_bytes()
    for place in range(0, len(whole), 7):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        (step / "manifest.json").write_bytes(broken)
        same = _equal(bytes(broken), whole)  # white space may differ
        assert (verify(step).saved is not None) == same, place


def _equal(one: bytes, two: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(two))
    except ValueError:
        return False


def test_a_file_that_changes_after_it_was_verified_is_not_read(tmp_path: Path) -> None:
    step = save(tmp_path, 1)
    good = newest(tmp_path, lambda entry: None)
    assert good is not None and good.read("trainer.json") == b'{"cursor": 7}'
    (step / "trainer.json").write_bytes(b'{"cursor": 8}')
    with pytest.raises(ConfigError, match=r"step_000001/trainer\.json: flipped"):
        good.read("trainer.json")
    with pytest.raises(ConfigError, match=r"step_000001 has no critic\.json"):
        good.read("critic.json")


def test_a_file_that_cannot_be_read_is_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error of a read, unlike that of an open, names no file."""
    save(tmp_path, 1)
    good = newest(tmp_path, lambda entry: None)

    def failing(_: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", failing)
    assert good is not None
    with pytest.raises(DamagedFile, match=r"step_000001/trainer\.json: unreadable: Input/output error") as error:
        good.read("trainer.json")
    assert Path(error.value.file) in good.files


def test_the_newest_steps_and_every_nth_are_kept(tmp_path: Path) -> None:
    for step in range(1, 10):
        save(tmp_path, step, keep_last=2, keep_every=4)
        assert (tmp_path / "latest").read_text() == f"step_{step:06d}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000004", "step_000008", "step_000009"]


def test_damaged_steps_do_not_count_as_kept(tmp_path: Path) -> None:
    """Of two to keep, the one before a damaged one stays; the damaged one leaves when it is older than both."""
    save(tmp_path, 1)
    truncate(save(tmp_path, 2) / "trainer.json")
    save(tmp_path, 3, keep_last=2)
    assert [entry.step for entry in listing(tmp_path)] == [3, 2, 1]
    save(tmp_path, 4, keep_last=2)
    assert [entry.step for entry in listing(tmp_path)] == [4, 3]


def test_a_step_removed_just_after_it_was_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_writer, "point", lambda root, name: shutil.rmtree(root / name))
    with pytest.raises(OSError, match="no step is intact, step_000001 included, which has just been written"):
        save(tmp_path, 1)


def test_an_unfinished_save_is_skipped_and_cleared_by_the_next(tmp_path: Path) -> None:
    save(tmp_path, 1)
    cut = StepWriter(tmp_path, 2)
    cut.begin(["policy"])
    write_file(cut.path / "policy" / "__0_0.distcp", SHARD)
    skipped: list[Entry] = []
    good = newest(tmp_path, skipped.append)
    assert (
        good is not None and good.manifest.step == 1 and [entry.faults for entry in skipped] == [("partial: left by an unfinished save",)]
    )
    assert main([str(tmp_path)]) == 0  # nothing is damaged
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001", "step_000003"]


def test_a_step_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A run that went back behind a damaged step saves it anew; a later one, from before, stays as it is."""
    flip(save(tmp_path, 2) / "trainer.json")
    save(tmp_path, 5)
    save(tmp_path, 2, keep_last=1)
    assert [(entry.step, entry.faults) for entry in listing(tmp_path)] == [(5, ()), (2, ())]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000002", "step_000005"]


def test_a_file_that_does_not_fit_raises_when_it_is_closed(tmp_path: Path) -> None:
    """Not while it is written: torch.save would lose the cause."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(SHARD), hard))
    try:
        with HashedFile(tmp_path / "shard") as file:
            assert file.write(SHARD) + file.write(SHARD) == 2 * len(SHARD)
            with pytest.raises(OSError, match="File too large: .*/shard'$"):
                file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4095, LARGE - 1, LARGE, LARGE + 1, 2 * LARGE + 12_345])
def test_a_file_and_its_parts_read_back_as_written(tmp_path: Path, size: int, direct: bool) -> None:
    """In pieces that are collected and in larger ones, whether they pass the page cache or not."""
    data, parts = random.Random(size).randbytes(size), []
    with HashedFile(tmp_path / "file", direct=direct) as file:
        for start in range(0, size, 5_000_011):
            part = memoryview(data)[start : start + 5_000_011]
            for end in (0, 7, 1000, 3_000_000, len(part)):
                file.write(part[:end])
                part = part[end:]
            parts.append(file.end_part())
        record = file.close()
    starts = range(0, size, 5_000_011)
    lengths = [min(5_000_011, size - start) for start in starts]
    hashes = [xxh3_128_hexdigest(data[start : start + 5_000_011]) for start in starts]
    assert parts == list(zip(starts, lengths, hashes, strict=True))
    assert (tmp_path / "file").read_bytes() == data and record == FileRecord(size, xxh3_128_hexdigest(data))
    with StoredFile(tmp_path / "file") as stored:
        assert b"".join(bytes(block) for block in stored.blocks()) == data
        for start, length in ((0, size), (size // 3, size // 2), (size // 2 + 1, min(size // 3, 1_000_003)), (size, 0)):
            found = bytearray(length)
            stored.read(start, memoryview(found))
            assert found == data[start : start + length]
        with pytest.raises(OSError, match=r"ends 300007 bytes too early: .*/file'$"):
            stored.read(size, memoryview(bytearray(300_007)))


def test_a_disk_that_is_full_within_a_block_says_so(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE - 1001, hard))
    try:
        with HashedFile(tmp_path / "shard", direct=True) as file:
            file.write(bytes(LARGE))
            with pytest.raises(OSError, match="File too large: .*/shard'$"):
                file.check()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_verify_needs_no_torch(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 1)
    code = (
        "import sys\nfrom megarl.cli import main\n"
        f"status = main(['verify', {str(tmp_path / 'run')!r}])\n"
        "assert status == 0 and 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "good" in done.stdout and "tp=2" in done.stdout and "policy + optimizer" in done.stdout


def test_verify_shows_the_folders_of_models_on_ranks_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("checkpoints", "checkpoints-critic"):
        save(tmp_path / folder, 1)
    assert main([str(tmp_path)]) == 0 and capsys.readouterr().out.count("good") == 2
    flip(tmp_path / "checkpoints-critic" / "step_000001" / "policy" / "__0_0.distcp")
    assert main([str(tmp_path)]) == 1 and str(tmp_path / "checkpoints-critic") in capsys.readouterr().out


def test_verify_refuses_what_holds_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^verify: no such directory: "):
        main([str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="^verify: .* has no step directories$"):
        main([str(tmp_path)])
