"""A model's chat template: renders chats in batches, in the form that it takes them, and says what of them it leaves out."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import filterfalse, groupby, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megarl.config import PromptFormat
from megarl.data.bounds import in_memory, within_cpu_time
from megarl.data.calls import JSON_CALLS, CallFormat, learned
from megarl.data.chat import PROBE, PROBE_TOOL, Chat, Omission, calling, omission, probed, reduced, shape
from megarl.data.intake import Intake
from megarl.data.messages import Message, instructed, spoken
from megarl.data.tokenizer import first_line, special_tokens, unended
from megarl.errors import ConfigError, hint
from megarl.images import MARK, marked
from megarl.text.strict_json import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_S, MESSAGE_S, TEMPLATE_MB = 2.0, 0.005, 384  # limits of rendering: CPU time per call, plus per message; memory
ROLES = {"system", "user", "assistant", "tool", "developer"}
SILENCES: tuple[dict[str, Any], ...] = ({"content": "A"}, {}, {"content": None}, {"content": ""})  # beside a call; the first is none
SHAPES = 1 << 12  # kinds of chats whose omissions are remembered


def render(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat], generation: bool = True) -> list[str]:
    """Render each chat.

    Args:
        tokenizer: the tokenizer with the chat template.
        chats: the chats.
        generation: go on to where the assistant's next message begins.

    Raises:
        TimeoutError, MemoryError: the template takes too much CPU time, or (checked only in the main thread) memory.
        Exception: whatever the template raises.
    """
    texts = list[str]()
    messages = sum(len(chat.messages) for chat in chats)
    with in_memory(TEMPLATE_MB), within_cpu_time(TEMPLATE_S + messages * MESSAGE_S):
        for (tools, arguments), group in groupby(chats, lambda chat: (chat.tools, chat.arguments)):
            batch = [chat.messages for chat in group]
            texts += tokenizer.apply_chat_template(batch, tools=tools, tokenize=False, add_generation_prompt=generation, **arguments)
    return texts


def render_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[list[Message]],
    tools: Sequence[dict[str, Any]] | None = None,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Render chats that share their tools, up to where the assistant's next message begins; raises as `render` does.

    Args:
        tokenizer: the tokenizer with the chat template.
        chats: the messages of each chat.
        tools: the schemas of the tools that the assistant may call; None: none.
        arguments: further arguments of the template.
    """
    return render(tokenizer, [Chat(messages, None if tools is None else list(tools), arguments) for messages in chats])


