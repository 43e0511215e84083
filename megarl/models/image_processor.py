"""Images cut into patches by the model's own processor, the same for ranks, engines and the counting of tokens."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError
from megarl.image_source import BadImage, ImageSource
from megarl.images import Image
from megarl.lazy_torch import Tensor, torch
from megarl.text.display import one_line

if TYPE_CHECKING:
    import PIL.Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MOST_PIXELS = 1 << 26  # of a file before it is resized: 8192 x 8192
NARROWEST = 200  # how many times as long as wide an image may be: of transformers' smart_resize
KEPT_BYTES = 1 << 28  # of patches that are kept for further passes
KEPT_SIZES = 1 << 16  # files that are not decoded again where they are checked again


class ImageProcessor:
    """The processor of a model's directory.

    Args:
        path: the directory.
        least: `model.min_pixels`; None: the processor's own.
        most: `model.max_pixels`; None: the processor's own.
    """

    def __init__(self, path: Path, least: int | None = None, most: int | None = None) -> None:
        self._path, self._least, self._most = path, least, most
        self._sizes = OrderedDict[str, tuple[int, int]]()  # of files that were decoded, by their SHA-256
        self._kept: OrderedDict[tuple[str, tuple[int, int, int]], Tensor] = OrderedDict()

    @cached_property
    def inner(self) -> Any:
        """transformers' processor, which takes seconds to import and is needed for images alone.

        Raises ConfigError if the directory has none, or the limits contradict each other.
        """
        from transformers import AutoImageProcessor

        try:
            inner = AutoImageProcessor.from_pretrained(self._path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = one_line(str(error), 200)
            raise ConfigError(f"model.path: {self._path} has no image processor that transformers can load: {reason}") from None
        least, most = self._least or inner.size["shortest_edge"], self._most or inner.size["longest_edge"]
        if least > most:
            raise ConfigError(f"model.min_pixels={least}: more than model.max_pixels={most}")
        inner.size["shortest_edge"], inner.size["longest_edge"] = least, most
        return inner

    @property
    def cut(self) -> dict[str, int]:
        """The numbers that determine how an image is cut."""
        inner = self.inner
        sizes = {"patch_size": inner.patch_size, "merge_size": inner.merge_size, "temporal_patch_size": inner.temporal_patch_size}
        return {**sizes, "min_pixels": inner.size["shortest_edge"], "max_pixels": inner.size["longest_edge"]}

    @property
    def most_tokens(self) -> int:
        """The most tokens of an image: its pixels', or more of one that is narrow, or enlarged, since sides are whole tokens."""
        side = self.inner.patch_size * self.inner.merge_size
        least, most = (float(self.inner.size[edge]) ** 0.5 / side for edge in ("shortest_edge", "longest_edge"))
        enlarged = (least * NARROWEST**0.5 + 1) * (least / NARROWEST**0.5 + 1)
        return int(max(most**2, most * NARROWEST**0.5, enlarged) + 1e-9)

    def read(self, data: bytes, source: ImageSource) -> Image:
        """Check a file and count its patches.

        Args:
            data: its bytes.
            source: where they are.

        Raises:
            BadImage: it is no image of a known format, damaged, too large or too narrow.
        """
        inner, digest = self.inner, hashlib.sha256(data).hexdigest()
        width, height = self._sizes[digest] = self._sizes.get(digest) or opened(data).size
        if len(self._sizes) > KEPT_SIZES:
            self._sizes.popitem(last=False)  # in one operation: several threads read
        try:
            patches = inner.get_number_of_image_patches(height, width, {})
            rows, columns = self._grid(height, width)
        except ValueError as error:  # of smart_resize
            raise BadImage(one_line(str(error), 200)) from None
        assert rows * columns == patches, f"{rows} x {columns} patches, and the processor has {patches}"
        return Image(digest, (width, height), (1, rows, columns), inner.merge_size, source)

    def pixels(self, image: Image) -> Tensor:
        """Return the patches of an image, float32 [P, channels * frames * patch * patch]."""
        key = image.digest, image.grid
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        cut = self.inner(images=[opened(image.read())], return_tensors="pt")
        grid = tuple(cut["image_grid_thw"][0].tolist())
        if grid != image.grid:
            raise ValueError(f"image {image.digest[:12]}: cut into {grid} patches here, and counted as {image.grid}")
        self._kept[key] = patches = cut["pixel_values"].to(torch.float32)
        while sum(one.nbytes for one in self._kept.values()) > KEPT_BYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return patches

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        inner, size = self.inner, self.inner.size
        factor = inner.patch_size * inner.merge_size
        rows, columns = smart_resize(height, width, factor, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])
        return rows // inner.patch_size, columns // inner.patch_size


def opened(data: bytes) -> PIL.Image.Image:
    """Decode an image: upright, in RGB, what is transparent over white, of several frames the first.

    Raises:
        BadImage: it is no image of a known format, damaged, or too large.
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    try:
        picture = Pillow.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size  # of the header
        if width * height > MOST_PIXELS:
            raise BadImage(f"more than {MOST_PIXELS} pixels")
        picture.load()
        return _in_rgb(ImageOps.exif_transpose(picture))
    except BadImage:
        raise
    except Pillow.DecompressionBombError:
        raise BadImage(f"more than {MOST_PIXELS} pixels") from None
    except Pillow.UnidentifiedImageError:
        raise BadImage(f"no image in one of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's plug-ins raise all kinds for damaged files
        raise BadImage(f"damaged: {one_line(str(error), 120) or type(error).__name__}") from None


def mime(data: bytes) -> str:
    """Return the media type of a file that `opened` decodes."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
        return "image/jpeg" if picture.format == "MPO" else Pillow.MIME[picture.format or ""]  # of telephones: JPEG, with more pictures


def _in_rgb(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Return a picture in RGB, over white as in vLLM and in Qwen's own utilities; `convert` shows the colour that transparency hides."""
    from PIL import Image as Pillow

    if picture.mode.startswith("I"):  # 16 bits, which `convert` cuts off at 255
        return picture.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    return Pillow.alpha_composite(Pillow.new("RGBA", picture.size, "white"), picture.convert("RGBA")).convert("RGB")
