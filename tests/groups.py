"""Responses as the groups of a step."""

from collections.abc import Sequence
from itertools import groupby

from megarl.data.prompts import Prompt
from megarl.ranks.step_plan import Group
from megarl.response import Response
from megarl.rewards.score import Score


def in_groups(responses: Sequence[Response], scores: Sequence[Score]) -> list[Group]:
    """A group for each prompt, whose responses follow one another; none has a greedy response."""
    pairs = groupby(zip(responses, scores, strict=True), key=lambda pair: pair[0].prompt)
    own = [(prompt, list(members)) for prompt, members in pairs]
    return [Group(n, Prompt(n, "", [1], "", {}), [one for one, _ in members], [score for _, score in members], None) for n, members in own]
