"""Images of conversations: read, placed among the tokens as transformers' processor does, and refused by name where they are bad."""

import base64
import io
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image as Pillow
from pyarrow import parquet

from megarl import image_source
from megarl.config import ConfigError, ConversationSource, FileSource, PreferenceData, PreferenceSource, SftData
from megarl.data import large
from megarl.data.conversations import Conversation
from megarl.data.images import ImageReader
from megarl.data.preferences import load_preferences
from megarl.data.shown import row_lines
from megarl.data.supervised import LIMIT_KEY, load_answers, load_conversations
from megarl.data.tokenizer import load_tokenizer
from megarl.image_source import MOST_BYTES, ImageGone
from megarl.images import MARK, axes_of
from megarl.models.description import ModelDescription
from megarl.models.image_processor import MOST_PIXELS, ImageProcessor
from tests.image_samples import END, PAD, START, image_of, picture


def load(
    path: Path, folder: Path, rows: list[dict[str, Any]], most: int = 400, root: Path | None = None, **data: Any
) -> list[Conversation]:
    """The conversations of rows in a JSONL file of the folder."""
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_file(path, file, most, root, **data)


def load_file(path: Path, file: Path, most: int = 400, root: Path | None = None, **data: Any) -> list[Conversation]:
    source = ConversationSource(type="conversations", path=file, image_folder=root)
    vision = ModelDescription.read(path).sizes.vision
    assert vision is not None
    reader = ImageReader(ImageProcessor(path), vision.image_token, most, LIMIT_KEY)
    return load_conversations(source, load_tokenizer(path), SftData(train=source, **data), most, "data.train", reader)


def asked(*parts: Any, answer: str = "two", **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], **more}