class ChatTemplate:
    """The chat template of a tokenizer, with what a run adds to every chat.

    Args:
        tokenizer: the model's tokenizer.
        data: the run's arguments of the template and its system message, and what to do with control tokens.
        tools: schemas of the tools that the assistant may call.
        intake: takes notes about rows.

    Attributes:
        sees: texts may have marks of images (`images.MARK`), which are no characters.

    Raises:
        ConfigError: the tokenizer has no chat template; or the template leaves out the user's message, could run forever, or does not know
            one of the arguments.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: PromptFormat,
        tools: Sequence[dict[str, Any]] | None = None,
        intake: Intake | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("data.chat: the tokenizer has no chat template; give data.template and data.chat=false")
        self.tokenizer, self._data, self._tools = tokenizer, data, None if tools is None else list(tools)
        self._intake, self.sees = intake or Intake(), False
        self._sources = list(tokenizer.chat_template.values()) if isinstance(tokenizer.chat_template, dict) else [tokenizer.chat_template]
        self._omissions: dict[Any, Omission] = {}
        self._read: dict[str, bool] = {}  # the answers of `_reads`
        for name in data.template_args:
            if not self._reads(name):
                words = {word for source in self._sources for word in re.findall(r"\w+", source)}
                raise ConfigError(f"data.template_args.{name}: the chat template reads no such argument{hint(name, words)}")
        self._check()

    def chat(
        self, messages: list[Message], place: str, tools: list[dict[str, Any]] | None = None, arguments: Mapping[str, Any] | None = None
    ) -> Chat:
        """Return a row's chat with what the run adds, in the form that the template takes.

        Args:
            messages: checked messages.
            place: the start of an error's message.
            tools: the row's own schemas of tools.
            arguments: the row's own arguments of the template.

        Raises:
            ConfigError: the row has other tools than the run, or control tokens that are refused.
        """
        if tools is not None and self._tools is not None and tools != self._tools:
            raise ConfigError(f"{place}: tools: the environment has tools of its own, and the row has others")
        self._intake.note("unusual roles", {message["role"] for message in messages} - ROLES)
        whole = instructed(messages, self._data.system)
        adapted = [self.adapted(message) if message["role"] == "assistant" else message for message in whole]
        chat = Chat(adapted, self._tools if tools is None else tools, self.given(arguments), len(whole) - len(messages))
        self.check_control(chat, place)
        if self.sees and marked([chat.messages[: chat.inserted], chat.tools, chat.arguments]):
            what = "data.system, the tools or the template's arguments"
            raise ConfigError(f"{place}: {what} have U+{ord(MARK):04X}, which stands for images here")
        return chat

    def given(self, arguments: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the run's arguments of the template, and a row's own, without those that the template does not read."""
        if not arguments:
            return self._data.template_args
        self._intake.note("arguments that the chat template does not read", filterfalse(self._reads, arguments))
        return self._data.template_args | {name: value for name, value in arguments.items() if self._reads(name)}

    def texts(self, chats: Sequence[Chat], generation: bool = True) -> list[str | Exception]:
        """Render each chat as `render` does, but return what the template raises for one of them in its place.

        Raises TimeoutError if the template takes too much CPU time for all of them.
        """
        try:
            return list(render(self.tokenizer, chats, generation))
        except TimeoutError:
            raise
        except Exception as error:  # a template may raise anything
            if len(chats) == 1:
                return [error]
            return [text for chat in chats for text in self.texts([chat], generation)]

    def omissions(self, chats: Sequence[Chat], generation: bool = True) -> list[Omission]:
        """Return what the template leaves out of each chat, whatever its texts are.

        Found once for all chats of one shape, from a chat in which each text is replaced by one that nothing else contains. Of the messages
        before the last, only the content and the calls count, since templates may leave out earlier reasoning.
        """
        kinds = [(shape(chat), generation) for chat in chats]
        fresh = {kind: chat for kind, chat in zip(kinds, chats, strict=True) if kind not in self._omissions}
        if len(self._omissions) > SHAPES:
            self._omissions = {kind: self._omissions[kind] for kind in kinds if kind in self._omissions}
        probes = [probed(chat) for chat in fresh.values()]
        texts = self.texts([chat for chat, _ in probes], generation) if probes else []
        for kind, (chat, marks), text in zip(fresh, probes, texts, strict=True):
            self._omissions[kind], unused = omission(chat, marks, text)
            keys = unused.keys | {key for key, other in reduced(chat) if self.texts([other], generation) == [text]}
            keys |= {key for key, number in unused.thoughts.items() if not self._writes(chat, number, key)}
            self._intake.note("keys of messages that the chat template leaves out", keys)
        return [self._omissions[kind] for kind in kinds]

    def _writes(self, chat: Chat, number: int, key: str) -> bool:
        """Whether the template writes the text of a key, which no other text contains, in a message that is the last one."""
        [text] = self.texts([chat.until(number + 1)], generation=False)
        return isinstance(text, str) and chat.messages[number][key] in text

    @cached_property
    def end(self) -> str:
        """The token that ends the assistant's message: the template's own or, if it writes none, the tokenizer's.

        Of the tokens after the message it is the last that the template writes both at the end of a conversation and before the user's next
        message: Phi-3 writes one more at the end, others go on to where the assistant speaks again.
        """
        before, after = self._around
        final, history, eos = self._first_tokens(self.closing), self._first_tokens(after), str(self.tokenizer.eos_token)
        if final:
            shared = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(final, history, strict=False))]
            return eos if eos in shared else (shared or final)[-1]
        opening, between = self._added.findall(before), self._added.findall(after)
        while opening and between and opening[-1] == between[-1]:  # what begins the user's message
            opening, between = opening[:-1], between[:-1]
        return between[-1] if between else eos

    @cached_property
    def ends(self) -> re.Pattern[str]:
        """The pattern of a token that may stand after the assistant's message: a special one, or `end`."""
        return re.compile(f"{re.escape(self.end)}|{special_tokens(self.tokenizer).pattern}")

    @cached_property
    def closing(self) -> str:
        """What the template writes after the assistant's message, with or without an end token."""
        question, answer = f"{PROBE}question", f"{PROBE}answer"
        chat: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        _, _, rest = (self._rendered(chat) or "").partition(question)
        header, _, closing = rest.partition(answer)
        if header.strip() and header == closing and header.strip() != self.tokenizer.eos_token:
            raise ConfigError(f"data.chat: the chat template always ends with {header!r:.80}, even where the assistant does not speak next")
        return closing

    @cached_property
    def image_mark(self) -> str:
        """What the template writes for an image among the parts of a message's content.

        Raises ConfigError if a text with that in it is not what it writes for the parts.
        """
        texts = [f"{PROBE}{name}" for name in ("first", "second")]
        parts: list[Any] = [part for text in texts for part in ({"type": "image", "image": "-"}, {"type": "text", "text": text})]
        listed = self._rendered([{"role": "user", "content": parts}]) or ""
        before, _, rest = listed.partition(texts[0])
        mark = rest.partition(texts[1])[0]
        whole = self._rendered([{"role": "user", "content": f"{mark}{texts[0]}{mark}{texts[1]}"}])
        if not mark or not before.endswith(mark) or whole != listed:
            raise ConfigError("data.chat: the model's chat template does not write the images of a message where its content has them")
        return mark

    @cached_property
    def _around(self) -> tuple[str, str]:
        """What the template writes before a conversation's first message, and between the assistant's message and the user's next one."""
        texts = [f"{PROBE}{name}" for name in ("question", "answer", "next")]
        roles = ("user", "assistant", "user")
        chat: list[Message] = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        before, _, rest = (self._rendered(chat) or "").partition(texts[0])
        return before, rest.partition(texts[1])[2].partition(texts[2])[0]

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """The pattern of an added token that is not blank, whether it is marked as special or not (Cohere's are not)."""
        added = filter(str.strip, map(str, self.tokenizer.added_tokens_decoder.values()))
        return re.compile("|".join([*map(re.escape, sorted(added, key=len, reverse=True)), special_tokens(self.tokenizer).pattern]))

    def _first_tokens(self, text: str) -> list[str]:
        """Return the first token of `_added` in a text, and those that follow it immediately: white space ends the assistant's turn."""
        adjacent = re.search(f"(?:{self._added.pattern})+", text)
        return [] if adjacent is None else self._added.findall(adjacent[0])

    def adapted(self, message: Message) -> Message:
        """Return a message of the assistant's in the form that the template takes, without an end token, which the template writes."""
        adapted = {key: value for key, value in message.items() if key != "weight"}
        content = adapted.get("content")
        if content is not None:
            adapted["content"] = unended(content, self.end, str(self.tokenizer.eos_token))
        elif "tool_calls" in adapted:
            adapted |= self._silence
        else:
            adapted["content"] = ""
        if "tool_calls" in adapted:
            adapted["tool_calls"] = [self._adapted_call(call) for call in adapted["tool_calls"]]
        return adapted

    def _adapted_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function, (objects, texts) = call.get("function", call), self._argument_kinds
        arguments = function.get("arguments")
        if isinstance(arguments, str) and objects and not texts:
            with suppress(ValueError):
                arguments = parse_json(arguments.encode())
        elif isinstance(arguments, dict) and texts and not objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        else:
            return call
        changed = {**function, "arguments": arguments}
        return {**call, "function": changed} if "function" in call else changed

    @cached_property
    def _argument_kinds(self) -> tuple[bool, bool]:
        """Whether the template takes the arguments of a call as an object, and as JSON."""
        as_object, as_json = {f"{PROBE}a": f"{PROBE}b"}, f'{{"{PROBE}a":  "{PROBE}b"}}'
        objects, texts = ("".join(self._called(arguments, silence) for silence in SILENCES) for arguments in (as_object, as_json))
        return f"{PROBE}a" in objects and f"{PROBE}b" in objects, as_json in texts

    @cached_property
    def _silence(self) -> dict[str, Any]:
        """How the template takes a message that only calls: without content, with null or with an empty text."""
        arguments: Any = {"a": f"{PROBE}b"} if self._argument_kinds[0] else f'{{"a": "{PROBE}b"}}'
        like = self._called(arguments, SILENCES[0])
        for silence in SILENCES[1:]:
            text = self._called(arguments, silence)
            if text.count(f"{PROBE}b") >= max(1, like.count(f"{PROBE}b")) and text.count("None") == like.count("None"):
                return silence
        return {"content": ""}  # so that it is named what the template leaves out

    @cached_property
    def calls(self) -> CallFormat | None:
        """How the template writes calls of tools, or asks for them; None: in no form that is read."""
        question: Message = {"role": "user", "content": f"{PROBE}question"}

        def written(calls: list[dict[str, Any]], content: str | None) -> str | None:
            chat = [question, self.adapted({"role": "assistant", "content": content, "tool_calls": calls})]
            text = self._rendered(chat, [PROBE_TOOL]) or self._rendered(chat)
            return None if text is None else text.rpartition(question["content"])[2]

        prompt = self._one(Chat([question], [PROBE_TOOL], self._data.template_args))
        opening = prompt.rpartition(question["content"])[2] if isinstance(prompt, str) else ""
        asks = any(JSON_CALLS.marks[0] in source for source in self._sources)
        return learned(written, opening, self.end, JSON_CALLS if asks else None)

    def _called(self, arguments: Any, silence: Mapping[str, Any]) -> str:
        """Return the rendering of a chat that ends with a call, and of one that goes on; nothing of one that the template refuses."""
        chats = calling(arguments, silence)
        return "".join(self._rendered(chat, [PROBE_TOOL]) or self._rendered(chat) or "" for chat in chats)

    def _rendered(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str | None:
        """Return the rendered messages without a generation prompt; None if the template refuses them."""
        text = self._one(Chat(messages, tools, self._data.template_args), generation=False)
        return text if isinstance(text, str) else None

    def _one(self, chat: Chat, generation: bool = True) -> str | Exception:
        """`texts` of a chat of our own. Raises ConfigError if the template takes too much CPU time or memory."""
        try:
            [text] = self.texts([chat], generation)
        except TimeoutError as error:
            raise ConfigError(f"data.chat: the model's chat template: {first_line(error)}") from None
        if isinstance(text, MemoryError):
            raise ConfigError(f"data.chat: the model's chat template: {first_line(text)}")
        return text

    def _check(self) -> None:
        """Refuse a template that leaves out the user's message or could run forever; one that raises is refused when it renders a row."""
        from jinja2 import Environment, TemplateSyntaxError

        with suppress(TemplateSyntaxError):
            if any(token[1:] == ("operator", "**") for source in self._sources for token in Environment().lex(source)):
                raise ConfigError("data.chat: the model's chat template raises to a power (**), which can take forever")
        text = self._one(Chat([{"role": "user", "content": PROBE}], None, self._data.template_args))
        if isinstance(text, str) and PROBE not in text:
            raise ConfigError(f"data.chat: the model's chat template leaves the prompt out: it renders {PROBE!r} as {text!r:.200}")

    def check_control(self, chat: Chat, place: str) -> None:
        """Take a note of control tokens in the texts of a chat, or raise ConfigError if they are refused."""
        special = special_tokens(self.tokenizer)
        for number, message in enumerate(chat.messages[chat.inserted :]):
            for key, text in spoken(message):
                if token := special.search(text):
                    if self._data.control_tokens == "refuse":
                        what = f"its {key} has the control token {token[0]!r}"
                        raise ConfigError(f"{place}: message {number}: {what} (data.control_tokens=refuse)")
                    self._intake.note_control(place, token[0])
                    return

    def _reads(self, name: str) -> bool:
        """Whether the template reads an argument that is not one of transformers' own."""
        if name not in self._read:
            own = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() - {"documents"} | {"messages"}
            self._read[name] = name not in own and any(re.search(rf"\b{re.escape(name)}\b", source) for source in self._sources)
        return self._read[name]
