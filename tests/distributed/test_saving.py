"""A save that fails leaves what was saved before, a load takes nothing that megarl did not write, and both say why in one line."""

import io
import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from xxhash import xxh3_128_hexdigest

from megarl.algorithms.ppo import Ppo
from megarl.checkpoints.files import FileRecord
from megarl.checkpoints.steps import encode, read_manifest
from megarl.config import CriticSettings, Layout, OptimizerSettings
from megarl.parallel.checkpoint import sharded
from megarl.parallel.checkpoint.index import INDEX
from megarl.parallel.checkpoint.save import Saver
from megarl.parallel.checkpoint.staging import StagedWriter
from megarl.parallel.grid import Grid
from megarl.ranks.step_worker import RLSpec
from tests.distributed.checkpoint_work import (
    all_equal,
    die_in_a_save,
    load_alone,
    load_trained,
    plain_tensors,
    save_into,
    save_several,
    settings,
    stale,
    verified,
    wait_for_a_rank_that_never_writes,
)
from tests.distributed.failing_saves import LIMIT_S, fail_on_one_rank_alone, fail_then_recover, stand_still, stand_still_on_rank_0
from tests.distributed.loop_ranks import rl_rank
from tests.distributed.tiny_training import make_checkpoint
from tests.rank_pool import Pool, RankError
from tests.rows import rows
from tests.whole_steps import newest

