"""Calls of tools: whatever a published template writes of them is read back, and nothing that a policy writes holds up the reader."""

import json
import time
from copy import copy
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from megarl.config import PromptFormat
from megarl.data.calls import IDS, JSON_CALLS, CallFormat, learned
from megarl.data.template import ChatTemplate
from megarl.data.turns import TurnTokens
from tests.real_tokenizers import MODELS

TYPES = {"text": "string", "count": "integer", "share": "number", "sure": "boolean", "list": "array", "more": "object"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "files.search-1",
            "description": "Searches.",
            "parameters": {"type": "object", "properties": {key: {"type": name, "description": key} for key, name in TYPES.items()}},
        },
    }
]
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>\r", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda text: text == text.strip()
)
INNER = st.recursive(
    st.integers(-9, 9) | st.booleans() | TEXT, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2)
)
ARGUMENTS = st.fixed_dictionaries(
    {"text": TEXT},
    optional={
        "count": st.integers(-(10**12), 10**12),
        "share": st.floats(-1e6, 1e6, allow_nan=False),
        "sure": st.booleans(),
        "list": st.lists(INNER, max_size=3),
        "more": st.dictionaries(TEXT, INNER, max_size=3),
    },
)
FORMS = {
    "qwen3": "JSON",
    "qwen3-thinking": "JSON",
    "qwen2.5": "JSON",
    "qwen3.5": "<tool_call>\n<function=TOOL>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    "glm-4.5": "<tool_call>TOOL\n<arg_key>NAME</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "deepseek-r1": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>TOOL\n```json\n{...}\n```<｜tool▁call▁end｜>",
    "llama-3.1": 'JSON: {"name": ..., "parameters": {...}}',
    "gemma-3": None,
    "gpt-oss": None,
}
READ = [name for name, form in FORMS.items() if form is not None]


