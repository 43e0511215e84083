"""`megarl data CONFIG.yaml`: what the model reads and learns of a configuration's data, made by the code that the run itself uses."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.checks.data import PromptReader
from megarl.config import (
    ConfigError,
    DpoConfig,
    EpisodeSource,
    EvalConfig,
    PairsConfig,
    ReasoningGymSource,
    RmConfig,
    RunSettings,
    ServeConfig,
    SftConfig,
    SupervisedConfig,
    ToolsEnvironment,
    TrainConfig,
    load,
)
from megarl.config.data import SourceMixture
from megarl.config.loading import tree_of
from megarl.data.files import each_row
from megarl.data.images import ImageReader, reader_of
from megarl.data.intake import RowReport, reported
from megarl.data.preferences import load_preferences
from megarl.data.shown import LEARNED, SCORED, Item, Line, coloured, place_of, row_lines, rows_of, summary
from megarl.data.supervised import LIMIT_KEY, load_demonstrations
from megarl.data.tokenizer import load_tokenizer
from megarl.imports import find
from megarl.models.hf import CONFIG
from megarl.observe.run import Run
from megarl.text.display import escaped
from megarl.text.stdout import say
from megarl.verbs import VERBS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS, REASONS = 3, 20  # shown unless the user asks for others: rows of a source, reasons of dropped ones
AT_THE_START = 300  # characters of each text that a run shows at its start
ROW = re.compile(r"(?:(?P<key>[\w.]+): )?(?:item )?(?:(?P<file>.+):)?(?P<number>\d{1,18})")  # as error messages name it


@dataclass(frozen=True)
class KeyedSource:
    """A source that is no mixture."""

    key: str  # dotted
    source: Any
    weight: float = 1.0  # in a mixture

    @property
    def path(self) -> Path | None:
        """The file; None if the rows are generated."""
        return getattr(self.source, "path", None)

    @property
    def first(self) -> int:
        """The number of its first row."""
        return 0 if self.path is None else self.source.skip + 1

    @property
    def end(self) -> int:
        """The number after its last row, as far as the configuration says."""
        count = self.source.rows if self.path is not None else self.source.items
        return sys.maxsize if count is None else self.first + int(count)

    @property
    def where(self) -> str:
        """The file, or what generates the rows."""
        return str(getattr(self.source, "dataset", "episodes") if self.path is None else self.path)


@dataclass(frozen=True)
class Reader:
    """Reads sources as the run of a configuration does, but starts no environment. `tokenizer`: that of the model."""

    config: RunSettings
    tokenizer: PreTrainedTokenizerBase

    @property
    def by(self) -> str:
        """What becomes of responses."""
        return SCORED if isinstance(self.config, RmConfig) else LEARNED

    @property
    def opens(self) -> bool:
        """Whether an environment may write the beginning of an episode."""
        environment = getattr(self.config, "environment", None)
        return environment is not None and not isinstance(environment.source, ToolsEnvironment)

    def read(self, source: Any, key: str) -> Sequence[Item]:
        """Return everything in a source. Raise ConfigError where the run would."""
        config, tokenizer = self.config, self.tokenizer
        if isinstance(config, SftConfig):
            reader = self._reader(config.sft.max_tokens, LIMIT_KEY)
            return load_demonstrations(source, tokenizer, config.data, config.sft.max_tokens, key, reader)
        if isinstance(config, RmConfig | DpoConfig):
            limit_key, margins = f"{config.section}.max_tokens", isinstance(config, RmConfig)
            reader = self._reader(config.supervised.max_tokens, limit_key)
            return load_preferences(source, tokenizer, config.data, config.supervised.max_tokens, key, limit_key, margins, reader)
        assert isinstance(config, TrainConfig | EvalConfig | PairsConfig)
        return PromptReader.of(config).prompts(source, key, tokenizer)

    def _reader(self, most: int, limit_key: str) -> ImageReader | None:
        """The reader of images; None if the model sees none, or is a tokenizer alone, which is enough to show texts."""
        return reader_of(self.config.model, most, limit_key) if (self.config.model.path / CONFIG).is_file() else None


def main(arguments: Sequence[str]) -> int:
    """Print the data. Raises ConfigError if the run would refuse it, or has none."""
    top = argparse.ArgumentParser(
        prog="megarl data",
        description="Shows what the model reads and learns of a configuration's data: the tokens that are trained on, as text. Each line "
        "begins with what becomes of it: read, learned, masked (read after the first learned token), scored (by a reward model), unread "
        "(messages after the last one that is learned), answer (the gold of a prompt). Needs only the tokenizer, and starts no run.",
    )
    top.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the configuration of any verb")
    top.add_argument("overrides", nargs="*", metavar="a.b=c", help="overrides a configuration value, as YAML")
    which = top.add_mutually_exclusive_group()
    which.add_argument("--rows", type=int, default=ROWS, metavar="N", help=f"the first N rows of each source ({ROWS})")
    which.add_argument("--row", metavar="K", help="one row, as error messages name it: 17, rows.jsonl:17; the others are not checked")
    options = top.parse_intermixed_args(list(arguments))
    if options.rows < 1:
        raise ConfigError(f"data: --rows {options.rows}: must be 1 or more")
    root: Any = find(VERBS[verb_of(tree_of(options.config, options.overrides))].config)
    config = load(options.config, options.overrides, root)
    sources, colours = list(sources_of(config)), os.isatty(1) and "NO_COLOR" not in os.environ
    selection = [(one, None) for one in sources] if options.row is None else list(_with_row(sources, options.row))
    reader = Reader(config, load_tokenizer(config.model.path))
    for one, row in selection:
        lines = _first_rows(reader, one, options.rows) if row is None else _one_row(reader, one, row)
        say(*coloured(lines, colours))
    return 0


def verb_of(tree: Mapping[str, Any]) -> str:
    """Return the verb that a configuration is for, by its sections; `value` reads the data of `train`. Raise ConfigError if none tells."""
    if (verb := next((name for name in VERBS if name in tree and name != "eval"), None)) is not None:
        return verb
    learns = isinstance(data := tree.get("data"), dict) and "train" in data
    if "algorithm" in tree or "reward" in tree:  # of pairs, every key of its section has a default
        return "train" if "algorithm" in tree else "pairs" if learns else "eval"
    raise ConfigError("data: the configuration has no section of a verb that reads data (train, sft, rm, dpo, pairs), and no reward")


def sources_of(config: RunSettings) -> Iterator[KeyedSource]:
    """Yield the sources that a run reads. Raise ConfigError if there are none."""
    if isinstance(config, ServeConfig):
        raise ConfigError("data: `megarl serve` reads no data: its clients send the prompts")
    data: Any = config.data  # type: ignore[attr-defined]  # of all others
    learns = not isinstance(config, SupervisedConfig) or config.supervised.steps > 0
    sources: dict[str, Any] = {f"data.{name}": getattr(data, name, None) for name in (("train", "eval") if learns else ("eval",))}
    if isinstance(config, TrainConfig | EvalConfig):
        sources |= {f"eval.{number}.source": one.source for number, one in enumerate(config.eval)}
    if not any(sources.values()):
        raise ConfigError(f"data: {config.name} reads no data: it takes no steps and has no data.eval")
    for key, source in sources.items():
        if isinstance(source, SourceMixture):
            yield from (KeyedSource(f"{key}.parts.{n}.source", part.source, part.weight) for n, part in enumerate(source.parts))
        elif source is not None:
            yield KeyedSource(key, source)


def tell_first(run: Run, config: RunSettings, items: Sequence[Item]) -> None:
    """Show the first of a run's items, shortened, unless the run keeps no samples.

    Args:
        run: the run.
        config: its configuration.
        items: what it learns from or evaluates on.
    """
    if not config.log.samples or not items:
        return
    reader = Reader(config, load_tokenizer(config.model.path))
    for line in coloured(row_lines(reader.tokenizer, items[:1], reader.by, AT_THE_START), False):
        run.note(line)


def _first_rows(reader: Reader, one: KeyedSource, rows: int) -> Iterator[Line]:
    with reported() as reports:
        items = reader.read(one.source, one.key)
        weight = "" if one.weight == 1 else f" (weight {one.weight:g})"
        yield "", escaped(f"{one.key}: {one.where}{weight}: {summary(items, reader.by)}")
        yield from (("", escaped(f"{one.key}: {line}")) for report in reports for line in report.lines)
        if isinstance(one.source, EpisodeSource):
            items = items[:1]  # no other says more
        elif reader.opens:
            yield "", f"{one.key}: the environment may replace what is read when an episode begins"
        for row in islice(rows_of(items), rows):
            yield from row_lines(reader.tokenizer, row, reader.by)
        yield from _left_out(reports, max(rows, REASONS))


def _left_out(reports: Sequence[RowReport], most: int) -> Iterator[Line]:
    for report in reports:
        reasons = report.reasons[:most]
        yield from (("", escaped(f"left out: {reason}")) for reason in reasons)
        if report.dropped > len(reasons):
            yield "", f"left out: {report.dropped - len(reasons):,} more"


def _one_row(reader: Reader, one: KeyedSource, number: int) -> Iterator[Line]:
    """Yield the lines of a row, of which nothing else in the source is checked."""
    generated = isinstance(one.source, ReasoningGymSource)
    source = one.source if generated else one.source.model_copy(update={"skip": number - 1, "rows": 1})
    items: Sequence[Item] = ()
    with reported() as reports:
        try:
            items = reader.read(source, one.key)
        except ConfigError:
            if not any(report.dropped for report in reports):
                raise
    if generated and not (items := [item for item in items if place_of(item) == f"{one.key}: item {number}"]):
        raise ConfigError(f"data: --row {number}: {one.key} leaves this item out")
    for row in rows_of(items):
        yield from row_lines(reader.tokenizer, row, reader.by)
    yield from (("", escaped(f"{one.key}: {line}")) for report in reports for line in report.lines)
    yield from _left_out(reports, REASONS)


def _with_row(sources: Sequence[KeyedSource], name: str) -> list[tuple[KeyedSource, int]]:
    """Return the sources that take a row, which is named as in error messages, and its number. Raise ConfigError if there are none."""
    match = ROW.fullmatch(name)
    if match is None:
        raise ConfigError(f"data: --row {name!r:.200}: must be a row's number, or a file and a number as in rows.jsonl:17")
    file, number = match["file"], int(match["number"])
    key = (match["key"] or "").removesuffix(".path")

    def named(one: KeyedSource) -> bool:
        same = file is None or (one.path is not None and (Path(file).absolute() == one.path or f"{one.path}".endswith(f"/{file}")))
        return same and key in ("", one.key) and not isinstance(one.source, EpisodeSource)

    fitting = [one for one in sources if named(one)]
    if taking := [(one, number) for one in fitting if one.first <= number < one.end and _count(one, number) == number]:
        return taking
    lacks = "; ".join(dict.fromkeys(_lack(one, number) for one in fitting)) or "no source reads this file"
    raise ConfigError(f"data: --row {name}: {lacks}")


def _count(one: KeyedSource, most: int) -> int:
    """Return the number of rows of a source's file, at most `most`."""
    return most if one.path is None else sum(1 for _ in islice(each_row(one.path, one.key), most))


def _lack(one: KeyedSource, number: int) -> str:
    if (count := _count(one, number)) < number:
        return f"{one.where} has {count:,} rows"
    return f"{one.key} takes rows {one.first:,} {'and up' if one.end == sys.maxsize else f'to {one.end - 1:,}'} of {one.where}"