def test_images_are_where_the_template_has_them_and_no_image_token_is_learned(seeing: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    files = [picture(rng), picture(rng, "JPEG"), picture(rng, "WEBP")]
    for number, data in enumerate(files):
        (tmp_path / f"{number}.img").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(files[2]).decode()
    image = {"type": "image", "image": "0.img"}
    row = asked("see ", image, {"type": "image"}, " and ", {"type": "image_url", "image_url": {"url": url}}, "?", images=["1.img"])
    turns = [*row["messages"], {"role": "user", "content": [image, "again"]}, {"role": "assistant", "content": "yes"}]
    turns[2]["content"][1] = {"type": "text", "text": "again"}
    one, text = load(seeing, tmp_path, [{**row, "messages": turns}, asked("no image at all")])
    assert text.images == () or text.images == []
    assert [placed.image.read() for placed in one.images] == [*files, files[0]]
    for placed in one.images:
        assert (one.tokens[placed.start : placed.end] == PAD).all()
        assert one.tokens[placed.start - 1] == START and one.tokens[placed.end] == END
    learned = one.tokens[one.prompt_length :][one.loss_mask]
    assert load_tokenizer(seeing).decode(learned) == "two<|end|>yes<|end|>" and MARK not in load_tokenizer(seeing).decode(one.tokens)


def test_a_content_that_is_a_text_has_its_images_where_verl_writes_them(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(picture(np.random.default_rng(1)))
    (tmp_path / "b").write_bytes(picture(np.random.default_rng(2)))
    texts: dict[str, Any] = {
        "messages": [{"role": "user", "content": "<image>x<image> y"}, {"role": "assistant", "content": "z"}],
        "images": ["a", "b"],
    }
    parts = asked({"type": "image", "image": "a"}, "x", {"type": "image", "image": "b"}, " y", answer="z")
    one, other, bare = load(seeing, tmp_path, [texts, parts, {**texts, "images": None}])
    assert np.array_equal(one.tokens, other.tokens) and one.images == other.images and not bare.images
    for images, message in (
        (["a"], "names no image, and the column 'images' has no more"),
        (["a"] * 3, "has 1 images that no part stands"),
    ):
        with pytest.raises(ConfigError, match=rf"train\.jsonl:1: [^\n]*{message}"):
            load(seeing, tmp_path, [{**texts, "images": images}])
    later = [*texts["messages"], {"role": "user", "content": "<image> again"}, {"role": "assistant", "content": "an <image>"}]
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: message 2: part 1: names no image, and the column 'images' has no more$"):
        load(seeing, tmp_path, [{**texts, "messages": later}])
    assert len(load(seeing, tmp_path, [{**texts, "messages": later}, texts], on_bad_row="drop")) == 1


def test_positions_and_patches_are_those_of_transformers(seeing: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    rng = np.random.default_rng(2)
    data = [picture(rng) for _ in range(3)]
    for number, file in enumerate(data):
        (tmp_path / str(number)).write_bytes(file)
    images = [{"type": "image", "image": str(number)} for number in range(3)]
    [one] = load(seeing, tmp_path, [asked("a", images[0], images[1], "b c", images[2])])
    tokens = torch.from_numpy(one.tokens[None].astype(np.int64))
    grids = torch.tensor([placed.image.grid for placed in one.images])
    theirs, _ = AutoModelForImageTextToText.from_pretrained(seeing).model.get_rope_index(tokens, (tokens == PAD).int(), grids)
    assert np.array_equal(axes_of(len(one.tokens), one.images), theirs[:, 0].numpy())
    assert np.array_equal(axes_of(40, one.images), theirs[:, 0, :40].numpy())
    processor = ImageProcessor(seeing)
    assert processor.pixels(one.images[0].image) is processor.pixels(one.images[0].image)


def bomb(side: int = 100_000) -> bytes:
    """A PNG of a kilobyte with so many pixels a side."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1 << 20), 9)) + chunk(b"IEND", b"")


def narrow() -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", (4000, 4)).save(file, "PNG")
    return file.getvalue()


BAD: dict[str, tuple[bytes | str, str]] = {
    "truncated": (picture(np.random.default_rng(3))[:900], "damaged: "),
    "truncated_jpeg": (picture(np.random.default_rng(3), "JPEG")[:600], "damaged: "),
    "bomb": (bomb(), f"more than {MOST_PIXELS} pixels"),
    "less_of_a_bomb": (bomb(9000), f"more than {MOST_PIXELS} pixels"),
    "narrow": (narrow(), "absolute aspect ratio must be smaller than 200"),
    "text": (b"no image", "no image in one of the formats PNG, JPEG"),
    "empty": (b"", "no image in one of the formats"),
    "large": (b"\x89PNG" + bytes(MOST_BYTES), f"bytes, more than {MOST_BYTES}"),
    "absent": ("nowhere.png", "no such file: "),
    "address": ("https://example.com/a.png", "is an address, and nothing is fetched"),
    "base64": ("data:image/png;base64,%%%", "not base64: "),
    "no_ascii": ("data:image/png;base64,\u00e9", "not base64: "),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image in one of the formats"),
    "null": ("a\0b", "no such file|embedded null"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_refuses_its_row_by_name_or_is_left_out(
    seeing: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, message = BAD[name]
    (tmp_path / "good").write_bytes(picture(np.random.default_rng(4)))
    if isinstance(data, bytes):
        (tmp_path / "bad").write_bytes(data)
    good, bad = asked({"type": "image", "image": "good"}), asked({"type": "image", "image": "bad" if isinstance(data, bytes) else data})
    with pytest.raises(ConfigError, match=rf"train\.jsonl:2: message 0: part 0: the image is refused: [^\n]*({message})[^\n]*$"):
        load(seeing, tmp_path, [good, bad])
    assert len(load(seeing, tmp_path, [good, bad, good], on_bad_row="drop")) == 2
    assert "1 bad row is left out" in capsys.readouterr().err


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no_more": (asked({"type": "image"}), "names no image, and the column 'images' has no more"),
    "unused": (asked("a", images=["good"]), "the column 'images' has 1 images that no part stands for"),
    "video": (asked({"type": "video", "video": "good"}), "must be a text or an image, with its type"),
    "resized": (asked({"type": "image", "image": "good", "max_pixels": 9}), "a part of type 'image' has max_pixels, which is not taken"),
    "mark": (asked(f"a{MARK}"), "must be a text or an image"),
    "token": (asked("<|image_pad|>", {"type": "image", "image": "good"}), "has the control token '<|image_pad|>'"),
    "said": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image", "image": "good"}]}]},
        "images of the assistant are not learned",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_part_that_is_not_taken_is_named(seeing: Path, tmp_path: Path, name: str) -> None:
    row, message = ROWS[name]
    (tmp_path / "good").write_bytes(picture(np.random.default_rng(4)))
    with pytest.raises(ConfigError, match=rf"^[^\n]*train\.jsonl:1: [^\n]*{message}"):
        load(seeing, tmp_path, [row], control_tokens="refuse")


def test_image_tokens_that_are_not_an_image_s_are_refused(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(picture(np.random.default_rng(4)))
    row = asked("<|image_pad|>", {"type": "image", "image": "good"})
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: \d+ image tokens, and its 1 images have \d+$"):
        load(seeing, tmp_path, [row], control_tokens="allow")


def test_images_that_alone_are_too_long_are_not_all_read(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(picture(np.random.default_rng(4)))
    image = {"type": "image", "image": "good"}
    many = asked(*[image] * 20, *[{"type": "image", "image": "never read"}] * 10_000)
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: \d+ images have \d+ tokens, more than sft\.max_tokens=60$"):
        load(seeing, tmp_path, [many], most=60)
    assert len(load(seeing, tmp_path, [many, asked(image)], most=80, overlong="drop")) == 1


def test_limits_of_pixels_change_the_number_of_tokens_and_not_what_is_cut(seeing: Path, tmp_path: Path) -> None:
    data = picture(np.random.default_rng(5))
    small, large = ImageProcessor(seeing, most=300), ImageProcessor(seeing, least=3000)
    one, two = (image_of(processor, data, tmp_path) for processor in (small, large))
    assert one.digest == two.digest and one.tokens < two.tokens
    assert len(small.pixels(one)) == 4 * one.tokens and len(large.pixels(two)) == 4 * two.tokens
    with pytest.raises(ValueError, match=r"^image [0-9a-f]{12}: cut into \(1, \d+, \d+\) patches here, and counted as"):
        small.pixels(two)
    with pytest.raises(ConfigError, match=r"^model\.min_pixels=5000: more than model\.max_pixels=4096$"):
        image_of(ImageProcessor(seeing, least=5000), data, tmp_path)


def test_an_image_outside_its_folder_is_refused(seeing: Path, tmp_path: Path) -> None:
    """However a row names it: by a link, a path that leads up, or from the root."""
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(picture(np.random.default_rng(4)))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    (folder / "round").symlink_to(folder / "round")
    for name in ("link.png", "up/secret.png", "../secret.png", str(tmp_path / "secret.png")):
        with pytest.raises(ConfigError, match=r"train\.jsonl:1: [^\n]* leads out of [^\n]*; the source's image_folder may be another$"):
            load(seeing, folder, [asked({"type": "image", "image": name})])
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: message 0: part 0: the image is refused: "):
        load(seeing, folder, [asked({"type": "image", "image": "round"})])
    names = ["secret.png", "data/link.png", "data/../data/up/secret.png"]
    assert len(load(seeing, folder, [asked({"type": "image", "image": name}) for name in names], root=tmp_path)) == 3


def test_images_travel_as_references_to_wherever_their_bytes_are(seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, data URLs of JSONL, and bytes in Parquet of several groups of rows and in what `datasets` writes."""
    rng = np.random.default_rng(6)
    files = [picture(rng) for _ in range(70)]
    urls = ["data:image/png;base64," + base64.b64encode(data).decode() for data in files]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(asked({"type": "image_url", "image_url": {"url": url}})) for url in urls))
    answer = {"role": "assistant", "content": "two"}
    asking = [{"role": "user", "content": "a <image>?"}, answer]
    rows = [{"messages": asking, "images": [{"bytes": data, "path": "a.png"}]} for data in files]
    parquet.write_table(table := pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet", row_group_size=30)
    (saved := tmp_path / "saved").mkdir()
    parts = [table.slice(0, 50), table.slice(50)]
    for number, part in enumerate(parts):
        with pyarrow.OSFile(str(saved / f"{number}.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, part.schema) as stream:
            stream.write_table(part, max_chunksize=20)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"{number}.arrow"} for number in range(2)]}))
    for file in (tmp_path / "train.jsonl", tmp_path / "train.parquet", saved):
        references = [one.images[0].image for one in load_file(seeing, file)]
        assert len(pickle.dumps(references)) < 400 * len(files)
        monkeypatch.setattr(image_source, "_cache", image_source._Cache())
        assert [reference.read() for reference in references] == files


