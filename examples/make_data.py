"""Data of the examples, made from reasoning-gym's items: openly imperfect demonstrations, and pairs of a right and a corrupted answer.

    python examples/make_data.py quickstart|chain-sum|vapo-ablation|preferences|agent [--seed 1] [--out PATH]

A tiny model that is trained on right demonstrations alone leaves reinforcement learning nothing to do. So a share of the last
demonstrations copy instead of solving, and the model that has learned from them stands in for a weak base model.
"""

import argparse
import json
import random
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import ReasoningGymSource
from megarl.data.gym import read_gym
from megarl.data.sampler import Sampler

WORDS = {"min_word_len": 3, "max_word_len": 8}
SUMS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
TRAIN, HELD_OUT = 2_000_000, 1_000_000_000  # seeds of the items
NUMBER_CHAIN = re.compile(r"-?\d+(?: [+-] -?\d+)+")
TRIES = 100  # draws of a fault: "dad" copied, or two equal neighbours swapped, is still right


@dataclass(frozen=True)
class Demonstrations:
    """Those of one warm start, in the order in which it learns from them."""

    dataset: str
    params: dict[str, int]
    items: int
    held_out: int  # items whose questions are left out
    out: str
    steps: int
    batch_size: int
    wrong: float  # share of wrong ones over the last steps
    last: float = 0.3  # share of the steps that are the last ones

    def rows(self, seed: int) -> Iterator[dict[str, Any]]:
        """A conversation for each place of each step's batch; the same seed gives the same ones."""
        items = entries(self.dataset, self.params, TRAIN, self.items, self.held_out)
        sampler = Sampler(len(items), seed, shuffle=True)
        for step in range(1, self.steps + 1):
            share = self.wrong if step > self.steps * (1 - self.last) else 0.0
            draw = random.Random(f"{seed}:{step}")
            for index in sampler.take(self.batch_size):
                respond = copied if draw.random() < share else solved
                yield conversation(items[index]["question"], respond(self.dataset, items[index]))


DEMONSTRATIONS = {
    "quickstart": Demonstrations("spell_backward", WORDS, 60_000, 256, "runs/quickstart-seed1/demonstrations.jsonl", 500, 96, 0.4),
    "chain-sum": Demonstrations("chain_sum", SUMS, 40_000, 256, "runs/chain-sum/demonstrations.jsonl", 400, 96, 0.4),
    "vapo-ablation": Demonstrations("chain_sum", SUMS, 40_000, 1024, "runs/vapo-ablation/demonstrations.jsonl", 400, 96, 0.5),
}
PREFERENCES = "runs/rlhf/corrupted"
GAMES, GAME_BATCH, LOWER = "runs/agent/demonstrations.jsonl", 96, 0.7  # of the agent's games; how often a guess is the lower end
GAME_STEPS = 300


def entries(dataset: str, params: dict[str, int], seed: int, items: int, held_out: int = 0) -> list[dict[str, Any]]:
    """Questions, answers and metadata, without the questions of the first `held_out` held-out items."""
    exclude = {"dataset": dataset, "params": params, "seed": HELD_OUT, "items": held_out} if held_out else None
    source = ReasoningGymSource.model_validate({"dataset": dataset, "params": params, "seed": seed, "items": items, "exclude": exclude})
    return read_gym(source, dataset)[0]


def conversation(question: str, response: str) -> dict[str, Any]:
    """One row of the file."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": response}]}


def solved(dataset: str, item: dict[str, Any]) -> str:
    """The right response: the answer, or for sums the steps to it ("4 - 1 - 7" -> "4-1=3;3-7=-4")."""
    return sum_steps(item["question"], lambda total, term: total + term) if dataset == "chain_sum" else item["answer"]


def copied(dataset: str, item: dict[str, Any]) -> str:
    """The wrong one of a model that copies: the question's last word, or steps that keep their left number ("4-1=4;4-7=4")."""
    return sum_steps(item["question"], lambda total, _: total) if dataset == "chain_sum" else item["question"].split()[-1]


