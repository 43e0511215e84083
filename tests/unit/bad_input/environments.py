"""Environments and ways of sampling that are refused, as data: what is wrong, the verb, how the input is made, the line that it gets."""

from tests.unit.bad_input.cases import EPISODES, Case, template

CALLS = "<tool_call>{{ tools[0].function.name if tools else '' }}</tool_call>"
SAID = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}<|assistant|>"


NO_NARRATOR = "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('who?') }}{% endif %}{% endfor %}"


def says(params: str) -> str:
    """A class of the tests' as the environment."""
    return f"environment={{source: {{type: function, path: 'tests.unit.environments.worlds:Says', params: {params}}}}}"


TOOLS = "environment={source: {type: tools, tools: [calculator]}}"
NAMES, SOFTWARE = "<tool_call>{% for one in tools or [] %}{{ one.function.name }}{% endfor %}", "environment={source: {type: software}}"
SOURCE = r"^environment\.source"
TABLE = [
    Case(
        "an environment that speaks in a role unknown to the template",
        "train",
        template(NO_NARRATOR + SAID, says("{step: [[{role: narrator, content: x}], 0.0, false]}"), *EPISODES),
        SOURCE + r": .* bad return: the model's chat template refuses it: ",
    ),
    Case(
        "episodes of tools",
        "train",
        template(CALLS + SAID, TOOLS, EPISODES[0]),
        r"^data\.train\.type=episodes: tools begin none: give prompts$",
    ),
    Case(
        "episodes of software tasks",
        "train",
        template(NAMES + SAID, SOFTWARE, EPISODES[0]),
        r"^data\.train\.type=episodes: software tasks begin none: give prompts$",
    ),
    Case(
        "software tasks without anything to repair",
        "train",
        template(NAMES + SAID, SOFTWARE, "rollout.max_prompt_tokens=64"),
        SOURCE + r": reset\(seed=0\): bad task: folder: the row has neither a folder, nor files, nor an image's directory: ",
    ),
    Case(
        "a template with other calls",
        "train",
        template(CALLS.replace("tool_call", "call") + SAID, TOOLS),
        SOURCE + r"\.tools: the model's chat template writes calls of tools in a form that is not read",
    ),
    Case(
        "a template that leaves answers out",
        "train",
        template(SAID.replace("in messages", "in messages if m.role != 'tool'"), TOOLS),
        r"^environment: the model's chat template cannot go on after an answer of the role 'tool': the conversation: message 2: the chat "
        r"template leaves out what the role 'tool' says$",
    ),
]
