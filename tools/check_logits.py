"""Compare Megatron's logits, on any layout, with transformers', for a Hugging Face directory of any family that megarl knows.

    python tools/check_logits.py MODEL [--tp 2] [--pp 2] [--vpp 2] [--ep 2] [--etp 2] [--cp 2] [--dtype float32] [--tokens 64]

Starts the ranks of the layout itself (gloo, or NCCL if there are GPUs), packs random sequences of different lengths into one micro-batch,
and compares with transformers, which runs them one by one. Prints a line per sequence and a verdict; exit status 0 if the difference is
within its bound, 1 if it is not, 2 for bad input.

The bound is in standard deviations of transformers' logits. It applies to the largest difference in float32, and to the mean difference in
bfloat16, where rounding now and then sends a token of a mixture to a different expert, which changes its logits by as much as they are.

Axes: T entries (tokens fed), R rows of local logits, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor

from megarl.batch import Batch, Sample, pack
from megarl.config import ConfigError, Layout, ModelSettings
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint, check_layout
from megarl.models.hf import read_config
from megarl.models.registry import MODEL_TYPES

if TYPE_CHECKING:
    from megarl.parallel.grid import Grid

BOUND = {"float32": 1e-4, "bfloat16": 0.1}
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Part:
    """What one rank of the last stage has: the logits of some entries over its shard of the vocabulary."""

    tp_rank: int
    entry_T: np.ndarray  # arrays, not tensors, which would be sent as handles that die with the rank
    logits_TV: np.ndarray


def sequences(count: int, tokens: int, vocabulary: int, seed: int) -> Batch:
    """Return random sequences of `tokens / 2` to `tokens` tokens."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(max(2, tokens // 2), tokens + 1)) for _ in range(count)]
    drawn = [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
    return pack([Sample(row, 1, np.zeros(len(row) - 1, np.float32), "stop") for index, row in enumerate(drawn)])


def megatron_part(grid: Grid, settings: ModelSettings, batch: Batch) -> Part | None:
    """Return this rank's part of the logits of `batch`; None if it is not on the last stage, or repeats another rank's. Collective."""
    from megarl.parallel import schedule
    from megarl.parallel.backend import choose
    from megarl.parallel.build import build_chunks, transformer_config
    from megarl.parallel.weights import load_hf

    model = ModelDescription.read(settings.path)
    chunks = build_chunks(transformer_config(model, settings, grid.layout, choose()), model, choose(), grad=False)
    load_hf(chunks, model, grid)

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.zeros(()), (batch.extra_T["entry"].cpu(), logits_RV[row_T].float().cpu())

    numbered = batch.with_extra(entry=torch.arange(len(batch)))
    results = schedule.run(chunks, [numbered], loss_fn, grid, forward_only=True)
    if not results or grid.dp_rank:
        return None
    [(entry_T, logits_TV)] = results
    return Part(grid.tp_rank, entry_T.numpy(), logits_TV.numpy())


def joined(parts: Sequence[Part | None], batch: Batch, vocabulary: int) -> Tensor:
    """Join the logits [T, V] of the whole batch, without the vocabulary's padding."""
    shards: dict[int, list[Part]] = {}
    for part in parts:
        if part is not None:
            shards.setdefault(part.tp_rank, []).append(part)
    columns = []
    for _, shard in sorted(shards.items()):
        column_TV = torch.from_numpy(shard[0].logits_TV).new_full((len(batch), shard[0].logits_TV.shape[1]), torch.nan)
        for part in shard:
            column_TV[torch.from_numpy(part.entry_T)] = torch.from_numpy(part.logits_TV)
        columns.append(column_TV)
    return torch.cat(columns, dim=1)[:, :vocabulary]


def transformers_model(path: Path, dtype: str = "float32", auto: str | None = None, **options: Any) -> Any:
    """Return transformers' model of a directory; one whose model_type it does not know is read as the architecture of another name.

    Args:
        path: the directory.
        dtype: the dtype of its weights.
        auto: transformers' class of classes; None: that of language models, or of those that see images, too.
        **options: for `from_pretrained`.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = read_config(path)
    auto = auto or ("AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForCausalLM")
    kind, *others = MODEL_TYPES[config["architectures"][0]]
    if config["model_type"] in others:
        given = {key: value for key, value in json.loads((path / "config.json").read_text()).items() if key != "model_type"}
        options["config"] = transformers.AutoConfig.for_model(kind, **given)
    model = getattr(transformers, auto).from_pretrained(path, dtype=getattr(torch, dtype), trust_remote_code=False, **options)
    order_indexers(model[0] if isinstance(model, tuple) else model)  # with output_loading_info there are two
    return model


def order_indexers(model: Any) -> list[int]:
    """Let transformers' indexers of sparse attention choose, of keys of equal scores, the earliest, as ours do: theirs take any.

    Returns for how many queries that has mattered, in each of their passes, once there are any. In a tiny model's first layer the padding
    token is one: its embedding is 0, and so are its scores.
    """
    matters = list[int]()

    def topk(score: Tensor, k: int, dim: int) -> Any:
        values, places = score.sort(dim=dim, descending=True, stable=True)
        if score.shape[dim] > k:
            matters.append(int(((values[..., k - 1] == values[..., k]) & (values[..., k] > torch.finfo(score.dtype).min / 2)).sum()))
        return torch.return_types.topk((values[..., :k], places[..., :k]))

    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.forward = patch.object(Tensor, "topk", topk)(module.forward)
    return matters


def transformers_logits(path: Path, batch: Batch, dtype: str) -> Tensor:
    """Return transformers' logits [T, V] of the same entries, each sequence run by itself."""
    model = transformers_model(path, dtype).eval()
    with torch.no_grad():
        return torch.cat([model(batch.input_T[None, batch.seq_T == n]).logits[0].float() for n in range(len(batch.length_N))])


def compare(ours_TV: Tensor, theirs_TV: Tensor, batch: Batch, dtype: str, bound: float) -> tuple[list[str], bool]:
    """Return the lines of the table, and whether the difference is within the bound (NaN is not)."""
    lines = [f"{'sequence':>8}  {'tokens':>6}  {'max |diff|':>10}  {'mean |diff|':>11}  {'top-1 agree':>11}"]

    def line(name: str, chosen_T: Tensor) -> tuple[float, float]:
        ours, theirs = ours_TV[chosen_T], theirs_TV[chosen_T]
        difference, agree = (ours - theirs).abs(), (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
        lines.append(f"{name:>8}  {len(ours):>6}  {difference.max():>10.2e}  {difference.mean():>11.2e}  {float(agree):>11.2%}")
        return float(difference.max()), float(difference.mean())

    for n in range(len(batch.length_N)):
        line(str(n), batch.seq_T == n)
    largest, mean = line("all", torch.ones(len(batch), dtype=torch.bool))
    what, measured = ("max", largest) if dtype == "float32" else ("mean", mean)
    spread = float(theirs_TV.std())
    good = measured <= bound * spread
    verdict = "the same model" if good else "NOT the same model"
    lines.append(
        f"{verdict}: {what} |difference| is {measured / spread:.1e} standard deviations ({spread:.2g}) of the logits, bound {bound:.0e}"
    )
    return lines, good


def run_ranks(layout: Layout, settings: ModelSettings, batch: Batch) -> list[Part | None]:
    """Start the ranks on this machine, collect their parts and end them. Raises RuntimeError with a rank's error, or the late ranks."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(layout.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, theirs, Path(folder) / "port", layout, settings, batch), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        try:
            for process, (_, theirs) in zip(ranks, pairs, strict=True):
                process.start()
                theirs.close()
            return _answers([ours for ours, _ in pairs])
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _answers(pipes: list[Any]) -> list[Part | None]:
    answers: dict[int, Part | None] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(answers) < len(pipes):
        late = [rank for rank in range(len(pipes)) if rank not in answers]
        ready = multiprocessing.connection.wait([pipes[rank] for rank in late], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {late} gave no logits in {TIMEOUT_S:g} s")
        for rank in [rank for rank in late if pipes[rank] in ready]:
            try:
                failure, answers[rank] = pipes[rank].recv()
            except EOFError:
                failure = "the process died"
            if failure:
                raise RuntimeError(f"rank {rank}: {failure}")
    return [answers[rank] for rank in range(len(pipes))]


def _rank(rank: int, pipe: Any, meeting: Path, layout: Layout, settings: ModelSettings, batch: Batch) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    from megarl.parallel.grid import destroy_grid, init_grid
    from megarl.sync.store import connect_store, listen_store

    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // layout.ranks))
        if rank == 0:
            store, port = listen_store("127.0.0.1", layout.ranks, 120.0)
            meeting.with_suffix(".new").write_text(str(port))
            meeting.with_suffix(".new").rename(meeting)
        else:
            deadline = time.monotonic() + 120.0
            while not meeting.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError("rank 0 has not begun in 120 s")
                time.sleep(0.05)
            store = connect_store("127.0.0.1", int(meeting.read_text()), layout.ranks, 120.0)
        grid = init_grid(layout, rank=rank, store=store, seed=1, timeout_s=TIMEOUT_S)
        part = megatron_part(grid, settings, batch)
        pipe.send((None, part))
        destroy_grid()
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", None))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison, and return the exit status."""
    parser = argparse.ArgumentParser(description="Logits of Megatron on a layout against transformers'.")
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    for name in ("tp", "pp", "cp", "ep", "etp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--vpp", type=int)
    parser.add_argument("--first-layers", type=int, help="of the first pipeline stage, where the stages are not equal")
    parser.add_argument("--last-layers", type=int, help="of the last pipeline stage")
    parser.add_argument("--dtype", choices=BOUND, default="float32")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of the longest sequence")
    parser.add_argument("--bound", type=float, help="in standard deviations of the logits (default: 1e-4 in float32, 0.1 in bfloat16)")
    parser.add_argument("--drop-mtp", action="store_true", help="leave multi-token-prediction layers out")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    try:
        parallel = {name: getattr(given, name) for name in ("tp", "pp", "cp", "ep", "etp", "vpp")}
        ranks = math.lcm(given.tp * given.pp * given.cp, given.ep * given.etp * given.pp)
        layout = Layout(ranks=ranks, **parallel)
        model = check_checkpoint(given.model, mtp="drop" if given.drop_mtp else None)
        ends = {"first": given.first_layers, "last": given.last_layers}
        megatron = {f"num_layers_in_{end}_pipeline_stage": layers for end, layers in ends.items() if layers is not None}
        check_layout(model, layout, megatron)
    except ValueError as error:
        print(f"check_logits: {str(error).splitlines()[-1] if not isinstance(error, ConfigError) else error}", file=sys.stderr)
        return 2
    batch = sequences(given.sequences, given.tokens, model.vocab, given.seed)
    parts = run_ranks(layout, ModelSettings(path=given.model, dtype=given.dtype, megatron=megatron), batch)
    theirs_TV = transformers_logits(given.model, batch, given.dtype)
    lines, good = compare(joined(parts, batch, model.vocab), theirs_TV, batch, given.dtype, given.bound or BOUND[given.dtype])
    sizes = ", ".join(f"{name} {size}" for name, size in parallel.items() if size not in (None, 1)) or "one rank"
    print(f"{given.model}: {model.architecture}, {given.dtype}, {sizes}", *lines, sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
