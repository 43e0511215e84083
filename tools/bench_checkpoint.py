"""Compare distributed checkpoints with torch's own, measured in one run: `python tools/bench_checkpoint.py [--ranks 2] [--directory DIR]`.

A bfloat16 model with its optimizer on CPU ranks (gloo), 14 bytes per parameter. torch.distributed.checkpoint (DCP) gets as many bytes in as
many tensors, each rank its own, and syncs them to disk, too; it hashes nothing. Each figure is that of the slowest rank, and the median of
runs that alternate between the two sides, so that a busy machine slows both; in brackets, the spread of the runs' ratios. Neither side
reads from the page cache, as for a run that resumes on another machine. Exit status: 1 if a bound is missed.
"""

import argparse
import ctypes
import gc
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megarl.checkpoints.steps import verify
from megarl.config import CheckpointSettings, Layout, ModelSettings, OptimizerSettings
from megarl.models.description import ModelDescription
from tools import bench_convert

WARM = 1  # warm-up rounds, which are not counted
MODEL: dict[str, Any] = {
    **bench_convert.MODEL,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}


class Row(NamedTuple):
    """A figure, what it is compared with, and the bound on their ratio."""

    what: str
    ours: str
    against: str
    ratios: list[float]  # of the rounds
    ratio: float
    bound: float


