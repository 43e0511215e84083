"""Images in chat messages: parts of a content that are read from files, checked, and written as the chat template writes them.

A message's content is then a text with a mark for each image. The template renders it as any text, after a check that it would render the
list of parts alike; marks become the image's tokens when the text is tokenised.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config import ModelSettings
from megarl.config.data import TableSource
from megarl.data.intake import TooLong
from megarl.data.messages import Message
from megarl.errors import ConfigError
from megarl.image_source import IMAGES, BadImage, ImageSource, held, kept_file, read_bounded
from megarl.images import MARK, Image, PlacedImage, marked
from megarl.models.description import ModelDescription
from megarl.models.image_processor import ImageProcessor, mime

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.rendering import Reply
    from megarl.data.template import ChatTemplate

COLUMN, ONE = "images", "image"  # of a row: the images, or the only one, of parts that name none
COLUMNS = {COLUMN, ONE}
OTHERS = {"videos", "audios"}  # columns of a row, as verl has them, that no model is shown
UNSHOWN = "columns of images, videos or sounds that the model is not shown"
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}
RESERVED = f"U+{ord(MARK):04X}, which stands for images here"
HERE = "<image>"  # stands for one of these in a content that is a text, as verl has it
_PARTS = {"text": ("text",), "image": ("image", "path", "url"), "image_url": ("image_url",)}  # type of a part -> keys of what it holds
SEEN = _PARTS.keys() - {"text"}


class ImageReader:
    """Reads the images of a source's rows, or of an environment's answers, for one model.

    Args:
        processor: counts an image's tokens.
        token: the model's image token.
        most: maximum number of tokens of a sample.
        limit_key: the setting that gives it, for messages.
        folder: keeps images that no data file has, those of each step in a folder of its number; None: references have their bytes.
    """

    def __init__(self, processor: ImageProcessor, token: int, most: int, limit_key: str, folder: Path | None = None) -> None:
        self.processor, self._token, self._most, self._limit_key, self._folder = processor, token, most, limit_key, folder

    def take(self, messages: Any, row: Mapping[str, Any], source: TableSource, place: str) -> tuple[Any, list[Image]]:
        """Return the messages with marks in the place of images, and the images in order.

        Args:
            messages: as the row has them; what is no list of parts is left as it is.
            row: its columns, of which `images` or `image` holds those of parts that name none, and of "<image>" in contents that are texts.
            source: the row's file.
            place: the start of an error's message, which ends with the row's number.

        Raises:
            ConfigError: a part or an image that is not taken, or images that no part stands for.
            TooLong: the images alone have too many tokens.
        """
        if not isinstance(messages, list):
            return messages, []
        if others := [name for name in sorted(OTHERS) if row.get(name)]:
            raise ConfigError(f"{place}: its column {others[0]!r} is not taken: texts and images are read")
        column, rest = unnamed(messages, row)
        images, total, changed = list[Image](), 0, list[Any]()
        in_texts = bool(rest)  # whether `HERE` in a content that is a text stands for an image
        for number, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            where = f"{place}: message {number}"
            if marked({**message, "content": content if isinstance(content, str) else None} if isinstance(message, dict) else None):
                raise ConfigError(f"{where}: it has {RESERVED}")
            if in_texts and isinstance(content, str) and _shows(message):
                content = _parts_of(content)
            if not isinstance(content, list):
                changed.append(message)
                continue
            texts = list[str]()
            for index, part in enumerate(content):
                kind, value = _part(part, f"{where}: part {index}")
                if kind == "text":
                    texts.append(value)
                    continue
                if message.get("role") == "assistant":
                    raise ConfigError(f"{where}: part {index}: images of the assistant are not learned")
                if value is None:
                    if not rest:
                        raise ConfigError(f"{where}: part {index}: names no image, and the column {column!r} has no more")
                    value = rest.pop(0)
                image = self._read(value, source, int(place.rpartition(":")[2]), f"{where}: part {index}")
                total += image.tokens
                if total > self._most:
                    raise TooLong(f"{place}: {len(images) + 1} images have {total} tokens, more than {self._limit_key}={self._most}")
                images.append(image)
                texts.append(MARK)
            changed.append({**message, "content": "".join(texts)})
        if rest:
            raise ConfigError(f"{place}: the column {column!r} has {len(rest)} images that no part stands for")
        return changed, images

    def heard(self, messages: Sequence[Message], step: int = 0) -> tuple[list[Message], list[Image]]:
        """Return messages of an environment or an agent with marks in the place of images, and the images in order.

        Nothing is kept unless all of them are taken.

        Args:
            messages: the messages.
            step: the step under which the images are kept.

        Raises:
            ConfigError: an image that is not taken, or too many tokens of images; the message is the environment's fault.
        """
        changed, images, total = list[Message](), list[tuple[Image, bytes]](), 0
        for message in messages:
            if marked({key: value for key, value in message.items() if key != "content"}):
                raise ConfigError(f"a message has {RESERVED}")
            content = message.get("content")
            texts = list[str]()
            for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
                text = part.get("text", "")
                if MARK in text:
                    raise ConfigError(f"a text has {RESERVED}")
                texts.append(MARK if part["type"] == "image" else text)
                if part["type"] == "image":
                    images.append(self._checked(part["image"]))
                    total += images[-1][0].tokens
                if total > self._most:
                    raise TooLong(f"{len(images)} images have {total} tokens, more than {self._limit_key}={self._most}")
            changed.append({**message, "content": "".join(texts)} if isinstance(content, list) else message)
        return changed, [self._kept(image, data, step) for image, data in images]

    def _checked(self, value: Any) -> tuple[Image, bytes]:
        """Return an image that no file has yet, and its bytes."""
        try:
            data = held(value)
            if data is None:
                raise BadImage("no bytes")
            return self.processor.read(data, ImageSource("", data=data)), data
        except BadImage as error:
            raise ConfigError(f"the image is refused: {error}") from None

    def _kept(self, image: Image, data: bytes, step: int) -> Image:
        return image if self._folder is None else replace(image, source=kept_file(data, self._folder / str(step)))

    def filled(self, text: str, images: Sequence[Image], template: ChatTemplate) -> str:
        """Return a rendered text with what the template writes for its images in the place of their marks.

        Args:
            text: the text.
            images: its images, in order.
            template: the chat template.

        Raises:
            ConfigError: it has not as many marks as there are images.
        """
        first, *others = text.split(MARK)
        if len(others) != len(images):
            raise ConfigError(f"the chat template writes {len(others)} images, and there are {len(images)}")
        piece = template.tokenizer.convert_ids_to_tokens(self._token)
        marks = (template.image_mark.replace(piece, piece * image.tokens) for image in images)
        return first + "".join(mark + rest for mark, rest in zip(marks, others, strict=True))

    def shown(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return a decoded text with `HERE` in the place of each image's tokens."""
        piece = re.escape(str(tokenizer.convert_ids_to_tokens(self._token)))
        return re.sub(f"(?:{piece})+", HERE, text)

    def written(self, turns: Sequence[Reply], images: Sequence[Image], template: ChatTemplate) -> tuple[list[Reply], list[Image]]:
        """Return the turns of a sample with what the template writes for its images, and these images.

        Args:
            turns: the sample's turns, which read a beginning of the conversation.
            images: those of the conversation.
            template: the chat template.

        Raises:
            ConfigError: there are more marks than images.
        """
        if not images:
            return list(turns), []
        piece = template.tokenizer.convert_ids_to_tokens(self._token)
        changed: list[Reply] = []
        mark, count = template.image_mark, 0
        for turn in turns:
            first, *others = turn.read.split(MARK)
            if count + len(others) > len(images):
                raise ConfigError(f"a text has {RESERVED}")
            for image, text in zip(images[count : count + len(others)], others, strict=True):
                first += mark.replace(piece, piece * image.tokens) + text
            count += len(others)
            changed.append(replace(turn, read=first))
        return changed, list(images[:count])

    def placed(self, tokens: np.ndarray, images: Sequence[Image], place: str) -> list[PlacedImage]:
        """Return where the images of a sample stand.

        Args:
            tokens: the sample's tokens.
            images: its images.
            place: the start of an error's message.

        Raises:
            ConfigError: the image tokens are not exactly theirs.
        """
        positions, expected = np.flatnonzero(tokens == self._token), sum(image.tokens for image in images)
        if len(positions) != expected:
            raise ConfigError(f"{place}: {len(positions)} image tokens, and its {len(images)} images have {expected}")
        first, placed = 0, list[PlacedImage]()
        for image in images:
            one = PlacedImage(int(positions[first]), image)
            if positions[first + image.tokens - 1] != one.end - 1:
                raise ConfigError(f"{place}: the tokens of an image do not follow each other")
            placed.append(one)
            first += image.tokens
        return placed

    def _read(self, value: Any, source: TableSource, row: int, place: str) -> Image:
        if isinstance(value, dict):  # as the library datasets writes images
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        try:
            data, where = held(value), ImageSource(str(source.path), row)
            if data is None:
                path = _path(value, source.image_folder or source.path.parent)
                data, where = read_bounded(path), ImageSource(str(path))
            return self.processor.read(data, where)
        except BadImage as error:
            raise ConfigError(f"{place}: the image is refused: {error}") from None


