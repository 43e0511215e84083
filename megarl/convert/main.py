"""`megarl convert`: the command line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import ConfigError
from megarl.text.paths import nameable
from megarl.text.stdout import say

if TYPE_CHECKING:
    from megarl.convert.conversion_directory import ConversionDirectory
    from megarl.convert.engine import Conversion
    from megarl.convert.plan import PlannedParameter

GB = 1_000_000_000
MAX_SHARD = 1 << 50  # bytes
MAX_PARTS = 4096  # maximum of --tp, --etp and --workers


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, for both directions."""
    top = argparse.ArgumentParser(
        prog="megarl convert",
        description="Hugging Face directories <-> Megatron checkpoints. Killed, the same command goes on where it was; started several "
        "times (on machines that share the file system, too), the processes share the work.",
    )
    verbs = top.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    one = verbs.add_parser("hf-to-megatron", help="a Hugging Face directory into OUT/step_000000")
    one.add_argument("source", type=Path, metavar="HF_DIR")
    one.add_argument("out", type=Path, metavar="OUT", nargs="?", help="required, except with --plan")
    one.add_argument("--head", choices=("lm", "value"), help="value: a critic or reward model, from a language model with a fresh head")
    one.add_argument(
        "--tp", type=int, default=1, help="splits parameters as ranks with this tensor parallelism read them (any layout can load them)"
    )
    one.add_argument(
        "--etp", type=int, default=1, help="the same for experts; layers and experts are always stored separately, whatever pp, vpp and ep"
    )
    one.add_argument("--drop-mtp", action="store_true", help="leaves out multi-token prediction layers")
    two = verbs.add_parser("megatron-to-hf", help="a model of a step directory into a Hugging Face directory")
    two.add_argument("source", type=Path, metavar="STEP_OR_RUN", help="a step directory, or a run: its newest step")
    two.add_argument("out", type=Path, metavar="OUT")
    two.add_argument("--like", type=Path, metavar="HF_DIR", help="config.json and tokenizer, if the step has none")
    two.add_argument("--shard-gb", type=float, default=5.0, help="size of one file, in 10^9 bytes (default 5)")
    for verb in (one, two):
        verb.add_argument("--model", metavar="NAME", help="of the model in the step directory: policy, critic, ...")
        verb.add_argument("--dtype", choices=("float32", "bfloat16"), help="casts to this dtype; without it every tensor keeps its own")
        verb.add_argument("--workers", type=int, default=4, help="threads (default 4); they share the memory of two layers")
        verb.add_argument("--plan", action="store_true", help="checks and prints the plan; needs only config.json from HF_DIR")
    return top


def main(arguments: Sequence[str]) -> int:
    """Convert, or print the plan.

    Args:
        arguments: the command line after `megarl convert`.

    Returns:
        The exit status: 1 if other processes are still converting the rest, else 0.

    Raises:
        ConfigError: unsuitable options, an incomplete source, or a failed conversion.
    """
    given = parser().parse_args(arguments)
    for name in ("tp", "etp", "workers"):
        if getattr(given, name, 1) < 1:
            raise ConfigError(f"convert: --{name} {getattr(given, name)} is below 1")
        if getattr(given, name, 1) > MAX_PARTS:
            raise ConfigError(f"convert: --{name} {getattr(given, name)} is more than {MAX_PARTS}")
    for path in (given.source, given.out, getattr(given, "like", None)):
        try:
            nameable(path or Path())
        except ValueError as error:
            raise ConfigError(f"convert: {error}") from None
    import torch

    torch.set_num_threads(1)
    try:
        return _to_megatron(given) if given.direction == "hf-to-megatron" else _to_hf(given)
    except ConfigError as error:  # replace the configuration keys in the message by the command's own names
        said = (
            str(error)
            .replace("model.path: ", "convert: ")
            .replace("checkpoint: ", "convert: ")
            .replace("model.drop_mtp=true", "--drop-mtp")
        )
        raise ConfigError(said) from None


