"""`megarl pairs`: pairs of a policy's responses to the same prompt, the better one first: preferences for `megarl rm` to learn from."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from megarl.checks.without_ranks import check_pairs
from megarl.config import ConfigError, PairsConfig
from megarl.data.answers import response_of
from megarl.data.images import copied
from megarl.data.messages import ARGUMENTS, TOOLS
from megarl.data.prompts import Prompt
from megarl.driver.engines import Engines, call_seed, start_engines
from megarl.engines.generate import Sampling
from megarl.loops.show_data import tell_first
from megarl.observe.metrics import Mean, Metric, Sum, merge
from megarl.observe.output import new_log
from megarl.observe.restarts import Restarts
from megarl.observe.run import Run
from megarl.response import Response
from megarl.rewards.score import Score
from megarl.step.context import session
from megarl.step.metrics import missing
from megarl.step.reward import Reward, open_scorers

Said = tuple[str, float]
"""A response and its score."""


def pairs(config: PairsConfig) -> None:
    """Write train.jsonl and eval.jsonl to runs/<name>/: rows of `prompt`, `chosen`, `rejected` and `margin`, the scores' difference.

    Images of prompts are copied to runs/<name>/images/, so that the folder can be moved, and what was read changed.
    """
    data = check_pairs(config)
    with Run(config) as run, session(config, run), open_scorers(config.reward, run.note, new_log(run.directory, "rewards")) as scorers:
        tell_first(run, config, data.train[:1])
        with run.starting("engines"):
            engines = start_engines(config, Restarts(config.cluster.restarts, run.restarted, run.note))
        reward, _ = scorers.rewards()
        for number, (name, prompts) in enumerate((("train", data.train), ("eval", data.eval))):
            metrics = write_pairs(config, run.directory / f"{name}.jsonl", prompts, engines, reward, run, number)
            run.held_out(name, metrics, number)


def write_pairs(
    config: PairsConfig, path: Path, prompts: Sequence[Prompt], engines: Engines, reward: Reward, run: Run, number: int
) -> dict[str, Metric]:
    """Write the pairs of all prompts to a file, which is complete or absent.

    Args:
        config: the run's configuration.
        path: the file, whose stem names it ("train", "eval").
        prompts: the prompts to sample responses to.
        engines: the engines, with the policy's weights.
        reward: scores the responses.
        run: shows the progress.
        number: index of the file within the run; with the run's seed it determines the random draws.

    Returns:
        The number of pairs, the share of prompts with any, their mean margin, the mean score, and the share of responses without a score.

    Raises:
        ConfigError: there is no pair, and no file is left.
    """
    settings, rollout = config.pairs, config.rollout
    partial, reports = path.with_name(path.name + ".partial"), list[dict[str, Metric]]()
    with partial.open("w", encoding="utf-8") as file:
        for call, first in enumerate(range(0, len(prompts), settings.prompts_per_call)):
            batch = prompts[first : first + settings.prompts_per_call]
            sampling = Sampling(
                rollout.samples_per_prompt, rollout.temperature, rollout.max_response_tokens, call_seed(config.seed, number, call)
            )
            with run.phase("rollout"):
                responses = engines.generate(batch, sampling)
            reference = answers(batch) if settings.answers else []
            with run.phase("reward"):
                scores = reward.scores(batch, [*responses, *reference])
                run.failures(scores)
            reports.append({"missing": missing(scores[: len(responses)])})
            groups = grouped(len(batch), responses, scores[: len(responses)])
            right = grouped(len(batch), reference, scores[len(responses) :])
            for prompt, replies, answer in zip(batch, groups, right, strict=True):
                draw = random.Random(f"{config.seed}/{number}/{prompt.id}")
                rows = list(pairs_of(prompt, [*answer, *replies], settings.per_prompt, draw, path.parent))
                reports.append(counted(rows, replies))
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            run.progress(path.stem, first + len(batch), len(prompts))
    metrics = merge(reports)
    if not metrics["pairs"].value():
        partial.unlink()
        raise ConfigError(f"data.{path.stem}: no prompt has two finished responses of different scores")
    os.replace(partial, path)
    return metrics


def grouped(prompts: int, responses: Sequence[Response], scores: Sequence[Score]) -> list[list[Said]]:
    """Group the responses by prompt: only finished ones that could be scored, and every text once.

    Args:
        prompts: number of prompts.
        responses: the responses; `response.prompt` is the index of the prompt.
        scores: one for each response.
    """
    groups: list[dict[str, float]] = [{} for _ in range(prompts)]
    for response, score in zip(responses, scores, strict=True):
        if response.finished and response.text.strip() and score.value is not None:
            groups[response.prompt].setdefault(response.text, score.value)
    return [list(group.items()) for group in groups]


def answers(prompts: Sequence[Prompt]) -> list[Response]:
    """Return the answers in the data as if they were the policy's responses."""
    texts = [response_of(prompt.answer) for prompt in prompts]
    return [Response(index, text, 0, 0, 0, True, None, 0) for index, text in enumerate(texts) if text.strip()]


def pairs_of(prompt: Prompt, replies: Sequence[Said], count: int, draw: random.Random, folder: Path) -> Iterator[dict[str, Any]]:
    """Draw pairs of responses to one prompt at random from all possible ones.

    Args:
        prompt: the prompt.
        replies: the responses to it. Of texts that differ only in surrounding whitespace, the first counts.
        count: largest number of pairs.
        draw: the random number generator.
        folder: that of the file; copies of the prompt's images are kept in it.

    Yields:
        Rows of a preference file: `prompt`, `chosen`, `rejected`, `margin`, which is above 0, and the prompt's own `tools` and
        `chat_template_kwargs`.
    """
    once: dict[str, Said] = {}
    for one in replies:
        once.setdefault(one[0].strip(), one)
    every = [(one, other) if one[1] > other[1] else (other, one) for one, other in combinations(once.values(), 2) if one[1] != other[1]]
    images = [placed.image for placed in prompt.images]
    given = copied(prompt.given, images, folder) if images and every else prompt.shown
    for better, worse in draw.sample(every, min(count, len(every))):
        own = {name: prompt.meta[name] for name in (TOOLS, ARGUMENTS) if prompt.meta.get(name) is not None}
        yield {"prompt": given, "chosen": better[0], "rejected": worse[0], "margin": better[1] - worse[1], **own}


def counted(rows: Sequence[dict[str, Any]], replies: Sequence[Said]) -> dict[str, Metric]:
    """The metrics of one prompt's pairs."""
    return {
        "pairs": Sum(float(len(rows))),
        "prompts_with_pairs": Mean(float(bool(rows)), 1.0),
        "margin": Mean(sum(row["margin"] for row in rows), float(len(rows))),
        "score": Mean(sum(score for _, score in replies), float(len(replies))),
    }