def reader_of(settings: ModelSettings, most: int, limit_key: str) -> ImageReader | None:
    """Return the reader of a model's images; None for a model of text.

    Args:
        settings: the section `model`.
        most: as of `ImageReader`, like `limit_key`.
        limit_key: the limit's setting.

    Raises:
        ConfigError: the model has no image processor, or limits that contradict each other.
    """
    pixels = settings.min_pixels, settings.max_pixels
    if (reader := answer_reader(settings.path, pixels, most, limit_key, drop_images=settings.drop_images)) is not None:
        _ = reader.processor.inner  # an error of no row's
    return reader


def answer_reader(
    path: Path, pixels: tuple[int | None, int | None], most: int, limit_key: str, folder: Path | None = None, *, drop_images: bool = False
) -> ImageReader | None:
    """Return the reader of the images that a model sees; None for a model of text.

    Args:
        path: the model's directory.
        pixels: `model.min_pixels` and `model.max_pixels`.
        most: as of `ImageReader`, like `limit_key` and `folder`.
        limit_key: the limit's setting.
        folder: keeps images that no data file has.
        drop_images: `model.drop_images`.
    """
    vision = ModelDescription.read(path, drop_images=drop_images).sizes.vision
    return None if vision is None else ImageReader(ImageProcessor(path, *pixels), vision.image_token, most, limit_key, folder)


