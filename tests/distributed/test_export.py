"""Weights go from a Hugging Face directory into any layout and come back the same, bit for bit, to a directory and to receivers."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.config import ConfigError, Layout, ModelSettings
from megarl.errors import SaveError
from megarl.host.shared_memory import mapped
from megarl.models.description import ModelDescription
from megarl.models.hf import Checkpoint
from megarl.parallel import export
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.grid import Grid
from megarl.parallel.packing import pack_micro
from megarl.parallel.weights import load_hf
from megarl.sync import wire
from megarl.sync.receive import BucketReceiver
from megarl.sync.send import Sender
from megarl.sync.store import connect_store, listen_store
from tests.distributed.exported import tensors_of
from tests.distributed.tiny_families import Make
from tests.distributed.tiny_training import global_batch, make_checkpoint
from tests.rank_pool import Pool
from tests.rows import rows

LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(ranks=2),
    "tp2": Layout(ranks=2, tp=2),
    "tp2-ep2": Layout(ranks=2, tp=2, ep=2),
    "pp2": Layout(ranks=2, pp=2),
    "pp2-vpp2": Layout(ranks=2, pp=2, vpp=2),
    "pp2-ep2": Layout(ranks=4, pp=2, ep=2),
    "tp2-pp2-vpp2": Layout(ranks=4, tp=2, pp=2, vpp=2),
    "ep4": Layout(ranks=4, ep=4),
    "etp2": Layout(ranks=2, etp=2),
    "tp2-ep2-etp2": Layout(ranks=4, tp=2, ep=2, etp=2),
    "cp2-tp2-ep2": Layout(ranks=4, cp=2, tp=2, ep=2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that two ranks do not divide: it is padded inside, and the padding never comes out."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", vocab_size=127, num_experts=8)


def stored(path: Path) -> dict[str, Tensor]:
    with Checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def loaded(grid: Grid, path: Path, dtype: str = "float32") -> tuple[list[Any], ModelDescription]:
    """This rank's chunks: each parameter was NaN before the weights came."""
    model, settings = ModelDescription.read(path), ModelSettings(path=path, dtype=dtype)  # type: ignore[arg-type]
    chunks = build_chunks(transformer_config(model, settings, grid.layout, choose()), model, choose(), grad=True)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    load_hf(chunks, model, grid)
    return chunks, model


def round_trip(grid: Grid, path: Path, dtype: str, gather_bytes: int) -> dict[str, Tensor]:
    chunks, model = loaded(grid, path, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "GATHER_BYTES", gather_bytes)
        return tensors_of(chunks, model, grid, getattr(torch, dtype))


# All experts of a layer in one gather, or one expert of each rank at a time; the suite takes turns, `--long` does both on every layout.
GATHER_BYTES = {"float32": 1 << 30, "bfloat16": 1}
ROUND_TRIPS = [(name, dtype) for name in LAYOUTS for dtype in GATHER_BYTES]


@pytest.mark.parametrize(("name", "dtype"), rows(ROUND_TRIPS, [*ROUND_TRIPS[0::4], *ROUND_TRIPS[3::4]]))
def test_weights_come_back_bit_for_bit_from_every_layout(pool: Pool, path: Path, name: str, dtype: str) -> None:
    first, *others = pool.run(round_trip, LAYOUTS[name], path, dtype, GATHER_BYTES[dtype])
    expected = {key: tensor.to(getattr(torch, dtype)) for key, tensor in stored(path).items()}
    assert first.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if not torch.equal(first[key], tensor)] == []
    assert others == [{}] * (LAYOUTS[name].ranks - 1), "rank 0 alone is given tensors"


def spread(grid: Grid, path: Path) -> dict[str, Tensor]:
    chunks, model = loaded(grid, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "GATHER_BYTES", 1)
        stacks = export.export_stacks(chunks, model, grid, torch.float32, by_stage=True, by_expert_rank=True)
        return {name: tensor.clone() for names, stack in stacks for name, tensor in wire.each(names, stack)}


@pytest.mark.parametrize("name", ["ep4", "pp2-ep2", "tp2-ep2-etp2", "cp2-tp2-ep2"])
def test_experts_may_stay_on_the_first_rank_that_has_them(pool: Pool, path: Path, name: str) -> None:
    layout, expected = LAYOUTS[name], stored(path)
    parts = [part for part in pool.run(spread, layout, path) if part]
    assert len(parts) == layout.pp * layout.ep
    assert sorted(key for part in parts for key in part) == sorted(expected), "each tensor once"
    assert all(torch.equal(tensor, expected[key]) for part in parts for key, tensor in part.items())
    assert sum(any(".experts." not in key for key in part) for part in parts) == layout.pp


