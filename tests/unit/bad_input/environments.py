"""Environments and ways of sampling that are refused, as data: what is wrong, the verb, how the input is made, the line that it gets."""

from __future__ import annotations

from tests.unit.bad_input.cases import Case, Make, given, template

WORLDS = "tests.unit.environments.worlds"
EPISODES = ("data.train={type: episodes, seed: 1, items: 64}", "reward={source: {type: environment}}")
CALLS = "<tool_call>{{ tools[0].function.name if tools else '' }}</tool_call>"
SAID = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}<|assistant|>"


NO_NARRATOR = "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('who?') }}{% endif %}{% endfor %}"


def says(params: str, name: str = "Says") -> str:
    """A class of the tests' as the environment."""
    return f"environment={{source: {{type: function, path: '{WORLDS}:{name}', params: {params}}}}}"


def world(name: str, params: str = "{}") -> Make:
    """The same in a good configuration."""
    return given(says(params, name), *EPISODES)


TOOLS = "environment={source: {type: tools, tools: [calculator]}}"
SOURCE = r"^environment\.source"
TABLE = [
    Case(
        "an environment that is not there",
        "train",
        given("environment={source: {type: function, path: 'no_such_module:Game'}}", *EPISODES),
        SOURCE + r"\.path: cannot import module 'no_such_module': ModuleNotFoundError",
    ),
    Case("an environment without a step", "train", world("NoStep"), SOURCE + r"\.path: .*:NoStep has no method step$"),
    Case(
        "arguments that an environment refuses",
        "train",
        world("Says", "{x: 1}"),
        SOURCE + r"\.params: ",
    ),
    Case(
        "an environment that begins without text",
        "train",
        world("Says", "{reset: ''}"),
        SOURCE + r": reset\(seed=1\): bad return: reset returned no text$",
    ),
    Case("an environment that begins with nothing", "train", world("Says", "{nothing: true}"), SOURCE + r": .* the data has no prompt$"),
    Case(
        "an environment that answers without text",
        "train",
        world("Says", "{step: [' ', 0.0, false]}"),
        SOURCE + r": reset\(seed=1\), then step of an empty text: bad return: step returned no text$",
    ),
    Case("an answer of four fields too few", "train", world("Says", "{step: [x]}"), SOURCE + r": .* step returned a tuple of 1, not"),
    Case("a reward that is no number", "train", world("Says", "{step: [x, high, false]}"), SOURCE + r": .* reward='high' \(str\)"),
    Case(
        "a long opening",
        "train",
        world("Says", "{reset: 'a text of more than sixteen tokens'}"),
        SOURCE + r": .* an opening of 3\d tokens is longer than rollout\.max_prompt_tokens=16$",
    ),
    Case(
        "a game that is not there",
        "train",
        given("environment={source: {type: textarena, id: x}}", *EPISODES),
        SOURCE + r"\.type: textarena cannot",
    ),
    Case(
        "a seed of one's own for questions that have theirs",
        "train",
        given("environment={source: {type: reasoning_gym, dataset: spell_backward, params: {seed: 3}}}", *EPISODES),
        SOURCE + r"\.params\.seed: each episode has its own seed",
    ),
    Case(
        "an environment that speaks in a role unknown to the template",
        "train",
        template(NO_NARRATOR + SAID, says("{step: [[{role: narrator, content: x}], 0.0, false]}"), *EPISODES),
        SOURCE + r": .* bad return: the model's chat template refuses it: ",
    ),
    Case(
        "an environment of a scorer that evaluates",
        "train",
        given("environment={source: {type: reasoning_gym, dataset: countdown}}", *EPISODES),
        SOURCE + r"\.dataset: countdown: ",
    ),
    Case(
        "rewards of no environment",
        "train",
        given("reward={source: {type: environment}}"),
        r"^reward\.source\.type=environment: there is no environment$",
    ),
    Case("episodes of no environment", "pairs", given(EPISODES[0]), r"^data\.train\.type=episodes: there is no environment$"),
    Case(
        "episodes of tools",
        "train",
        template(CALLS + SAID, TOOLS, EPISODES[0]),
        r"^data\.train\.type=episodes: tools begin none: give prompts$",
    ),
    Case("turns without a chat", "train", given(TOOLS, "data.chat=false"), r"^data\.chat=false: the turns of an environment"),
    Case(
        "a tool twice",
        "train",
        given("environment={source: {type: tools, tools: [python, python]}}"),
        r"^environment\.source\.tools: .* twice$",
    ),
    Case(
        "a template that tells of no tools",
        "train",
        given(TOOLS),
        SOURCE + r"\.tools: the model's chat template does not mention 'calculator'",
    ),
    Case(
        "a template with other calls",
        "train",
        template(CALLS.replace("tool_call", "call") + SAID, TOOLS),
        SOURCE + r"\.tools: the model's chat template uses another call format",
    ),
    Case(
        "a template that leaves answers out",
        "train",
        template(SAID.replace("in messages", "in messages if m.role != 'tool'"), TOOLS),
        r"^environment: the model's chat template cannot go on after an answer of the role 'tool': the conversation: message 2: the chat "
        r"template leaves out what the role 'tool' says$",
    ),
    Case(
        "a part of the distribution",
        "train",
        given("rollout.top_p=0.9"),
        r"^rollout\.top_p=0\.9: responses then come from a truncated policy",
    ),
    Case("the likeliest tokens", "train", given("rollout.top_k=20"), r"^rollout\.top_k=20: responses then come from a truncated"),
    Case("likely tokens", "train", given("rollout.min_p=0.1"), r"^rollout\.min_p=0\.1: responses then come from a truncated"),
    Case(
        "a stop beyond the vocabulary",
        "eval",
        given("rollout.stop_token_ids=[128]"),
        r"^rollout\.stop_token_ids: 128 is not one of the model's 128 tokens$",
    ),
    Case("an empty stop", "eval", given("rollout.stop=['']"), r"^rollout\.stop\.0: String should have at least 1 character"),
]
