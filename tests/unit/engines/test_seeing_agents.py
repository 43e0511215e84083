"""Images in what agents send, in each client's format: where they stand in each context, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megarl.batch import Sample, pack
from megarl.config import FileSource, SourceFormat
from megarl.data.images import answer_reader
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.data.turns import TurnTokens
from megarl.engines import agents
from megarl.engines.agents import AgentPlayer
from megarl.engines.episodes import Limits, Played, Start
from megarl.engines.generate import Sampling
from megarl.environments.agents.endpoint import FORMATS
from megarl.environments.agents.questions import Answer, Policy, Refusal
from megarl.environments.protocol import Turn
from megarl.images import MARK
from tests.image_samples import PAD, inverted, picture
from tests.unit.data.test_images import bomb
from tests.unit.engines.test_seen_episodes import REWRITING, Seeing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Said = list[tuple[str, list[str | bytes]]]  # the roles of a conversation, and what each says: texts and the bytes of images
Body = dict[str, Any]
START = Start(0, [], 1, step=3)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def in_chat(said: Said) -> Body:
    def part(one: str | bytes) -> Body:
        if isinstance(one, str):
            return {"type": "text", "text": one}
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(one)}", "detail": "auto"}}

    return {"messages": [{"role": role, "content": list(map(part, parts))} for role, parts in said]}


def in_responses(said: Said) -> Body:
    def part(role: str, one: str | bytes) -> Body:
        if isinstance(one, str):
            return {"type": "output_text" if role == "assistant" else "input_text", "text": one}
        return {"type": "input_image", "image_url": f"data:image/png;base64,{base64_of(one)}", "detail": "auto"}

    return {"input": [{"type": "message", "role": role, "content": [part(role, one) for one in parts]} for role, parts in said]}


def in_messages(said: Said) -> Body:
    def block(one: str | bytes) -> Body:
        if isinstance(one, str):
            return {"type": "text", "text": one}
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(one)}}

    return {"messages": [{"role": role, "content": list(map(block, parts))} for role, parts in said]}


WRITTEN: dict[str, Callable[[Said], Body]] = {
    "/v1/chat/completions": in_chat,
    "/v1/responses": in_responses,
    "/v1/messages": in_messages,
}


class Client:
    """In the place of a host: an agent that sends bodies, each made from the answers before it."""

    def __init__(self, bodies: Sequence[tuple[str, Callable[[list[Any]], Body]]]) -> None:
        self._bodies, self.answers = bodies, list[Answer | Refusal]()

    async def play(self, seed: int, task: dict[str, Any] | None, policy: Policy) -> Turn:
        for kind, make in self._bodies:
            try:
                self.answers.append(await policy.answer(FORMATS[kind].read(json.loads(json.dumps(make(self.answers))))))
            except Refusal as refusal:
                self.answers.append(refusal)
        return Turn(None, 1.0)


def played(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    client: Client,
    script: Sequence[str],
    most: int = 2000,
    start: Start = START,
) -> tuple[Played, list[Any]]:
    """An episode, and what the engine was asked."""
    engine = Seeing(tokenizer, script)
    turns = TurnTokens(tokenizer, reader=answer_reader(path, (None, None), most, "most", folder))

    def text_of(turn: Sample) -> str:
        return decode(tokenizer, turn.tokens[turn.prompt_length :].tolist(), finished=turn.finish_reason == "stop")

    async def body() -> Played:
        limits = Limits(prompt_tokens=1000, response_tokens=2000, turns=9)
        player = AgentPlayer(engine, turns, text_of, start, 0, Sampling(1, 1.0, 100, 0), limits)
        return await player.play(client)  # type: ignore[arg-type]

    return asyncio.run(body()), engine.asked


@pytest.mark.parametrize("rewriting", [False, True])
@pytest.mark.parametrize("kind", WRITTEN)
def test_images_of_requests_stand_where_the_context_has_them(seeing: Path, tmp_path: Path, kind: str, rewriting: bool) -> None:
    """Each request has the whole conversation; its tokens go on from what was sampled, unless the template rewrites that."""
    tokenizer, rng = load_tokenizer(seeing), np.random.default_rng(1)
    if rewriting:
        tokenizer.chat_template = REWRITING
    files = [picture(rng) for _ in range(3)]
    first: Said = [("user", ["the tag <image> of ", files[0], files[1]])]

    def second(answers: list[Any]) -> Said:
        return [*first, ("assistant", [answers[0].content]), ("user", [files[2], "?"])]

    def third(answers: list[Any]) -> Said:
        return [*second(answers), ("assistant", [answers[1].content]), ("user", ["no image"])]

    write = WRITTEN[kind]
    client = Client([(kind, lambda _: write(first)), (kind, lambda said: write(second(said))), (kind, lambda said: write(third(said)))])
    one, asked = played(seeing, tokenizer, tmp_path, client, ["[a] one", "[b] two", "three"])
    assert one.error is None and one.turns == 3 and len(one.sample.starts) == (2 if rewriting else 0), client.answers
    assert [[placed.image.read() for placed in request.images] for request in asked] == [files[:2], files, files]
    for request in asked:
        assert request.tokens.count(PAD) == sum(placed.image.tokens for placed in request.images)
        assert decode(tokenizer, request.tokens, finished=False).count("the tag <image> of <|vision_start|><|image_pad|>") == 1
    sample, expected = one.sample, [*files[:2], *files, *files] if rewriting else files
    assert [placed.image.read() for placed in sample.images] == expected
    for placed in sample.images:
        assert (sample.tokens[placed.start : placed.end] == PAD).all()
    learned = sample.tokens[sample.prompt_length :][sample.loss_mask]
    assert not (learned == PAD).any() and decode(tokenizer, learned.tolist(), finished=False).count("<|end|>") == 3
    batch = pack([sample])
    assert batch.images_N is not None and len(batch.images_N[0]) == len(expected)
    assert all("<|image_pad|>" not in text and text.count("<image>") > 1 for text in one.follows)
    assert sorted(file.read_bytes() for file in (tmp_path / "3").iterdir()) == sorted(files), "each once, of the step that asked for it"


def test_a_context_and_a_draw_are_of_their_own_images(seeing: Path, tmp_path: Path) -> None:
    """Of a picture and its negative, whose tokens are the same: neither goes on from the other's answer, nor draws as it does."""
    kind, file = "/v1/chat/completions", picture(np.random.default_rng(1))

    def asks(file: bytes, *more: str) -> Said:
        said: Said = [("user", [file, "?"])]
        for number, text in enumerate(more):
            said.append(("user" if number % 2 else "assistant", [text]))
        return said

    bodies: list[tuple[str, Callable[[list[Any]], Body]]] = [
        (kind, lambda _: in_chat(asks(file))),
        (kind, lambda _: in_chat(asks(inverted(file)))),
        (kind, lambda _: in_chat(asks(inverted(file), "one", "next"))),  # no answer to this picture
        (kind, lambda _: in_chat(asks(file, "one", "next"))),
    ]
    one, asked = played(seeing, load_tokenizer(seeing), tmp_path, Client(bodies), ["one", "two", "three", "four"])
    assert one.error is None and one.turns == 4 and len(one.sample.starts) == 2
    assert asked[0].tokens == asked[1].tokens and asked[2].tokens == asked[3].tokens
    assert len({request.id for request in asked}) == len({request.seed for request in asked}) == 4
    _, turned = played(seeing, load_tokenizer(seeing), tmp_path, Client(bodies[1::-1]), ["two", "one"])
    assert [request.seed for request in turned] == [asked[1].seed, asked[0].seed], "whichever comes first"