def _to_megatron(given: argparse.Namespace) -> int:
    from megarl.convert import to_megatron

    if given.plan:
        return _plan(given)
    if given.out is None:
        raise ConfigError("convert: hf-to-megatron needs OUT")
    options = {"head": given.head, "model": given.model, "dtype": given.dtype, "tp": given.tp, "etp": given.etp, "drop_mtp": given.drop_mtp}
    conversion = to_megatron.ToMegatron(given.source, given.out, **options)
    directory = to_megatron.conversion_directory(given.out)
    status = _run(conversion, directory, given.workers)
    if not status:
        to_megatron.point_latest(given.out)
    return status


def _to_hf(given: argparse.Namespace) -> int:
    from megarl.convert import to_hf

    step = to_hf.find_step(given.source)
    if not 1 <= given.shard_gb * GB <= MAX_SHARD:
        raise ConfigError(f"convert: --shard-gb {given.shard_gb:g} is not a valid file size")
    conversion = to_hf.ToHF(step, given.out, model=given.model, like=given.like, dtype=given.dtype, shard_bytes=int(given.shard_gb * GB))
    if given.plan:
        say(*summary(conversion.items, len(conversion.units)))
        return 0
    return _run(conversion, to_hf.conversion_directory(given.out), given.workers)


def _run(conversion: Conversion, directory: ConversionDirectory, workers: int) -> int:
    from megarl.convert.engine import run

    begun = time.perf_counter()
    if not run(conversion, directory, workers):
        say(f"megarl: {directory.final}: other processes are still converting the rest")
        return 1
    seconds, size = time.perf_counter() - begun, sum(item.size for item in conversion.items)
    speed = f"{size / GB:.3f} GB in {seconds:.1f} s, {size / GB / seconds:.2f} GB/s"
    say(f"megarl: {directory.final}: {len(conversion.items)} parameters, {speed}")
    return 0


def _plan(given: argparse.Namespace) -> int:
    """Print the plan for a directory with a config.json, whether or not it also has the weights."""
    from megarl.convert import to_megatron
    from megarl.convert.plan import planned

    directory = given.source
    if any(directory.glob("*.safetensors")):
        options = {
            "head": given.head,
            "model": given.model,
            "dtype": given.dtype,
            "tp": given.tp,
            "etp": given.etp,
            "drop_mtp": given.drop_mtp,
        }
        conversion = to_megatron.ToMegatron(directory, given.out or directory, **options)
        items, units = conversion.items, len(conversion.units)
    else:
        items, units = planned(directory, given.head, given.dtype, given.tp, given.etp)
    say(*summary(items, units, given.tp, given.etp))
    return 0


def summary(items: Sequence[PlannedParameter], units: int, tp: int = 1, etp: int = 1) -> Iterator[str]:
    """Yield the lines of a plan.

    Args:
        items: all parameters.
        units: the number of units into which they are divided.
        tp: tensor-parallel size for which the Megatron checkpoint is split; it determines the number of pieces.
        etp: the same for experts.
    """
    from megarl.convert.plan import DTYPES, largest_layer, shards

    numbers = sum(item.parameters for item in items)
    read, written = (
        sum(item.parameters * DTYPES[name].itemsize for item, name in pairs)
        for pairs in (
            [(item, item.source) for item in items],
            [(item, item.target) for item in items],
        )
    )
    layer = largest_layer(items)
    yield f"parameters       {numbers:,} ({numbers / 1e9:.2f}B)"
    yield f"Hugging Face     {sum(len(item.weight.hf) for item in items):,} tensors"
    names, cut = {item.name.key for item in items}, sum(len(shards(item, tp, etp)) for item in items)
    yield f"Megatron         {len(items):,} parameters under {len(names):,} names, {cut:,} pieces"
    yield f"bytes            {read:,} read, {written:,} written, in {units:,} units"
    yield f"largest layer    {layer.name}: {layer.size:,} bytes; at most {2 * layer.size / GB:.2f} GB in memory"