class Bench:
    """The measurements on one rank."""

    def __init__(self, grid: Any, layers: int, directory: Path, rounds: int) -> None:
        from megarl.parallel.backend import choose
        from megarl.parallel.build import build_chunks, transformer_config
        from megarl.parallel.checkpoint.state import ModelState
        from megarl.parallel.optimizer import make_trainable

        model = ModelDescription.of({**MODEL, "num_hidden_layers": layers})
        config = transformer_config(model, ModelSettings(path=Path("none"), dtype="bfloat16"), grid.layout, choose())
        chunks = build_chunks(config, model, choose(), grad=True)
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.normal_(std=0.02)
        trainable = make_trainable(chunks, OptimizerSettings(), total_steps=1)
        trainable.step()  # on zero gradients, so that the moments exist
        self.grid, self.directory, self.rounds = grid, directory, rounds
        self.part = {"policy": ModelState(trainable.chunks, model, trainable)}

    def slowest(self, call: Callable[[], Any]) -> float:
        """Return the seconds that the slowest rank takes."""
        dist.barrier()
        begun = time.perf_counter()
        call()
        seconds = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    def run(self) -> dict[str, list[float]]:
        """Return the seconds of every round, and bytes."""
        from megarl.parallel.checkpoint.save import Saver

        savers = {kind: Saver(self.directory / kind, self.grid, settings(kind == "async")) for kind in ("sync", "async")}
        size = savers["sync"].save(0, self.part, {}).bytes
        total = torch.tensor(size)
        dist.all_reduce(total)
        plain = self._tensors(size)
        taken: dict[str, list[float]] = {}
        for number in range(1, WARM + self.rounds + 1):
            for name, seconds in self._round(number, savers, plain).items():
                taken.setdefault(name, []).append(seconds)
        results = {name: seconds[WARM:] for name, seconds in taken.items()}
        return {**results, "bytes": [float(total)], "rank_bytes": [float(size)], "extra": [self._extra(savers["async"], size)]}

    def _tensors(self, size: int) -> list[Tensor]:
        """Return what DCP saves: as many bytes as a save writes, in as many tensors as the model has."""
        chunks = self.part["policy"].chunks
        shapes = [parameter.shape for chunk in chunks for parameter in chunk.parameters()]
        whole = sum(shape.numel() for shape in shapes)
        return [torch.randn(max(1, shape.numel() * size // whole // 4)) for shape in shapes]

    def _round(self, number: int, savers: dict[str, Any], plain: list[Tensor]) -> dict[str, float]:
        from megarl.parallel.checkpoint.load import load

        path = self.directory / "sync" / f"step_{number:06d}"
        own = {f"{self.grid.rank}.{index}": tensor for index, tensor in enumerate(plain)}
        results = {
            "sync": self.slowest(lambda: savers["sync"].save(number, self.part, {})),
            "dcp sync": self.slowest(lambda: dcp.save(own, storage_writer=self._writer("sync"))),
            "blocked": self.slowest(lambda: savers["async"].save(number, self.part, {})),
            "behind": self.slowest(savers["async"].wait),
        }
        results["dcp blocked"], results["dcp whole"] = self._dcp_asynchronous(own)
        good = verify(path, contents=False).saved
        assert good is not None
        self._forget()
        results["load"] = self.slowest(lambda: load(good, self.part, self.grid))
        self._forget()
        results["dcp load"] = self.slowest(lambda: dcp.load(own, storage_reader=dcp.FileSystemReader(self.directory / "dcp" / "sync")))
        return results

    def _forget(self) -> None:
        """Evict all files from the page cache."""
        for folder, _, names in os.walk(self.directory if self.grid.rank == 0 else ""):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _dcp_asynchronous(self, own: dict[str, Tensor]) -> tuple[float, float]:
        """Return the seconds for which the caller is blocked, and until all is written.

        There is no barrier in between, because DCP's thread uses the process group.
        """
        blocked = [0.0]

        def call() -> None:
            begun = time.perf_counter()
            future: Any = dcp.async_save(own, storage_writer=self._writer("async"))
            blocked[0] = time.perf_counter() - begun
            future.result()

        whole, longest = self.slowest(call), torch.tensor(blocked)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest), whole

    def _writer(self, kind: str) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.directory / "dcp" / kind, sync_files=True, overwrite=True)

    def _extra(self, saver: Any, size: int) -> float:
        """Return the peak memory of a save beyond that of training, as a share of the bytes staged."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before, most, done = resident(), 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.002):
                most = max(most, resident() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        saver.save(1000, self.part, {})
        saver.wait()
        done.set()
        watcher.join()
        return most / size


def settings(asynchronous: bool) -> CheckpointSettings:
    """The default settings, except for what is compared, and without keeping old checkpoints."""
    return CheckpointSettings(asynchronous=asynchronous, keep_last=1)


def resident() -> int:
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rank_main(rank: int, ranks: int, port: Any, layers: int, directory: Path, rounds: int, answers: Any) -> None:
    """Run one rank from its start to its end."""
    torch.set_num_threads(1)
    from megarl.parallel.backend import choose
    from megarl.parallel.grid import destroy_grid, init_grid
    from megarl.sync.store import connect_store, listen_store

    choose()
    if rank == 0:
        store, number = listen_store("127.0.0.1", ranks, 120.0)
        for _ in range(ranks - 1):
            port.put(number)
    else:
        store = connect_store("127.0.0.1", port.get(timeout=120), ranks, 120.0)
    grid = init_grid(Layout(ranks=ranks, ep=ranks), rank=rank, store=store, seed=1, timeout_s=600.0)
    results = Bench(grid, layers, directory, rounds).run()
    destroy_grid()
    if rank == 0:
        answers.put(results)


def rows(found: dict[str, list[float]]) -> list[Row]:
    """The rows of the table."""
    gigabytes, rank_gigabytes, extra = found["bytes"][0] / 1e9, found["rank_bytes"][0] / 1e9, found["extra"][0]
    complete = [blocked + behind for blocked, behind in zip(found["blocked"], found["behind"], strict=True)]

    def row(what: str, ours: list[float], theirs: list[float], bound: float) -> Row:
        one, other = statistics.median(ours), statistics.median(theirs)
        ratios = [own / peer for own, peer in zip(ours, theirs, strict=True)]
        return Row(what, f"{one:.3f} s", f"DCP: {other:.3f} s", ratios, one / other, bound)

    return [
        row(f"a synchronous save ({gigabytes:.2f} GB)", found["sync"], found["dcp sync"], 1.0),
        row("blocked by an asynchronous save", found["blocked"], found["dcp blocked"], 1.0),
        row("an asynchronous save until it is complete", complete, found["dcp whole"], 1.0),
        row("load, weights and optimizer, hashes checked", found["load"], found["dcp load"], 1 / 0.9),
        Row("most memory of a save", f"{extra * rank_gigabytes:.2f} GB", f"bytes staged: {rank_gigabytes:.2f} GB", [extra], extra, 1.2),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8, help="of about 13 million parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="bench_checkpoint-", dir=args.directory))
    context = multiprocessing.get_context("spawn")
    port, answers = context.Queue(), context.Queue()
    arguments = (args.ranks, port, args.layers, directory, args.rounds, answers)
    processes = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(args.ranks)]
    try:
        for process in processes:
            process.start()
        results = answers.get(timeout=1200)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
        shutil.rmtree(directory)
    table = rows(results)
    for what, ours, against, ratios, ratio, bound in table:
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        verdict = "holds" if ratio <= bound else "MISSED"
        print(f"{what:45} {ours:>9}   {against:24} {ratio:6.2f}x {spread:15}  bound {bound:.3g}x  {verdict}")
    return int(any(row.ratio > row.bound for row in table))


if __name__ == "__main__":
    raise SystemExit(main())