def test_tied_embeddings_are_exported_once(pool: Pool, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=2)
    expected = stored(path)
    assert "lm_head.weight" not in expected
    for layout in (Layout(), Layout(ranks=2, pp=2)):
        first, *_ = pool.run(round_trip, layout, path, "float32", 1 << 30)
        assert first.keys() == expected.keys() and all(torch.equal(first[key], tensor) for key, tensor in expected.items())


def logits(grid: Grid, path: Path) -> Tensor:
    chunks, _ = loaded(grid, path)
    batch = global_batch(1)
    packed = pack_micro(batch, cp_rank=0, cp_size=1, tp=1, device=choose().device)
    with torch.no_grad():
        return chunks[0](packed.input_ids, packed.position_ids, None, packed_seq_params=packed.params)[0]


def test_logits_equal_those_of_transformers(pool: Pool, path: Path) -> None:
    from transformers import AutoModelForCausalLM

    [ours_TV] = pool.run(logits, Layout(), path)
    with torch.no_grad():
        theirs_TV = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(global_batch(1).input_T[None]).logits[0]
    assert torch.isfinite(ours_TV).all() and theirs_TV.std() > 0.1
    torch.testing.assert_close(ours_TV[: len(theirs_TV)], theirs_TV, rtol=0, atol=1e-5)


def saved(grid: Grid, path: Path, target: Path) -> None:
    chunks, model = loaded(grid, path)
    export.save_hf(chunks, model, grid, target)


def test_saved_directory_holds_the_same_tensors(pool: Pool, path: Path, tmp_path: Path) -> None:
    pool.run(saved, Layout(ranks=4, tp=2, pp=2, ep=2), path, tmp_path / "out")
    ours, theirs = stored(tmp_path / "out"), stored(path)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert [place.name for place in tmp_path.iterdir()] == ["out"]


def saved_with_predictors(grid: Grid, path: Path, target: Path) -> None:
    chunks, _ = loaded(grid, path)
    export.save_hf(chunks, ModelDescription.read(path, mtp="keep"), grid, target)


