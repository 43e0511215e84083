"""Images in the forms in which data sets and files have them: as a person sees them, from whatever column, and never unseen in silence."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image as Pillow
from pyarrow import parquet

from megarl.config import ConfigError, ConversationSource, FileSource, SftData, SourceFormat
from megarl.data.images import ImageReader
from megarl.data.prompts import Prompt
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_answers, load_conversations
from megarl.data.tokenizer import load_tokenizer
from megarl.image_source import BadImage, ImageSource
from megarl.images import MARK
from megarl.models.image_processor import ImageProcessor, mime, opened
from tests.image_samples import PAD, picture


def saved(image: Pillow.Image, form: str = "PNG", **more: Any) -> bytes:
    image.save(file := io.BytesIO(), form, **more)
    return file.getvalue()


def palette() -> Pillow.Image:
    image = Pillow.new("P", (32, 32), 0)
    image.putpalette([10, 20, 30, *[0] * 765])
    return image


CLEAR, WHITE, RED, BLUE = (0, 0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 0, 255)
COLOURS: dict[str, tuple[bytes, tuple[int, int, int]]] = {
    "alpha": (saved(Pillow.new("RGBA", (32, 32), CLEAR)), WHITE),
    "half": (saved(Pillow.new("RGBA", (32, 32), (0, 0, 0, 127))), (128, 128, 128)),
    "grey_alpha": (saved(Pillow.new("LA", (32, 32), (0, 0))), WHITE),
    "palette": (saved(palette(), transparency=0), WHITE),
    "palette_of_alphas": (saved(palette(), transparency=bytes(256)), WHITE),
    "opaque_palette": (saved(palette()), (10, 20, 30)),
    "colour_key": (saved(Pillow.new("RGB", (32, 32), (1, 2, 3)), transparency=(1, 2, 3)), WHITE),
    "gif": (saved(palette(), "GIF", transparency=0), WHITE),
    "webp": (saved(Pillow.new("RGBA", (32, 32), CLEAR), "WEBP", lossless=True, exact=True), WHITE),
    "cmyk": (saved(Pillow.new("CMYK", (32, 32), (0, 255, 255, 0)), "JPEG"), RED),
    "sixteen_bits": (saved(Pillow.fromarray(np.full((32, 32), 0x8000, np.uint16))), (128, 128, 128)),
    "one_bit": (saved(Pillow.new("1", (32, 32), 1)), WHITE),
    "animated": (saved(Pillow.new("RGB", (32, 32), RED), "GIF", save_all=True, append_images=[Pillow.new("RGB", (32, 32), BLUE)]), RED),
}


@pytest.mark.parametrize("name", COLOURS)
def test_an_image_is_seen_as_a_person_sees_it(name: str) -> None:
    data, colour = COLOURS[name]
    picture = opened(data)
    assert (picture.mode, picture.size) == ("RGB", (32, 32))
    assert np.abs(np.asarray(picture).reshape(-1, 3).astype(int) - colour).max() <= 1


def test_a_telephone_s_picture_is_a_jpeg() -> None:
    """With a second picture behind the first, which Pillow calls MPO."""
    red, blue = (Pillow.new("RGB", (32, 32), colour) for colour in (RED, BLUE))
    data = saved(red, "MPO", save_all=True, append_images=[blue])
    assert mime(data) == "image/jpeg" and np.abs(np.asarray(opened(data)).astype(int) - RED).max() <= 2
    assert mime(saved(red, "WEBP")) == "image/webp"


def test_sixteen_bits_keep_all_shades() -> None:
    shades = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    assert np.array_equal(np.asarray(opened(saved(Pillow.fromarray(shades))))[..., 0], shades >> 8)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_turned_as_its_camera_says(form: str) -> None:
    """A quarter to the right: the upper half is now the right one, and its size is that of what is seen."""
    exif = Pillow.Exif()
    exif[0x112] = 6
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:16] = 255
    upright = opened(saved(Pillow.fromarray(pixels), form, exif=exif))
    assert upright.size == (32, 64)
    seen = np.asarray(upright).astype(int)[..., 0]
    assert seen[:, 18:].min() > 200 and seen[:, :14].max() < 50


def prompts(path: Path, file: Path, rows: list[dict[str, Any]], sees: bool = True, **data: Any) -> list[Prompt]:
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    reader = ImageReader(ImageProcessor(path), PAD, 400, "rollout.max_prompt_tokens") if sees else None
    source = FileSource(type="file", path=file, answer_key="answer")
    return list(load_prompts(source, load_tokenizer(path), SourceFormat(**data), 400, "data.train", reader=reader))


def test_the_only_image_of_a_row_may_have_a_column_of_its_own(seeing: Path, tmp_path: Path) -> None:
    """As Hugging Face's Image feature writes it, or as LLaVA's data name it; a text that stands for nothing is no image."""
    (tmp_path / "a.png").write_bytes(data := picture(np.random.default_rng(1)))
    text: dict[str, Any] = {"prompt": "<image>what?", "answer": "1"}
    forms: list[Any] = [
        {"image": {"bytes": data, "path": "x.png"}},
        {"image": {"bytes": None, "path": "a.png"}},
        {"images": [{"bytes": data}]},
    ]
    several = [prompts(seeing, tmp_path / "rows.parquet", [text | form])[0] for form in forms]
    several += [prompts(seeing, tmp_path / "rows.jsonl", [text | form])[0] for form in ({"image": "a.png"}, {"images": "a.png"})]
    for one in several:
        assert one.tokens == several[0].tokens and [placed.image.read() for placed in one.images] == [data]
        assert not any(isinstance(value, dict | bytes) for value in one.meta.values())
    [container] = prompts(seeing, tmp_path / "rows.jsonl", [{"prompt": "what?", "answer": "1", "image": "docker.io/a/b:latest"}])
    assert not container.images and container.meta == {"image": "docker.io/a/b:latest"}
    for columns, message in (
        ({"image": {"bytes": data}, "prompt": "what?"}, r"the column 'image' has 1 images that no part stands for$"),
        ({"image": "a.png", "prompt": "<image><image>"}, r"message 0: part 3: names no image, and the column 'image' has no more$"),
        ({"videos": ["a.mp4"]}, r"its column 'videos' is not taken: texts and images are read$"),
    ):
        with pytest.raises(ConfigError, match=rf"rows\.\w+:1: {message}"):
            prompts(seeing, tmp_path / ("rows.parquet" if "bytes" in str(columns) else "rows.jsonl"), [text | columns])


def test_images_that_a_model_is_not_shown_are_named(seeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "megarl: data.train: columns of images, videos or sounds that the model is not shown: "
    row: dict[str, Any] = {"prompt": "what?", "answer": "1"}
    prompts(seeing, tmp_path / "rows.jsonl", [row | {"images": ["a.png"], "videos": ["b"], "image": "alpine"}], sees=False)
    assert capsys.readouterr().err == f"{line}images, videos\n"
    prompts(seeing, tmp_path / "rows.jsonl", [row | {"image": "a.png", "images": []}])
    assert capsys.readouterr().err == f"{line}image\n"
    prompts(seeing, tmp_path / "rows.jsonl", [row | {"image": "alpine", "images": []}])
    assert not capsys.readouterr().err


TOOL = {"type": "function", "function": {"name": "f", "description": f"a{MARK}", "parameters": {}}}
MARKED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "reasoning": ({}, {"reasoning_content": f"a{MARK}"}, "message 1: it has U\\+FDD0"),
    "call": ({}, {"tool_calls": [{"function": {"name": "f", "arguments": {f"{MARK}": 1}}}]}, "message 1: it has U\\+FDD0"),
    "tools": ({"tools": [TOOL]}, {}, "data.system, the tools or the template's arguments have U\\+FDD0"),
    "tools_as_json": ({"tools": json.dumps([TOOL])}, {}, "data.system, the tools or the template's arguments have U\\+FDD0"),
}


@pytest.mark.parametrize("name", MARKED)
def test_what_stands_for_images_is_refused_in_all_that_a_template_reads(seeing: Path, tmp_path: Path, name: str) -> None:
    """It would be taken for the first image, and a part of the text would be lost."""
    columns, more, message = MARKED[name]
    (tmp_path / "a.png").write_bytes(picture(np.random.default_rng(1)))
    chat = [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b", **more}]
    (file := tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat, "images": ["a.png"], **columns}))
    source, reader = ConversationSource(type="conversations", path=file), ImageReader(ImageProcessor(seeing), PAD, 400, "sft.max_tokens")
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:1: {message}, which stands for images here$"):
        load_conversations(source, load_tokenizer(seeing), SftData(train=source), 400, "data.train", reader)


@pytest.mark.parametrize(("least", "most"), [(None, None), (None, 300), (256, 256), (4096, 4096), (1000, 1200)])
def test_no_image_has_more_tokens_than_the_engine_is_told(seeing: Path, least: int | None, most: int | None) -> None:
    """Narrow ones have more tokens than pixels of `max_pixels` make: 1 x 200 is one token high."""
    processor = ImageProcessor(seeing, least, most)
    sizes = [(1, 1), (1, 200), (200, 1), (3, 599), (1, 150), (2, 90), (10, 10), (37, 61), (64, 65), (100, 3000), (11, 500), (5, 990)]
    tokens = [processor.read(saved(Pillow.new("RGB", size)), ImageSource("")).tokens for size in sizes]
    assert max(tokens) <= processor.most_tokens and min(tokens) >= 1
    if least is None:
        assert max(tokens) > processor.cut["max_pixels"] // 64
    with pytest.raises(BadImage, match="absolute aspect ratio must be smaller than 200"):
        processor.read(saved(Pillow.new("RGB", (1, 10_000))), ImageSource(""))


def test_an_answer_with_what_stands_for_images_is_refused_by_its_row(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(np.random.default_rng(1)))
    answer = [{"role": "assistant", "content": "a"}, {"role": "user", "content": MARK}, {"role": "assistant", "content": "b"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>a", "images": ["a.png"], "answer": answer}))
    source = FileSource(type="file", path=tmp_path / "rows.jsonl", answer_key="answer")
    reader = ImageReader(ImageProcessor(seeing), PAD, 400, "sft.max_tokens")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: the response has U\+FDD0, which stands for images here$"):
        load_answers(source, load_tokenizer(seeing), SftData(train=source), 400, "data.train", reader)