def test_an_image_that_has_changed_since_it_was_drawn_is_not_taken(seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    one, other = picture(rng), picture(rng)
    (tmp_path / "a.png").write_bytes(one)
    (tmp_path / "train.jsonl").touch()
    url = {"type": "image", "image": "data:image/png;base64," + base64.b64encode(one).decode()}
    [[named], [inline]] = [
        [placed.image for placed in row.images] for row in load(seeing, tmp_path, [asked({"type": "image", "image": "a.png"}), asked(url)])
    ]
    cases = {"has changed since": lambda: (tmp_path / "a.png").write_bytes(other), "cannot be read": lambda: (tmp_path / "a.png").unlink()}
    for message, change in cases.items():
        change()
        monkeypatch.setattr(image_source, "_cache", image_source._Cache())
        with pytest.raises(ImageGone, match=rf"^image [0-9a-f]{{12}}: [^\n]*a\.png {message}[^\n]*$"):
            named.read()
    assert inline.read() == one
    for rows, message in (([asked("none")] * 2, "has changed since"), ([asked("none")], "cannot be read")):
        (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
        monkeypatch.setattr(image_source, "_cache", image_source._Cache())
        with pytest.raises(ImageGone, match=rf"train\.jsonl:2 {message}"):
            inline.read()


def test_a_process_keeps_the_last_images_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_source, "CACHED_BYTES", 1000)
    cache = image_source._Cache()
    for number in range(100):
        cache.put(str(number), bytes(300))
    assert [number for number in range(100) if cache.get(str(number)) is not None] == [97, 98, 99]
    cache.put("large", bytes(2000))
    assert cache.get("large") is None and cache.get("99") is None


def test_pairs_and_answers_see_images(seeing: Path, tmp_path: Path) -> None:
    """Pairs whose prompt is apart or in both sides, and prompts with answers, have the images of the same conversations."""
    (tmp_path / "a").write_bytes(picture(np.random.default_rng(1)))
    tokenizer, reader = load_tokenizer(seeing), ImageReader(ImageProcessor(seeing), PAD, 400, "limit")
    question = [{"role": "user", "content": [{"type": "image", "image": "a"}, {"type": "text", "text": "which?"}]}]
    sides = [[*question, {"role": "assistant", "content": word}] for word in ("good", "bad")]
    rows = [
        {"prompt": question, "chosen": "good", "rejected": "bad"},
        {"prompt": "<image>which?", "images": ["a"], "chosen": "good", "rejected": "bad"},
        {"chosen": sides[0], "rejected": sides[1]},
    ]
    (file := tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = PreferenceSource(path=file)
    pairs = load_preferences(source, tokenizer, PreferenceData(train=source, eval=source), 400, "data.train", "limit", reader=reader)
    answer = {"prompt": question, "reward_model": {"ground_truth": "good"}}
    (file := tmp_path / "answers.jsonl").write_text(json.dumps(answer))
    prompts = FileSource(path=file)
    [answered] = load_answers(prompts, tokenizer, SftData(train=prompts), 400, "data.train", reader)
    [learned] = load(seeing, tmp_path, [{"messages": sides[0]}])
    lines = [line for _, line in row_lines(tokenizer, [learned])]
    assert sum(f"<|image_pad|> x {learned.images[0].image.tokens}<|vision_end|>which?" in line for line in lines) == 1
    for pair in pairs:
        assert np.array_equal(pair.chosen.tokens, learned.tokens) and pair.chosen.images == pair.rejected.images == learned.images
        assert not np.array_equal(pair.rejected.tokens, learned.tokens)
    assert np.array_equal(answered.tokens, learned.tokens) and answered.images == learned.images and len(learned.images) == 1
    (tmp_path / "b").write_bytes(picture(np.random.default_rng(2)))
    other = json.loads(json.dumps(sides[1]).replace('"a"', '"b"'))
    source.path.write_text(json.dumps({"chosen": sides[0], "rejected": other}))
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:1: chosen and rejected answer different prompts"):
        load_preferences(source, tokenizer, PreferenceData(train=source, eval=source), 400, "data.train", "limit", reader=reader)
    with pytest.raises(ConfigError, match=r"^data\.train\.image_folder=\S+: the model sees no images, or reads none of this source$"):
        apart = PreferenceSource(path=file, image_folder=tmp_path)
        load_preferences(apart, tokenizer, PreferenceData(train=apart, eval=apart), 400, "data.train", "limit")


def test_parquet_with_the_bytes_of_images_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "LARGE", 2)
    rows = [{"prompt": "<image>", "images": [{"bytes": b"a", "path": None}]}] * 3
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = FileSource(path=tmp_path / "a.parquet")
    assert large.large_table(source, "data.train", images=True) is None
    table = large.large_table(source, "data.train")
    assert table is not None and table.num_rows == 3