def check_folder(source: TableSource, reader: ImageReader | None, key: str) -> None:
    """Check that a source's folder of images is read.

    Args:
        source: the source.
        reader: reads its images; None: they are refused.
        key: the source's dotted key.

    Raises:
        ConfigError: it has such a folder, and nothing reads it.
    """
    if reader is None and source.image_folder is not None:
        raise ConfigError(f"{key}.image_folder={source.image_folder}: the model sees no images, or reads none of this source")


def sent(prompt: str | list[Message], images: Sequence[Image]) -> list[Message]:
    """Return a prompt as OpenAI's servers take it: in the place of each image's mark is a part with the file as a data URL.

    Args:
        prompt: `Prompt.given`.
        images: its images, in order.

    Raises:
        ImageGone: as `Image.read` does.
    """

    def part(image: Image) -> dict[str, Any]:
        data = image.read()
        return {"type": "image_url", "image_url": {"url": f"data:{mime(data)};base64,{base64.b64encode(data).decode()}"}}

    return _with_parts(prompt, map(part, images))


def copied(prompt: str | list[Message], images: Sequence[Image], folder: Path) -> list[Message]:
    """Return a prompt as rows of a file in this folder have it; copy its images into `IMAGES` there, each once. Otherwise as `sent`."""
    names = (Path(kept_file(image.read(), folder / IMAGES).path).relative_to(folder) for image in images)
    return _with_parts(prompt, ({"type": "image", "image": str(name)} for name in names))


def _with_parts(prompt: str | list[Message], images: Iterator[dict[str, Any]]) -> list[Message]:
    """Return a prompt with these parts in the place of its marks."""

    def parts(content: str) -> list[dict[str, Any]]:
        first, *others = content.split(MARK)
        listed = [{"type": "text", "text": first}, *(part for text in others for part in (next(images), {"type": "text", "text": text}))]
        return [part for part in listed if part.get("text") != ""]

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{**one, "content": parts(one["content"])} if MARK in one.get("content", "") else one for one in messages]