def sum_steps(question: str, add: Callable[[int, int], int]) -> str:
    """The sum of the question, term by term."""
    found = NUMBER_CHAIN.search(question)
    assert found is not None, question
    first, *rest = found.group().split(" ")
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = add(total, int(sign + "1") * int(term))
        steps.append(f"{total}{sign}{term}={result}")
        total = result
    return ";".join(steps)


def preferences(seed: int, items: int, held_out: int, params: dict[str, int] = WORDS) -> Iterator[dict[str, Any]]:
    """For each item a right answer and a corrupted one; the same item gives the same pair."""
    for number, item in enumerate(entries("spell_backward", params, seed, items, held_out)):
        wrong = corrupted(item["answer"], copied("spell_backward", item), random.Random(f"{seed}:{number}"))
        yield {"prompt": item["question"], "chosen": item["answer"], "rejected": wrong}


def corrupted(right: str, copy: str, draw: random.Random) -> str:
    """The copy, or the right answer with one fault, each as likely; never the right answer, whatever its case."""
    faults: list[Callable[[str, random.Random], str]] = [lambda *_: copy, _replaced, _dropped, _doubled, _swapped, _cut]
    for _ in range(TRIES if right.strip() else 0):
        wrong = draw.choice(faults)(right, draw)
        if wrong.strip() and wrong.strip().lower() != right.strip().lower():
            return wrong
    raise ValueError(f"the answer {right!r} cannot be corrupted")


def _replaced(text: str, draw: random.Random) -> str:
    """Another letter for a letter, another digit for a digit."""
    place = draw.randrange(len(text))
    letters = string.digits if text[place].isdigit() else string.ascii_lowercase if text[place].isalpha() else text[place]
    return text[:place] + draw.choice(letters) + text[place + 1 :]


def _dropped(text: str, draw: random.Random) -> str:
    place = draw.randrange(len(text))
    return text[:place] + text[place + 1 :]


def _doubled(text: str, draw: random.Random) -> str:
    place = draw.randrange(len(text))
    return text[: place + 1] + text[place:]


def _swapped(text: str, draw: random.Random) -> str:
    if len(text) < 2:
        return text
    place = draw.randrange(len(text) - 1)
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]


def _cut(text: str, draw: random.Random) -> str:
    """The beginning alone: at least one letter."""
    return text[: draw.randrange(1, max(2, len(text)))]


def games(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Conversations of a poor player of examples/agent/guess.py, who often guesses the lower end, and else anything possible."""
    from examples.agent.guess import Guess

    for number in range(count):
        game, draw = Guess(), random.Random(f"{seed}:{number}")
        said, over = game.reset(TRAIN + number), False
        messages: list[dict[str, str]] = []
        while not over:
            low, high = map(int, said.split("-"))
            guess = str(low if draw.random() < LOWER else draw.randint(low, high))
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": guess}]
            said, _, over = game.step(guess, [], True)
        yield {"messages": messages}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A JSONL file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        count = sum(1 for row in rows if file.write(json.dumps(row) + "\n"))
    partial.rename(path)
    print(f"{path}: {count} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=[*DEMONSTRATIONS, "preferences", "agent"])
    parser.add_argument("--seed", type=int, default=1, help="of the order of the demonstrations, and of which are wrong")
    parser.add_argument("--out", type=Path, help="the file; of preferences the folder")
    given = parser.parse_args()
    if given.data == "preferences":
        folder = given.out or Path(PREFERENCES)
        write(folder / "train.jsonl", preferences(TRAIN, 60_000, 256))
        write(folder / "eval.jsonl", preferences(HELD_OUT, 256, 0))
        return
    if given.data == "agent":
        sys.path.insert(0, str(Path(__file__).parents[1]))
        write(given.out or Path(GAMES), games(given.seed, GAME_STEPS * GAME_BATCH))
        return
    demonstrations = DEMONSTRATIONS[given.data]
    write(given.out or Path(demonstrations.out), demonstrations.rows(given.seed))


if __name__ == "__main__":
    main()