def test_kept_layers_of_multi_token_prediction_are_saved_as_they_were(pool: Pool, make: Make, tmp_path: Path) -> None:
    path = shutil.copytree(make("glm4_moe", layers=2), tmp_path / "model")
    own, further = (
        stored(path),
        {"model.layers.2.eh_proj.weight": torch.randn(8, 16).bfloat16(), "model.layers.2.enorm.weight": torch.ones(8)},
    )
    save_file({**own, **further}, path / "model.safetensors", metadata={"format": "pt"})
    config = {**json.loads((path / "config.json").read_text()), "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    pool.run(saved_with_predictors, Layout(ranks=2, pp=2), path, tmp_path / "out")
    ours = stored(tmp_path / "out")
    assert ours.keys() == own.keys() | further.keys()
    assert all(torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype for name, tensor in {**own, **further}.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def saved_after_a_fault(grid: Grid, path: Path, target: Path) -> str:
    """The second stage cannot write."""
    chunks, model = loaded(grid, path)
    with pytest.MonkeyPatch.context() as patch:
        if grid.pp_rank == 1:
            patch.setattr(export.ShardWriter, "close", lambda self: (self._folder / "gone" / "0.safetensors").touch())
        with pytest.raises(SaveError) as failed:
            export.save_hf(chunks, model, grid, target)
    return str(failed.value)


def test_each_stage_writes_its_own_and_what_one_cannot_write_leaves_nothing(pool: Pool, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for fault in pool.run(saved_after_a_fault, Layout(ranks=2, pp=2), path, target):
        assert "rank 1: FileNotFoundError" in fault
    assert list(tmp_path.iterdir()) == []
    pool.run(saved, Layout(ranks=2, pp=2), path, target)
    with Checkpoint(target) as checkpoint:
        files = {info.file.name for info in checkpoint.tensors.values()}
        first, last = (checkpoint.tensors[name].file.name for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert files == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} and (first, last) == tuple(sorted(files))
    for refused in pool.run(refused_over_something, Layout(ranks=2, pp=2), path, target):
        assert refused == f"{target} already exists: not overwritten"


def refused_over_something(grid: Grid, path: Path, target: Path) -> str:
    chunks, model = loaded(grid, path)
    with pytest.raises(ConfigError) as refused:
        export.save_hf(chunks, model, grid, target)
    return str(refused.value)


def loaded_without_query_norm(grid: Grid, path: Path) -> str:
    model, settings = ModelDescription.read(path), ModelSettings(path=path, dtype="float32")
    config = transformer_config(model, settings, grid.layout, choose())
    chunks = build_chunks(config, model, choose(), grad=True)
    del chunks[0].decoder.layers[1].self_attention.q_layernorm.weight
    with pytest.raises(ValueError) as refused:
        load_hf(chunks, model, grid)
    return str(refused.value)


def test_model_that_lacks_a_parameter_of_its_family_is_refused_by_name(pool: Pool, path: Path) -> None:
    [refused] = pool.run(loaded_without_query_norm, Layout(), path)
    assert refused.endswith("not built ['decoder.layers.1.self_attention.q_layernorm.weight']")


def announcer(grid: Grid, keys: Iterator[str]) -> Callable[[dict[str, Any]], Callable[[], object]]:
    """Tells all ranks but the last through the grid's store, one key after the other; what it returns waits until they have done it."""

    def announce(message: dict[str, Any]) -> Callable[[], object]:
        key = next(keys)
        grid.store.set(key, json.dumps(message))
        return lambda: grid.store.wait([f"{key}/{engine}" for engine in range(grid.world - 1)])

    return announce


def transferred(grid: Grid, path: Path, transport: str) -> tuple[Any, dict[str, Tensor]]:
    """The last rank sends its exported stream twice; the others, far from any engine, receive with the wire's own functions.

    Control messages go through the grid's store. Returns what was sent, or the tensors of the second update.
    """
    engines = grid.world - 1
    keys = (f"message/{number}" for number in count())
    announce = announcer(grid, keys)

    if grid.rank == engines:
        tensors = stored(path)
        device = torch.device("cpu")
        sender = Sender(transport, workers=engines, host="127.0.0.1", bucket_mb=1, timeout_s=300.0, device=device)
        sender.connect(announce)
        seen: list[str] = []
        sender.send(((name, tensor + 1) for name, tensor in tensors.items()), announce)
        sent = sender.send(iter(tensors.items()), announce, lambda name, tensor: seen.append(name))
        announce({})()
        sender.close()
        assert seen == list(tensors)
        return sent, {}
    got: dict[str, Tensor] = {}
    group = None
    while True:
        key = next(keys)
        message = json.loads(grid.store.get(key))
        if "world" in message:
            meeting = wire.Rendezvous(**message)
            store = connect_store(meeting.host, meeting.port, meeting.world, meeting.timeout_s)
            group = wire.join(meeting, store, 1 + grid.rank)
        elif message:
            header = wire.Header.parse(message)
            if header.path is not None:
                bytes_B = mapped(header.path, header.nbytes)
            else:
                assert group is not None
                bytes_B = torch.empty(header.nbytes, dtype=torch.uint8)
                wire.broadcast(group, bytes_B).wait()
            stacks = wire.unpack_stacks(bytes_B, header)
            got |= {name: tensor.clone() for names, stack in stacks for name, tensor in wire.each(names, stack)}
        grid.store.set(f"{key}/{grid.rank}", "")
        if not message:
            return None, got


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_receivers_hold_what_was_sent(pool: Pool, path: Path, transport: str) -> None:
    shared = set(Path("/dev/shm").iterdir())
    *engines, (sent, _) = pool.run(transferred, Layout(ranks=3), path, transport)
    expected = stored(path)
    assert sent.tensors == len(expected) and sent.buckets > 3, "both buffers are written more than once"
    assert sent.nbytes >= sum(tensor.nbytes for tensor in expected.values())
    for _, got in engines:
        assert got.keys() == expected.keys() and all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert not {entry for entry in set(Path("/dev/shm").iterdir()) - shared if "megarl" in entry.name}


def relayed(grid: Grid, path: Path, root: int) -> dict[str, Tensor]:
    """The last rank sends an update by shared memory that only rank `root` of the others may open; what each of these has got."""
    engines = grid.world - 1
    keys = (f"relay/{number}" for number in count())
    announce = announcer(grid, keys)

    if grid.rank == engines:
        device = torch.device("cpu")
        sender = Sender("shm", workers=engines, host="127.0.0.1", bucket_mb=1, timeout_s=300.0, device=device, relay=root)
        assert sender.first_rank == 0
        sender.connect(announce)
        sender.send(iter(stored(path).items()), announce)
        announce({})()
        sender.close()
        return {}
    receiver, got = BucketReceiver(torch.device("cpu")), dict[str, Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        if grid.rank != root:
            patch.setattr("megarl.sync.receive.mapped", None)
        while message := json.loads(grid.store.get(key := next(keys))):
            if "world" in message:
                assert message["world"] == engines
                receiver.connect([wire.Rendezvous(**message)], grid.rank)
            else:
                got |= dict(receiver.receive([wire.Header.parse(message)]))
            grid.store.set(f"{key}/{grid.rank}", "")
        grid.store.set(f"{key}/{grid.rank}", "")
    return {name: tensor.clone() for name, tensor in got.items()}  # each is a view of its bucket, which would be pickled with it


@pytest.mark.parametrize("root", [0, 1])
def test_the_worker_beside_the_sender_passes_on_what_it_alone_can_open(pool: Pool, path: Path, root: int) -> None:
    *engines, _ = pool.run(relayed, Layout(ranks=3), path, root)
    expected = stored(path)
    for got in engines:
        assert got.keys() == expected.keys() and all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def unopened(grid: Grid) -> str:
    """A bucket that the worker which is to relay it cannot open; what the workers say."""
    if grid.rank == 0:
        store, port = listen_store("127.0.0.1", grid.world, 300.0)
        grid.store.set("meeting", str(port))
    meeting = wire.Rendezvous("gloo", "127.0.0.1", int(grid.store.get("meeting")), grid.world, 300.0)
    receiver = BucketReceiver(torch.device("cpu"))
    receiver.connect([meeting], grid.rank)
    header = wire.Header(["a"], ["float32"], [[16]], [0], 64, path="/proc/self/fd/none", place=wire.place_of(torch.device("cpu")), relay=1)
    try:
        receiver.receive([header])
    except FileNotFoundError as error:
        return type(error).__name__
    return "received"


def test_a_worker_that_cannot_open_what_it_is_to_relay_leaves_no_other_waiting(pool: Pool) -> None:
    assert pool.run(unopened, Layout(ranks=3), timeout_s=60.0) == ["received", "FileNotFoundError", "received"]


def failing(grid: Grid, path: Path, transport: str) -> str:
    """An engine refuses the second bucket: what it raised comes out of `send`, at once."""
    calls = 0

    def announce(message: dict[str, Any]) -> Callable[[], object]:
        nonlocal calls
        calls += 1
        number = calls

        def wait() -> None:
            if number == 2:
                raise ValueError("engine 0 refuses")

        return wait

    sender = Sender(transport, workers=0, host="127.0.0.1", bucket_mb=1, timeout_s=300.0, device=torch.device("cpu"))
    try:
        sender.send(iter(stored(path).items()), announce)
    except ValueError as error:
        return f"{error} after {calls} buckets"
    return "sent"


def test_a_refusal_of_an_engine_ends_the_update(pool: Pool, path: Path) -> None:
    assert pool.run(failing, Layout(), path, "shm") == ["engine 0 refuses after 2 buckets"]


def test_a_large_tensor_makes_one_large_bucket_and_no_more() -> None:
    """Of 4 MB between many of half a megabyte, with buckets of one."""
    sizes, seen = [1 << 17, 1 << 20, *[1 << 17] * 12], list[int]()

    def announce(message: dict[str, Any]) -> Callable[[], object]:
        seen.append(message["nbytes"])
        return lambda: None

    sender = Sender("shm", workers=0, host="127.0.0.1", bucket_mb=1, timeout_s=60.0, device=torch.device("cpu"))
    try:
        sent = sender.send(((f"t{n}", torch.zeros(size)) for n, size in enumerate(sizes)), announce)
    finally:
        sender.close()
    assert sent.tensors == len(sizes) and seen == [1 << 19, 1 << 22, *[1 << 20] * 6]


def unmet(grid: Grid) -> tuple[str, float]:
    def announce(message: dict[str, Any]) -> Callable[[], object]:
        def wait() -> None:
            raise ValueError("engine 0 has died")

        return wait

    begun = time.monotonic()
    sender = Sender("gloo", workers=1, host="127.0.0.1", bucket_mb=1, timeout_s=120.0, device=torch.device("cpu"))
    with pytest.raises(ValueError) as refused:
        sender.connect(announce)
    return str(refused.value), time.monotonic() - begun


def test_an_engine_that_cannot_join_is_heard_at_once(pool: Pool) -> None:
    [(message, seconds)] = pool.run(unmet, Layout())
    assert message == "engine 0 has died" and seconds < 60


def test_header_that_leaves_its_bucket_is_refused() -> None:
    header = {"names": ["w"], "dtypes": ["float32"], "shapes": [[5]], "offsets": [0], "nbytes": 16}
    with pytest.raises(ValueError, match="w covers bytes 0 to 20 of 16"):
        wire.Header.parse(header)
    with pytest.raises(ValueError, match="unknown dtype 'float33'"):
        wire.Header.parse({**header, "dtypes": ["float33"]})


def test_saving_over_something_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="already exists"):
        export.CheckpointWriter(path, path, "float32")