def shown(prompt: str | list[Message]) -> str | list[Message]:
    """Return a prompt as others read it, with `HERE` in the place of each image's mark."""
    if isinstance(prompt, str):
        return prompt.replace(MARK, HERE)
    return [{**message, "content": message["content"].replace(MARK, HERE)} if "content" in message else message for message in prompt]


def shown_task(task: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a prompt's task (`Prompt.task`) as an environment gets it, `shown`."""
    return None if task is None else {key: shown(value) if key == "prompt" else value for key, value in task.items()}


def sent_task(task: Mapping[str, Any] | None, images: Sequence[Image]) -> dict[str, Any] | None:
    """Return a prompt's task as an agent gets it: a prompt with images is `sent`, any other `shown`. Raises as `sent` does."""
    return shown_task(task) if task is None or not images else {**task, "prompt": sent(task["prompt"], images)}


def _part(part: Any, place: str) -> tuple[str, Any]:
    """Return whether a part is a text or an image, and what it holds; None: an image that it does not name."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if value is not None}
        kind = part.get("type")
        if kind in _PARTS and not (others := part.keys() - {"type", *_PARTS[kind]}):
            [value, *more] = [part[key] for key in _PARTS[kind] if key in part] or [None]
            if kind == "text" and isinstance(value, str) and MARK not in value:
                return "text", value
            if kind != "text" and not more:
                return "image", value.get("url") if kind == "image_url" and isinstance(value, dict) else value
        elif kind in _PARTS:
            raise ConfigError(f"{place}: a part of type {kind!r} has {', '.join(sorted(others))}, which is not taken")
    raise ConfigError(f"{place}: must be a text or an image, with its type, and is {part!r:.80}")


def unnamed(messages: Any, row: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the column of the images that no part names, and these.

    That is `images` or, without it, `image`. A text in the latter is an image's path only if something in the messages stands for an image.
    """
    name = COLUMN if row.get(COLUMN) is not None else ONE
    value = row.get(name)
    if name == ONE and isinstance(value, str) and not any(map(_shows, messages if isinstance(messages, list) else ())):
        value = None
    return (name if value else COLUMN), [*value] if isinstance(value, list) else [value] if value else []


def unshown(row: Mapping[str, Any]) -> list[str]:
    """Return the columns that a row without images has for some: a text in `image` may also be a container's name."""
    names = [name for name in (COLUMN, ONE, *OTHERS) if row.get(name)]
    return [name for name in names if name != ONE or not isinstance(row[ONE], str) or Path(row[ONE]).suffix.lower() in SUFFIXES]


def _shows(message: Any) -> bool:
    """Whether a message's content has a place for an image that it does not name: `HERE`, or a part."""
    content = message.get("content") if isinstance(message, dict) and message.get("role") != "assistant" else None
    if isinstance(content, str):
        return HERE in content
    images = [part for part in content if isinstance(part, dict) and part.get("type") in SEEN] if isinstance(content, list) else []
    return any(all(part.get(key) is None for key in _PARTS[part["type"]]) for part in images)


def _parts_of(content: str) -> list[dict[str, str]]:
    """Return a text with `HERE` for its images as parts."""
    first, *others = content.split(HERE)
    return [{"type": "text", "text": first}, *(part for text in others for part in ({"type": "image"}, {"type": "text", "text": text}))]


def _path(value: Any, folder: Path) -> Path:
    """Return the file of an image that a row names. Raise BadImage if it is none, or not inside the folder."""
    if not isinstance(value, str) or not value:
        raise BadImage(f"neither a path nor bytes but {value!r:.80}")
    if "://" in value:
        raise BadImage(f"{value!r:.80} is an address, and nothing is fetched: give the file's path or bytes")
    try:
        path, root = (folder / value).resolve(), folder.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte in the path, or links that lead to each other
        raise BadImage(f"{folder / value}: {error}") from None
    if not path.is_relative_to(root):
        raise BadImage(f"{value!r:.80} leads out of {folder}; the source's image_folder may be another")
    return path
