"""Small pictures of images, for a page that needs no other file."""

import base64
import io

from megarl.image_source import BadImage, ImageGone
from megarl.models.image_processor import opened
from megarl.observe.samples import ImageRecord

SIDE = 96  # pixels
MAX_BYTES = 1 << 14  # of a thumbnail
MAX_THUMBNAILS = 256  # of a page: each is decoded from its source


class Thumbnails:
    """Makes the thumbnails of a page, each image's once, up to `MAX_THUMBNAILS`."""

    def __init__(self) -> None:
        self._made: dict[str, str | None] = {}

    def url(self, image: ImageRecord) -> str | None:
        """Return a data URL with a JPEG that was written here; None: there is none, since the source is gone or the page has many."""
        if image.digest not in self._made and len(self._made) < MAX_THUMBNAILS:
            self._made[image.digest] = _url(image)
        return self._made.get(image.digest)


def _url(image: ImageRecord) -> str | None:
    try:
        picture = opened(image.source.read(image.digest))
    except (BadImage, ImageGone):
        return None
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    data = file.getvalue()
    return None if len(data) > MAX_BYTES else f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