ONE, TWO = Layout(), Layout(ranks=2, tp=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def saved(pool: Pool, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 1 and 2 of a policy, a critic and a reference, saved asynchronously in pieces of 1 MiB on tp2."""
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    pool.run(save_several, TWO, path, root)
    return root


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Path:
    """A copy of step 1, to be harmed."""
    return Path(shutil.copytree(saved / "step_000001", tmp_path / "step_000001"))


def refusal(pool: Pool, function: Any, layout: Layout, *arguments: Any) -> str:
    """The line that every rank refuses with."""
    with pytest.raises(RankError) as refused:
        pool.run(function, layout, *arguments)
    told = [
        line for line in str(refused.value).splitlines() if line.startswith(("megarl.errors.ConfigError: ", "megarl.errors.DamagedFile: "))
    ]
    assert len(told) == layout.ranks and len(set(told)) == 1, refused.value
    return told[0].removeprefix("megarl.errors.ConfigError: ")


def test_several_models_share_a_step(pool: Pool, saved: Path, path: Path, tmp_path: Path) -> None:
    """Written in pieces behind the trainer's back; each is loaded without the others, on another layout, without its optimizer."""
    good = newest(saved, lambda entry: None)
    assert good is not None and good.manifest.step == 2 and set(good.manifest.models) == {"policy", "critic", "reference"}
    assert good.manifest.models["policy"]["optimizer"] == {"steps": 0, "adam_step": 0}
    assert good.manifest.models["reference"]["optimizer"] is None
    assert verified(saved / "step_000001").read("trainer.json") == b'{"cursor": 7}'
    for name, head in (("policy", "lm"), ("critic", "value")):
        pool.run(load_alone, Layout(ranks=2, ep=2), path, good.path, name, head, tmp_path / name)
        before, after = (pool.run(plain_tensors, ONE, folder / name)[0] for folder in (good.path, tmp_path / name / "step_000001"))
        assert "score.weight" in after if head == "value" else "output_layer.weight" in after
        assert {key for key in before if not key.startswith("optimizer.")} == set(after)
        assert all(torch.equal(before[key], tensor) for key, tensor in after.items())


def take_turns(grid: Grid, path: Path, root: Path, offload: bool) -> list[set[str]]:
    """Policy and critic on one rank step, are saved and loaded; which of them had memory whenever a tensor of one was read or written."""
    spec = RLSpec(Ppo(), OptimizerSettings(lr=1e-3), 3, 1.0, critic=CriticSettings(), critic_updates=3, offload=offload)
    rank = rl_rank(grid, path, spec, "policy", "critic")
    seen: list[set[str]] = []

    def look() -> None:
        trained = [(role, model._trainable) for role, model in rank._models.items()]
        seen.append({role for role, one in trained if one and any(tensor.untyped_storage().nbytes() for tensor in one.state())})

    def looking(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def called(*arguments: Any) -> Any:
            look()
            return call(*arguments)

        patch.setattr(owner, name, called)

    for role in ("policy", "critic"):
        trainable = rank._use(role)._trainable
        assert trainable is not None
        trainable.zero_grad()
        trainable.step()
    with pytest.MonkeyPatch.context() as patch:
        looking(StagedWriter, "put")
        looking(Saver, "_plan")
        looking(sharded, "put_optimizer")
        rank.checkpoint(root, 1, settings(), {})
        step = verified(root / "step_000001")
        rank.load({"policy": step, "critic": step})
        rank.checkpoint(root, 2, settings(), {})
    return seen


def test_models_that_take_turns_on_the_device_do_so_in_a_save_and_a_load(pool: Pool, path: Path, tmp_path: Path) -> None:
    together, turns = (pool.run(take_turns, ONE, path, tmp_path / str(offload), offload)[0] for offload in (False, True))
    assert all(seen == {"policy", "critic"} for seen in together)
    assert len(turns) == len(together) > 20 and all(len(seen) == 1 for seen in turns)
    for number in (1, 2):
        one, other = (tmp_path / str(offload) / f"step_{number:06d}" for offload in (False, True))
        assert pool.run(all_equal, ONE, one, other) == [True]


def go_on_blank(grid: Grid, path: Path, root: Path) -> bool:
    """What is trained on these ranks is saved, and loaded by ranks that read no weights. Whether these had none before."""
    spec = RLSpec(Ppo(), OptimizerSettings(lr=1e-3), 3, 1.0, critic=CriticSettings(), critic_updates=3)
    none = []
    for number in (1, 2):
        rank = rl_rank(grid, path, spec, "policy", "critic", "reference", blank=number == 2)
        none.append(
            [all(tensor.isnan().all() for chunk in model.chunks for tensor in chunk.parameters()) for model in rank._models.values()]
        )
        if number == 2:
            step = verified(root / "step_000001")
            rank.load({"policy": step, "critic": step})
        rank.checkpoint(root, number, settings(), {})
        rank.wait_for_save()
    return none == [[False, False, False], [True, True, False]]


def test_what_goes_on_from_a_checkpoint_reads_no_other_weights(pool: Pool, path: Path, tmp_path: Path) -> None:
    assert pool.run(go_on_blank, TWO, path, tmp_path) == [True, True]
    assert pool.run(all_equal, ONE, tmp_path / "step_000001", tmp_path / "step_000002") == [True]


def test_another_model_is_refused_with_both_shapes(pool: Pool, saved: Path, path: Path, tmp_path: Path) -> None:
    good = saved / "step_000002"
    other = {
        "wide": ({"moe_intermediate_size": 32}, r"linear_fc1\.weight has shape \[2, 4, 128, 128\], and the model's is \[2, 4, 64, 128\]"),
        "shallow": ({"num_hidden_layers": 1}, r"has shape \[2, .*\], and the model's is \[1, "),
        "words": ({"vocab_size": 120}, r"policy: vocab_size is 128, and the model's is 120"),
    }
    for name, (changes, line) in other.items():
        config = make_checkpoint(tmp_path / name, **{"num_hidden_layers": 2, **changes})
        assert re.search(line, refusal(pool, load_alone, TWO, config, good, "policy", "lm"))
    assert refusal(pool, load_alone, TWO, path, good, "policy", "value").endswith("policy lacks score.weight of shape [1, 128]")
    assert refusal(pool, load_alone, TWO, path, good, "judge", "lm").endswith("has no model 'judge'; it has critic, policy, reference")
    assert refusal(pool, load_trained, TWO, path, good, "reference").endswith("holds no optimizer: it was saved as a frozen model")


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._target),)


def forge(step: Path, name: str, data: bytes) -> None:
    """Writes a file of a step directory as one would who also rewrites its manifest."""
    (step / name).write_bytes(data)
    known = read_manifest(step)
    record = FileRecord(len(data), xxh3_128_hexdigest(data))
    (step / "manifest.json").write_bytes(encode(replace(known, files={**known.files, name: record})))
    verified(step)


def test_metadata_that_would_run_code_is_not_unpickled(pool: Pool, step: Path, path: Path, tmp_path: Path) -> None:
    forge(step, "policy/.metadata", pickle.dumps(Evil(tmp_path / "harm")))
    pool.run(load_alone, TWO, path, step, "policy", "lm")
    pickle.loads(pickle.dumps(Evil(tmp_path / "proof")))
    assert (tmp_path / "proof").exists() and not (tmp_path / "harm").exists()


def test_shards_that_would_run_code_are_not_unpickled(pool: Pool, step: Path, path: Path, tmp_path: Path) -> None:
    evil = io.BytesIO()
    torch.save(Evil(tmp_path / "harm"), evil)
    forge(step, "policy/evil.distcp", evil.getvalue())
    index = json.loads((step / "policy" / INDEX).read_text())
    for shard in index["output_layer.weight"][2]:
        shard[2] = ["evil.distcp", 0, len(evil.getvalue()), xxh3_128_hexdigest(evil.getvalue())]
    forge(step, f"policy/{INDEX}", json.dumps(index).encode())
    line = refusal(pool, load_alone, TWO, path, step, "policy", "lm")
    assert "UnpicklingError" in line and "posix.mkdir" in line
    assert not (tmp_path / "harm").exists()


def test_a_tensor_outside_the_checkpoint_is_not_read(pool: Pool, step: Path, path: Path) -> None:
    index = json.loads((step / "policy" / INDEX).read_text())
    index["output_layer.weight"][2][0][2][0] = "../../elsewhere"
    forge(step, f"policy/{INDEX}", json.dumps(index).encode())
    assert "which is no file of the checkpoint" in refusal(pool, load_alone, TWO, path, step, "policy", "lm")


def test_a_flipped_bit_is_found_by_the_rank_that_reads_it(pool: Pool, step: Path, path: Path) -> None:
    shard = step / "policy" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    line = refusal(pool, load_trained, TWO, path, step, "policy")
    assert line.startswith(f"megarl.errors.DamagedFile: checkpoint: {shard}: ") and line.endswith(
        ": flipped: its hash is not the manifest's"
    )


def test_metadata_that_changes_after_it_was_verified_is_not_read(pool: Pool, step: Path, path: Path) -> None:
    assert refusal(pool, stale, ONE, path, step, f"policy/{INDEX}").endswith(f"policy/{INDEX}: flipped: its hash is not the manifest's")


def test_a_full_disk_and_lost_responses_are_told_at_the_next_call_and_harm_nothing(pool: Pool, path: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    told = pool.run(fail_then_recover, TWO, path, root)
    assert told[0] == told[1], "the ranks disagree"
    *full, lost = told[0]
    assert lost.startswith("checkpoint: step 2 was not saved: responses that are under way are lost: Failed to retrieve object abab")
    assert "\n" not in lost
    for line in full:
        assert line.startswith("checkpoint: step 2 was not saved: rank 1: File too large: ") and "\n" not in line
        assert "step_000002.partial/policy/__1_" in line
    good = newest(root, lambda entry: None)
    assert good is not None and good.manifest.step == 3
    assert sorted(entry.name for entry in root.iterdir()) == ["latest", "step_000001", "step_000003"]


def test_a_save_that_fails_on_one_rank_alone_leaves_the_next_one_whole(pool: Pool, path: Path, tmp_path: Path) -> None:
    (first, kept), (last, _) = pool.run(fail_on_one_rank_alone, TWO, path, tmp_path)
    assert first.endswith("ranks [1] did not finish writing within save.timeout_s=2.5") and last.endswith("not written in 5 s")
    assert (tmp_path / "latest").read_text().strip() == "step_000002" and kept == [False, True]


@pytest.mark.parametrize(("rank", "asynchronous"), rows(product([0, 1], [False, True]), [(1, True)]))
def test_a_disk_that_stands_still_is_told_on_every_rank_in_time(
    pool: Pool, path: Path, tmp_path: Path, rank: int, asynchronous: bool
) -> None:
    """And leaves nothing behind: no directory, no thread, no memory that is still read. While it stands still, no other save begins."""
    told = pool.run(stand_still, TWO, path, tmp_path, rank, asynchronous)
    assert told[0] == told[1], "the ranks disagree"
    line, next_line, *rest = told[0]
    file = rf"{re.escape(str(tmp_path))}/step_000001\.partial/policy/__{rank}_\d\.distcp"
    assert re.fullmatch(
        rf"checkpoint: step 1 was not saved: rank {rank}: {file}(, {file})?: not written within save\.timeout_s={LIMIT_S:g}", line
    )
    expected = rf"checkpoint: step 2 was not saved: rank {rank}: {file}(, {file})?: the write of an earlier save has not returned yet"
    assert re.fullmatch(expected, next_line) and rest == [True, True, 0]
    good = newest(tmp_path, lambda entry: None)
    assert good is not None and good.manifest.step == 3


@pytest.mark.parametrize("where", rows(["create", "commit"], ["commit"]))
def test_a_directory_that_stands_still_on_rank_0_is_told_on_every_rank_in_time(pool: Pool, path: Path, tmp_path: Path, where: str) -> None:
    told = pool.run(stand_still_on_rank_0, TWO, path, tmp_path, where)
    line = f"checkpoint: step 1 was not saved: {tmp_path}/step_000001.partial: not written within save.timeout_s={LIMIT_S:g}"
    assert told == [(line, True)] * 2
    assert newest(tmp_path, lambda entry: None) is not None


def test_a_directory_that_cannot_be_written_to_is_told_on_every_rank(pool: Pool, path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    fixed = tmp_path / "fixed"
    fixed.mkdir(mode=0o555)
    places = {tmp_path / "file" / "checkpoints": "Not a directory", Path("/proc/checkpoints"): "No such file or directory"}
    if os.geteuid() != 0:
        places[fixed / "checkpoints"] = "Permission denied"
    for place, reason in places.items():
        assert pool.run(save_into, TWO, path, place) == [f"checkpoint: step 1 was not saved: {reason}: {place}"] * 2


def test_a_late_rank_is_named(pool: Pool) -> None:
    assert pool.run(wait_for_a_rank_that_never_writes, ONE) == ["ranks [1] did not finish writing within save.timeout_s=0.2"]


def test_a_process_killed_in_a_save_leaves_the_one_before(pool: Pool, path: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with pytest.raises(RankError, match="the process died"):
        pool.run(die_in_a_save, ONE, path, root)
    assert sorted(entry.name for entry in root.iterdir()) == ["latest", "step_000001", "step_000002.partial"]
    skipped: list[Any] = []
    good = newest(root, skipped.append)
    assert good is not None and good.manifest.step == 1 and [entry.finished for entry in skipped] == [False]
    pool.run(load_trained, Layout(ranks=2, pp=2), path, good.path, "policy")
