"""Contents of messages in the clients' formats: texts, and images among them as an environment's messages have them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.data.messages import Message
from megarl.environments.agents.questions import Refusal
from megarl.image_source import BadImage, held

IMAGES = ("image_url", "input_image", "image")  # types of a part: of OpenAI's two formats, and of Anthropic's


def text_of(content: Any, place: str) -> str | None:
    """Return a content as a text. Raises Refusal if a part of it is no text."""
    if content is None or isinstance(content, str):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content] if isinstance(content, list) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal(400, "invalid_content", f"{place}: only texts are read here")
    return "\n".join(map(str, texts))


def content_of(content: Any, place: str) -> Any:
    """Return a content as a text, or, if images are among its parts, as a list of texts and images.

    Args:
        content: as the client has it.
        place: the start of an error's message.

    Returns:
        A text; None; or parts, each {"type": "text", "text": ...} or {"type": "image", "image": the bytes of a file}.

    Raises:
        Refusal: a part is neither a text nor an image whose bytes it has.
    """
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, place)
    return [
        {"type": "image", "image": _bytes_of(part, f"{place}: part {number}")}
        if _is_image(part)
        else {"type": "text", "text": text_of([part], f"{place}: part {number}")}
        for number, part in enumerate(content)
    ]


def texts_of(content: Any) -> Any:
    """Return what `content_of` returns without its images, as a text."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content


def images_of(messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield the images of messages whose contents are from `content_of`."""
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from (part["image"] for part in message["content"] if part["type"] == "image")


def details_of(messages: Sequence[Any]) -> dict[str, Any]:
    """Return the resolution that a client asks for in its images, {"detail": ...}; nothing if it leaves that open."""
    parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"] if _is_image(part)]
    asked = [(part["image_url"] if isinstance(part.get("image_url"), dict) else part).get("detail") for part in parts]
    wanted = [one for one in asked if one not in (None, "auto")]
    return {"detail": wanted[0]} if wanted else {}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGES


def _bytes_of(part: Mapping[str, Any], place: str) -> bytes:
    match part:
        case {"type": "image", "image": bytes(data)}:  # which `content_of` has read; no JSON has bytes
            return data
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url" | "input_image", "image_url": str(url)}:
            value = url
        case {"type": "image", "source": {"type": "base64", "data": str(data)}}:
            value = f"data:image/*;base64,{data}"
        case _:
            value = ""
    try:
        if (read := held(value)) is not None:
            return read
    except BadImage as error:
        raise Refusal(400, "invalid_image", f"{place}: {error}") from None
    raise Refusal(400, "invalid_image", f"{place}: an image is read from a data URL or base64 alone, and nothing is fetched: {part!r:.80}")