@pytest.fixture(scope="module")
def forms(published: dict[str, PreTrainedTokenizerBase]) -> dict[str, CallFormat | None]:
    return {name: TurnTokens(published[name]).template.calls for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_the_form_of_a_published_template(name: str, forms: dict[str, CallFormat | None]) -> None:
    form, expected = forms[name], FORMS[name]
    assert (form is None) == (expected is None)
    assert form is None or form.example.startswith(str(expected))


@pytest.mark.parametrize("name", READ)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(sent=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_what_a_template_writes_is_read_back(
    name: str, published: dict[str, PreTrainedTokenizerBase], forms: dict[str, CallFormat | None], sent: list[dict[str, Any]]
) -> None:
    """Names, values and their types; the turn's own text is what remains of it."""
    sent = sent[:1] if name == "llama-3.1" else sent  # its template writes one
    form, turns = forms[name], TurnTokens(published[name], tools=TOOLS)
    assert form is not None
    calls = [{"type": "function", "function": {"name": "files.search-1", "arguments": one}} for one in sent]
    message = {"role": "assistant", "content": None if name == "llama-3.1" else "Said.", "tool_calls": calls}
    chat = turns.template.chat([{"role": "user", "content": "Q!"}, message], "the chat")
    [text] = turns.template.texts([chat], generation=False)
    assert isinstance(text, str)
    turn = text.rpartition("Q!")[2].rpartition("assistant<|end_header_id|>" if name == "llama-3.1" else "Said.")[2]
    turn = turn.partition(turns.template.end)[0]
    assert [one.closed for one in form.calls(turn)] == [True] * len(sent)
    assert [form.read(one.body, TOOLS) for one in form.calls(turn)] == [("files.search-1", one) for one in sent]
    assert form.without(turn).strip() == ""
    opened = turns.opened([{"role": "user", "content": "Q!"}], tools=TOOLS)
    parts = opened.parts(turn if name == "llama-3.1" else f"Said.{turn}")
    assert [one["function"] for one in parts.calls] == [one["function"] for one in calls]
    assert parts.content == ("" if name == "llama-3.1" else "Said.")


USER = "{% if m.role == 'user' %}<u>{{ m.content }}</u>{% else %}<a>{{ m.content or '' }}{% if m.tool_calls %}"
LOOP = "{%- for m in messages %}" + USER + "%s{%% endif %%}<end>{%% endif %%}{%% endfor %%}"
OTHERS = {
    "kimi-k2": "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "minimax-m2": '\n<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n'
    "{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
    "ministral-3": "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
    "a-list": "[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]",
    "python": "{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }},{% endfor %}){% endfor %}",
}


def of_template(source: str) -> tuple[CallFormat | None, Any]:
    template = jinja2.Environment().from_string(LOOP.replace("%%", "%").replace("%s", source))

    def written(calls: list[dict[str, Any]], content: str | None) -> str:
        messages = [{"role": "user", "content": "Q!"}, {"role": "assistant", "content": content, "tool_calls": calls}]
        return str(template.render(messages=messages)).rpartition("</u>")[2]

    return learned(written, "<a>", "<end>", None), written


@pytest.mark.parametrize("name", OTHERS)
def test_forms_of_other_templates(name: str) -> None:
    form, written = of_template(OTHERS[name])
    if name in ("a-list", "python"):
        assert form is None
        return
    assert form is not None
    names, sent = ("f", "g"), {"a": "x y", "b": 3}
    functions = [{"name": one, "arguments": sent} for one in names]
    text = written([{"id": f"{IDS}{one['name']}:{n + 9}", "function": one} for n, one in enumerate(functions)], "Said.").partition("<end>")[
        0
    ]
    schema = [{"name": one, "parameters": {"properties": {"b": {"type": "integer"}}}} for one in names]
    assert [form.read(one.body, schema) for one in form.calls(text)] == [("f", sent), ("g", sent)]
    assert [form.id_of(one.body) for one in form.calls(text)] == (
        ["functions.f:9", "functions.g:10"] if name == "kimi-k2" else [None, None]
    )
    assert form.without(text).strip() == "<a>Said."


XML = CallFormat(head=("\n<function=", ">"), tail="\n</function>\n", argument=("\n<parameter=", ">\n", "\n</parameter>"))
MALFORMED = {
    "no function": "f(1)",
    "another tag": "<function=f>\n<argument=a>\n1\n</argument>\n</function>",
    "an open parameter": "<function=f>\n<parameter=a>\n1\n</function>",
    "no name": "<function=>\n</function>",
    "JSON": '{"name": "f", "arguments": {}}',
    "something after": "<function=f>\n</function>\nand so on",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_is_told_how_calls_are_written(name: str) -> None:
    with pytest.raises(ValueError, match=r"^a call is <tool_call>\n<function=TOOL>"):
        XML.read(MALFORMED[name])


def test_an_argument_has_the_type_of_its_schema() -> None:
    def read(text: str, schema: dict[str, Any] | None) -> Any:
        tools = [{"function": {"name": "f", "parameters": {"properties": {} if schema is None else {"a": schema}}}}]
        return XML.read(f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>", tools)[1]["a"]

    number, whole = {"type": "number"}, {"type": "string"}
    assert [read(text, number) for text in ("2.5", "2,5", "True", "", " 7 ")] == [2.5, "2,5", True, "", 7]
    assert [read(text, whole) for text in ("2.5", "True", '{"a": 1}', " x\n\n", "")] == ["2.5", "True", '{"a": 1}', " x\n\n", ""]
    assert [read(text, None) for text in ("2", "null")] == ["2", "null"]
    assert [read(text, {"anyOf": [{"type": "integer"}, {"type": "null"}]}) for text in ("2", "None", "x")] == [2, None, "x"]


def test_white_space_and_a_missing_mark() -> None:
    tight = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    assert [XML.read(one.body) for one in XML.calls(tight)] == [("f", {"a": "1"})]
    [cut] = XML.calls("So <tool_call>\n<function=f>\n</function>")
    assert (XML.read(cut.body), cut.closed) == (("f", {}), False)
    assert [one.body for one in JSON_CALLS.calls("<tool_call>1<tool_call>2</tool_call>")] == ["2"]


@pytest.mark.parametrize(
    "form", [JSON_CALLS, XML, CallFormat(("", "")), CallFormat(("<c>", "</c>"), ("", ""), "")], ids=lambda form: form.marks[0]
)
def test_no_text_holds_up_the_reader(form: CallFormat) -> None:
    hostile = [" " * 300_000, "<tool_call>" * 30_000, "<tool_call>" + " \n" * 150_000 + "</tool_call>", "{" * 100_000]
    hostile += ["<tool_call>\n<function=f>" + "\n<parameter=a>\n" * 10_000, "<tool_call><function=f>" + "\n" * 300_000 + "x</tool_call>"]
    hostile += ["<c>f" + " " * 300_000 + "x</c>" + " " * 300_000]
    begun = time.process_time()
    for text in hostile:
        for one in form.calls(text)[:10]:
            try:
                form.read(one.body)
            except ValueError as error:
                json.dumps(str(error))
        form.without(text)
    assert time.process_time() - begun < 5


def test_a_template_without_calls_has_those_that_it_asks_for(published: dict[str, PreTrainedTokenizerBase]) -> None:
    says = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    for asks, form in (("Write <tool_call>JSON</tool_call>. ", JSON_CALLS), ("Write <call>JSON</call>. ", None)):
        tokenizer = copy(published["qwen3"])
        tokenizer.chat_template = asks + says
        assert ChatTemplate(tokenizer, PromptFormat()).calls == form
