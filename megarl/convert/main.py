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
    from megarl.config import Mtp
    from megarl.convert.audit import Source
    from megarl.convert.conversion_directory import ConversionDirectory
    from megarl.convert.dcp_source import DcpSource
    from megarl.convert.engine import Conversion
    from megarl.convert.hub import Upload
    from megarl.convert.plan import PlannedParameter
    from megarl.convert.step_source import StepSource

GB = 1_000_000_000
MAX_SHARD = 1 << 50  # bytes
MAX_PARTS = 4096  # maximum of --tp, --etp and --workers


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, for all directions."""
    top = argparse.ArgumentParser(
        prog="megarl convert",
        description="Hugging Face directories <-> Megatron checkpoints. Killed, the same command goes on where it was; started several "
        "times (on machines that share the file system, too), the processes share the work.",
    )
    verbs = top.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    one = verbs.add_parser("hf-to-megatron", help="a Hugging Face directory into OUT/step_000000")
    one.add_argument("source", type=Path, metavar="HF_DIR")
    one.add_argument("out", type=Path, metavar="OUT", nargs="?", help="required, except with --plan")
    one.add_argument("--keep-mtp", action="store_true", help="keeps multi-token prediction layers in a file of their own, unchanged")
    one.add_argument("--head", choices=("lm", "value"), help="value: a critic or reward model, from a language model with a fresh head")
    two = verbs.add_parser("megatron-to-hf", help="a Megatron checkpoint, megarl's or another program's, into a Hugging Face directory")
    two.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="a step directory, or a run: its newest step; or a torch_dist checkpoint of Megatron-LM, slime or verl (iter_*, "
        "global_step_*), or the directory of these: its newest",
    )
    two.add_argument("out", type=Path, metavar="OUT")
    two.add_argument("--like", type=Path, metavar="HF_DIR", help="config.json and tokenizer, if the checkpoint has none")
    two.add_argument("--shard-gb", type=float, default=5.0, help="size of one file, in 10^9 bytes (default 5)")
    two.add_argument("--upload", metavar="ORG/NAME", help="uploads OUT to this repository of huggingface.co, a private one if it is new")
    two.add_argument("--public", action="store_true", help="makes that repository public, or uploads to one that is")
    three = verbs.add_parser("megatron-to-step", help="another program's Megatron checkpoint into OUT/step_000000, which megarl runs load")
    three.add_argument(
        "source", type=Path, metavar="CHECKPOINT", help="of Megatron-LM, slime or verl (iter_*, global_step_*), or the directory of these"
    )
    three.add_argument("out", type=Path, metavar="OUT")
    three.add_argument("--like", type=Path, metavar="HF_DIR", required=True, help="config.json and tokenizer")
    for verb in (one, three):
        verb.add_argument(
            "--tp", type=int, default=1, help="splits parameters as ranks with this tensor parallelism read them (any layout can load them)"
        )
        verb.add_argument(
            "--etp",
            type=int,
            default=1,
            help="the same for experts; layers and experts are always stored separately, whatever pp, vpp and ep",
        )
    for verb in (one, two, three):
        verb.add_argument("--drop-mtp", action="store_true", help="leaves out multi-token prediction layers")
        verb.add_argument("--drop-images", action="store_true", help="leaves out what sees images")
        verb.add_argument("--model", metavar="NAME", help="of the model in the step directory, or in verl's: policy, actor, critic, ...")
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
        return {"hf-to-megatron": _to_megatron, "megatron-to-hf": _to_hf, "megatron-to-step": _to_step}[given.direction](given)
    except ConfigError as error:  # replace the configuration keys in the message by the command's own names
        message = (
            str(error)
            .replace("model.path: ", "convert: ")
            .replace("checkpoint: ", "convert: ")
            .replace("model.mtp=keep", "--keep-mtp")
            .replace("model.mtp=drop", "--drop-mtp")
            .replace("model.drop_images=true", "--drop-images")
        )
        raise ConfigError(message) from None


def _to_megatron(given: argparse.Namespace) -> int:
    if given.plan and not any(given.source.glob("*.safetensors")):
        return _plan(given)
    if given.out is None and not given.plan:
        raise ConfigError("convert: hf-to-megatron needs OUT")
    return _to_steps(_audited(given), given)


def _to_step(given: argparse.Namespace) -> int:
    from megarl.convert.dcp_source import DcpSource, find_dcp

    _check_directory(given.source)
    folder = find_dcp(given.source, given.model)
    if folder is None:
        raise ConfigError(f"convert: {given.source} has no checkpoint of Megatron-LM, slime or verl")
    return _to_steps(DcpSource(folder, given.like, given.drop_mtp, given.drop_images), given)


def _audited(given: argparse.Namespace) -> Source:
    from megarl.convert.audit import audit
    from megarl.models.description import ModelDescription

    if given.keep_mtp and given.drop_mtp:
        raise ConfigError("convert: --keep-mtp and --drop-mtp")
    mtp: Mtp | None = "keep" if given.keep_mtp else "drop" if given.drop_mtp else None
    return audit(given.source, given.head or ModelDescription.read(given.source).head, mtp=mtp, drop_images=given.drop_images)


def _to_steps(source: Source | DcpSource, given: argparse.Namespace) -> int:
    from megarl.convert import to_megatron

    out = given.out or given.source
    conversion = to_megatron.ToMegatron(source, out, model=given.model, dtype=given.dtype, tp=given.tp, etp=given.etp)
    if given.plan:
        say(*summary(conversion.items, len(conversion.units), given.tp, given.etp))
        return 0
    status = _run(conversion, to_megatron.conversion_directory(out), given.workers)
    if not status:
        to_megatron.point_latest(out)
    return status


def _to_hf(given: argparse.Namespace) -> int:
    from megarl.convert import to_hf
    from megarl.convert.hub import Upload

    if not 1 <= given.shard_gb * GB <= MAX_SHARD:
        raise ConfigError(f"convert: --shard-gb {given.shard_gb:g} is not a valid file size")
    if given.public and given.upload is None:
        raise ConfigError("convert: --public is of --upload")
    upload = None if given.upload is None else Upload(given.upload, public=given.public)
    conversion = to_hf.ToHF(_checkpoint(given), given.out, dtype=given.dtype, shard_bytes=int(given.shard_gb * GB))
    if given.plan:
        say(*summary(conversion.items, len(conversion.units)))
        return 0
    if upload is not None and conversion.done:  # by a command that was interrupted as it uploaded
        return _upload(upload, given.out)
    status = _run(conversion, to_hf.conversion_directory(given.out), given.workers)
    return status if status or upload is None else _upload(upload, given.out)


def _upload(upload: Upload, out: Path) -> int:
    say(f"megarl: {upload.run(out)}: {out} is uploaded")
    return 0


def _checkpoint(given: argparse.Namespace) -> StepSource | DcpSource:
    """Return the checkpoint that the command line names."""
    from megarl.convert.dcp_source import DcpSource, find_dcp
    from megarl.convert.step_source import StepSource, find_step

    _check_directory(given.source)
    step = find_step(given.source)
    if step is not None:
        return StepSource(step, given.model, given.like, given.drop_mtp, given.drop_images)
    folder = find_dcp(given.source, given.model)
    if folder is None:
        raise ConfigError(f"convert: {given.source} has no step directories, and no checkpoint of Megatron-LM, slime or verl")
    if given.like is None:
        raise ConfigError(f"convert: {folder} has no config.json: name a directory that has the model's, and its tokenizer (--like HF_DIR)")
    return DcpSource(folder, given.like, given.drop_mtp, given.drop_images)


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"convert: no such directory: {path}")


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
    """Print the plan for a directory that has only config.json."""
    from megarl.convert.plan import planned

    items, units = planned(given.source, given.head, given.dtype, given.tp, given.etp, drop_images=given.drop_images)
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
    names, cut = {name.key for item in items for name in item.names}, sum(len(shards(item, tp, etp)) for item in items)
    yield f"Megatron         {len(items):,} parameters under {len(names):,} names, {cut:,} pieces"
    yield f"bytes            {read:,} read, {written:,} written, in {units:,} units"
    yield f"largest layer    {layer.name}: {layer.size:,} bytes; at most {2 * layer.size / GB:.2f} GB in memory"
