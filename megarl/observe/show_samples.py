"""`megarl samples RUN`: the responses that a run has kept in its files."""

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from megarl.errors import ConfigError
from megarl.observe.samples import File, SampleRecord, files
from megarl.text.display import escaped, one_line
from megarl.text.stdout import say

MAX_CHARS = 2000  # characters shown of a text

FileSample = tuple[File, SampleRecord]


def main(arguments: Sequence[str]) -> int:
    """Print samples. Raises ConfigError if the run has none, or none that match the arguments."""
    top = argparse.ArgumentParser(
        prog="megarl samples",
        description="Shows the responses that a run has kept (log.samples of each step, all of each evaluation), newest first. What a "
        "terminal would obey is shown as \\x1b and the like.",
    )
    top.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    top.add_argument("--step", type=int, metavar="N", help="only this step")
    top.add_argument("--set", metavar="NAME", help="only evaluations on this set, such as heldout; `train`: only training")
    order = top.add_mutually_exclusive_group()
    order.add_argument("--best", action="store_true", help="highest rewards first")
    order.add_argument("--worst", action="store_true", help="lowest rewards first")
    top.add_argument("--truncated", action="store_true", help="only those cut off by the length limit")
    top.add_argument("--search", metavar="TEXT", help="only those with this text in prompt, response or answer, ignoring case")
    top.add_argument("--most", type=int, default=4, metavar="N", help="number of samples to show (default 4)")
    top.add_argument("--whole", action="store_true", help=f"texts of more than {MAX_CHARS:,} characters too")
    args = top.parse_args(list(arguments))
    if args.most < 1:
        raise ConfigError(f"samples: --most {args.most}: must be 1 or more")
    samples = chosen(run_of(args.run), args)
    if not samples:
        raise ConfigError(f"samples: {args.run} has no such samples ({_of(files(run_of(args.run)))})")
    for file, record in samples:
        say(*shown(file, record, args.whole))
    return 0


def run_of(path: Path) -> Path:
    """The directory of a run. ConfigError if it does not exist or has no samples."""
    if not path.is_dir():
        raise ConfigError(f"samples: no such directory: {path}")
    if not files(path):
        raise ConfigError(f"samples: {path} has no samples: it is not a megarl run, has taken no step, or log.samples=0")
    return path


def chosen(run: Path, args: argparse.Namespace) -> list[FileSample]:
    """The samples that the arguments ask for, in the order that they ask for."""
    samples = _matching(run, args)
    if args.best or args.worst:
        pick = heapq.nlargest if args.best else heapq.nsmallest
        scored = ((record.reward, (file, record)) for file, record in samples if record.reward is not None)
        return [pair for _, pair in pick(args.most, scored, key=lambda entry: entry[0])]
    return list(islice(samples, min(args.most, sys.maxsize)))


def _matching(run: Path, args: argparse.Namespace) -> Iterator[FileSample]:
    for file in files(run):
        if args.step not in (None, file.step) or args.set not in (None, file.set or "train"):
            continue
        for record in file.records():
            texts = (record.question, record.response, record.answer)
            cut = record.finish_reason == "length"
            if (cut or not args.truncated) and (args.search is None or any(args.search.lower() in text.lower() for text in texts)):
                yield file, record


def _of(sample_files: Sequence[File]) -> str:
    steps, sets = [file.step for file in sample_files], sorted({file.set or "train" for file in sample_files})
    return f"steps {min(steps)} to {max(steps)}, sets {', '.join(sets)}"


def shown(file: File, record: SampleRecord, whole: bool) -> Iterator[str]:
    """The lines of one sample.

    Args:
        file: the file that it is from.
        record: the sample.
        whole: whether to show long texts in full.
    """
    parts = ", ".join(f"{one_line(name, 40)} {value:g}" for name, value in record.parts.items())
    kind = f"evaluation of {escaped(file.set)}" if file.set else "training"
    yield (
        f"--- step {file.step}, {kind}: {record.scored_as}{f' ({parts})' if parts else ''}, {record.length} tokens, {record.ending}"
        f"{', greedy' if record.greedy else ''}{f', not judged: {one_line(record.error, 200)}' if record.error else ''}"
    )
    for image in record.images:
        yield f"{'image':>8} | {escaped(image.name)}"
    for name, text in (("prompt", record.question), ("answer", record.answer), ("response", record.response)):
        for number, line in enumerate(escaped(text if whole else _ends(text)).split("\n")):
            yield f"{name if number == 0 else '':>8} | {line}"


def _ends(text: str) -> str:
    """Shorten a long text to its beginning and end."""
    left_out = len(text) - MAX_CHARS
    return text if left_out <= 0 else f"{text[: MAX_CHARS // 2]}\n[{left_out:,} characters; --whole shows them]\n{text[-MAX_CHARS // 2 :]}"