FILE = picture(np.random.default_rng(1))
SHOWN: list[tuple[str, list[str | bytes], str]] = [
    ("bomb", [bomb()], "the image is refused: more than 67108864 pixels"),
    ("damaged", [FILE[:600]], "the image is refused: damaged: "),
    ("text", [b"none"], "the image is refused: no image in one of the formats"),
    ("empty", [b""], "the image is refused: "),
    ("many", [FILE] * 500, "images have "),
    ("very many", [b"none"] * 10_000, "characters are more than rollout.max_prompt_tokens"),
    ("mark", ["a", MARK, FILE], "which stands for images here"),
    ("token", ["a<|image_pad|>", FILE], "image tokens, and its 1 images have"),
    ("large", [FILE, inverted(FILE) * 12], "the images of the episode have "),
]
BAD: dict[str, tuple[str, Body, str]] = {
    **{name: ("/v1/chat/completions", in_chat([("user", parts)]), message) for name, parts, message in SHOWN},
    "system": ("/v1/chat/completions", in_chat([("system", [FILE]), ("user", ["a"])]), "not of 'system'"),
    "assistant": ("/v1/chat/completions", in_chat([("user", ["a"]), ("assistant", [FILE]), ("user", ["b"])]), "not of 'assistant'"),
    **{
        f"url {url[:25]}": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]},
            message,
        )
        for url, message in (
            ("https://a.b/c.png", "nothing is fetched"),
            ("file:///etc/passwd", "nothing is fetched"),
            ("/etc/passwd", "nothing is fetched"),
            ("data:image/png,abc", "data URL of at most"),
            ("data:image/png;base64,%%%", "not base64"),
        )
    },
    "anthropic's address": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}]}]},
        "nothing is fetched",
    ),
    "responses' file": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
        "nothing is fetched",
    ),
    "tokens": ("/v1/completions", {"prompt": [20, 21, PAD]}, "1 image tokens, and its 0 images"),
    "prompt": ("/v1/completions", {"prompt": "a<|image_pad|>"}, "1 image tokens, and its 0 images"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_refuses_its_request(seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By name, before anything is kept or sampled; the episode goes on with the next request."""
    monkeypatch.setattr(agents, "MOST_BYTES", 10 * len(FILE) if name == "large" else agents.MOST_BYTES)
    kind, body, message = BAD[name]
    client = Client([(kind, lambda _: body), ("/v1/chat/completions", lambda _: in_chat([("user", ["see <image>: ", FILE])]))])
    one, asked = played(seeing, load_tokenizer(seeing), tmp_path, client, ["fine"], most=300)
    refusal, answer = client.answers
    assert isinstance(refusal, Refusal) and message in str(refusal) and refusal.status in (400, 413)
    assert isinstance(answer, Answer) and answer.content == "fine" and (one.error, one.turns, len(asked)) == (None, 1, 1)
    assert [file.read_bytes() for file in (tmp_path / "3").iterdir()] == [FILE]


def test_a_resolution_that_is_asked_for_is_named_as_not_used() -> None:
    for kind in ("/v1/chat/completions", "/v1/responses"):
        body = json.dumps(WRITTEN[kind]([("user", [FILE, "?"])]))
        assert FORMATS[kind].read(json.loads(body)).unused == {}
        assert FORMATS[kind].read(json.loads(body.replace('"auto"', '"high"'))).unused == {"detail": "high"}


def test_a_model_of_text_is_sent_no_images(tiny_model: Path, tmp_path: Path) -> None:
    client = Client([("/v1/chat/completions", lambda _: in_chat([("user", [FILE])]))])
    one, _ = played(tiny_model, load_tokenizer(tiny_model), tmp_path, client, [])
    assert "the model sees none" in str(client.answers[0]) and one.error == agents.NO_CALL


def test_a_text_prompt_does_not_go_on_from_a_conversation(seeing: Path, tmp_path: Path) -> None:
    """It begins as an answer in one, whose tokens and images are no part of it."""
    bodies: list[tuple[str, Callable[[list[Any]], Body]]] = [
        ("/v1/chat/completions", lambda _: in_chat([("user", [FILE])])),
        ("/v1/completions", lambda said: {"prompt": f"{said[0].content} and"}),
    ]
    _, asked = played(seeing, load_tokenizer(seeing), tmp_path, Client(bodies), ["one", "two"])
    assert not asked[1].images and decode(load_tokenizer(seeing), asked[1].tokens, finished=False) == "one and"


def test_an_agent_that_sends_its_task_on_sees_what_the_row_shows(seeing: Path, tmp_path: Path) -> None:
    """The policy reads the tokens of the data's prompt, with images of the same bytes, once from its episode's own copies."""
    files = [picture(np.random.default_rng(number)) for number in range(2)]
    for number, data in enumerate(files):
        (tmp_path / str(number)).write_bytes(data)
    row = {"prompt": "a<image>b<image><image>", "images": ["0", "1", "0"], "answer": "1"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tokenizer, reader = load_tokenizer(seeing), answer_reader(seeing, (None, None), 1000, "most")
    source = FileSource(type="file", path=tmp_path / "rows.jsonl", answer_key="answer")
    [prompt] = load_prompts(source, tokenizer, SourceFormat(), 1000, "data.train", reader=reader)
    start = Start(0, prompt.tokens, 1, prompt.task, step=3, images=prompt.images)

    class Forwarding(Client):
        async def play(self, seed: int, task: dict[str, Any] | None, policy: Policy) -> Turn:
            assert task is not None and task["answer"] == "1"
            body = json.loads(json.dumps({"messages": task["prompt"]}))
            self.answers.append(await policy.answer(FORMATS["/v1/chat/completions"].read(body)))
            return Turn(None, 1.0)

    episode, [request] = played(seeing, tokenizer, tmp_path / "kept", client := Forwarding([]), ["x"], start=start)
    assert episode.error is None and isinstance(client.answers[0], Answer)
    assert request.tokens == prompt.tokens and [*request.images] == [*prompt.images]
    assert [placed.image.read() for placed in request.images] == [files[0], files[1], files[0]]
    assert all(str(tmp_path / "kept") in placed.image.source.path for placed in request.images)
