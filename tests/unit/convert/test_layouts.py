"""Where Megatron-LM, slime and verl write a checkpoint, by their sources, is where conversion finds it."""

from pathlib import Path

import pytest

from megarl.convert.dcp_source import find_dcp
from megarl.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
SHARDS = (".metadata", "__0_0.distcp", "common.pt", "metadata.json")


def made(root: Path, *folders: str, tracker: str | None = None, **files: str) -> Path:
    """Folders with the files of a torch_dist checkpoint, a tracker, and other files as file__name=folder."""
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for name in SHARDS:
            (root / folder / name).touch()
    for name, folder in files.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name.replace("__", ".")).touch()
    if tracker is not None:
        (root / TRACKER).write_text(tracker)
    return root


def test_megatron_lm_and_slime(tmp_path: Path) -> None:
    """Megatron-LM's save_checkpoint, which slime calls: iter_{:07d} beside the tracker; slime's own states are in `rollout`."""
    root = made(tmp_path / "save", "iter_0000009", "iter_0000010", tracker="10", global_dataset_state_dict_10__pt="rollout")
    assert find_dcp(root, None) == root / "iter_0000010"
    assert find_dcp(root / "iter_0000009", None) == root / "iter_0000009", "an older one, by its name"
    made(root, "iter_12345678", tracker="12345678\n")
    assert find_dcp(root, None) == root / "iter_12345678", "{:07d} cuts nothing off"


def test_what_slime_converted_from_hugging_face(tmp_path: Path) -> None:
    """tools/convert_hf_to_torch_dist.py renames iter_0000001 to `release`, and the tracker says so."""
    root = made(tmp_path / "torch_dist", "release", tracker="release")
    assert find_dcp(root, None) == find_dcp(root / "release", None) == root / "release"


@pytest.mark.parametrize("slot", ["dist_ckpt", "model/dist_ckpt"])
def test_verl(tmp_path: Path, slot: str) -> None:
    """Both layouts of MegatronCheckpointManager: one dist_ckpt for all, then one for each of model, optimizer and extra."""
    own = () if slot == "dist_ckpt" else ("optimizer/dist_ckpt", "extra/dist_ckpt")
    folders = [f"global_step_{step}/{model}/{name}" for step in (8, 10) for model in ("actor", "critic") for name in (slot, *own)]
    root = made(tmp_path / "run", *folders, tracker="10", data__pt="global_step_10", config__json="global_step_10/actor/huggingface")
    step = root / "global_step_10"
    assert find_dcp(root, None) == find_dcp(step, None) == find_dcp(step / "actor", None) == step / "actor" / slot
    assert find_dcp(root, "critic") == find_dcp(step / "critic", None) == step / "critic" / slot
    assert find_dcp(root / "global_step_8", None) == root / "global_step_8" / "actor" / slot


def test_weights_that_verl_wrote_for_hugging_face_are_named(tmp_path: Path) -> None:
    """Its second layout without use_dist_checkpointing: shards of optimizer and extra alone."""
    folders = [f"global_step_10/actor/{name}/dist_ckpt" for name in ("optimizer", "extra")]
    root = made(tmp_path / "run", *folders, tracker="10", model__safetensors="global_step_10/actor/model/huggingface")
    place = root / "global_step_10" / "actor" / "model" / "huggingface"
    for path in (root, root / "global_step_10", root / "global_step_10" / "actor"):
        with pytest.raises(ConfigError, match=rf"^convert: .*: its weights are in {place}, a Hugging Face directory already$"):
            find_dcp(path, None)


def test_what_is_no_checkpoint_is_not_taken_for_one(tmp_path: Path) -> None:
    assert find_dcp(made(tmp_path / "other", config__json="."), None) is None
    root = made(tmp_path / "save", "iter_0000010")
    with pytest.raises(ConfigError, match=rf"has no {TRACKER}: name one of its checkpoints, such as .*/iter_0000010$"):
        find_dcp(root, None)
    (root / TRACKER).write_text("11")
    with pytest.raises(ConfigError, match=r"says '11', and there is no such checkpoint$"):
        find_dcp(root, None)
    old = made(tmp_path / "old", model_optim_rng__pt="iter_0000010/mp_rank_00_000", tracker="10")
    with pytest.raises(ConfigError, match=r"holds no checkpoint in Megatron's torch_dist format \(no \.metadata\)"):
        find_dcp(old, None)
    with pytest.raises(ConfigError, match=r"holds no checkpoint in Megatron's torch_dist format"):
        find_dcp(made(tmp_path / "run", "global_step_10/actor/dist_ckpt", tracker="10"), "critic")
