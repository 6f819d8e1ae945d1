"""What HTML pages about runs and about models share: a frame that needs no network, its style and script, thumbnails.

Python prepares plain data, templates show it: they escape all that comes from a run or a model, and write characters that
would act instead of being shown as their escapes.
"""

import base64
import hashlib
import io
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from geodl import __version__
from geodl.core.text import count, printable


@cache
def templates(package: str) -> Environment:
    """Return the templates of a package, with the shared ones."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("geodl.model.page")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.filters["count"] = count
    script = environment.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {"version": __version__, "script": script, "digest": digest}
    return environment


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def thumbnail(image: Image.Image, most: int) -> Image.Image:
    """Return the middle square, made small where it has more than `most` pixels a side."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return square.resize((most, most), Image.Resampling.LANCZOS) if side > most else square


def webp(image: Image.Image) -> str:
    """Return a picture as WebP in base 64."""
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", lossless=image.height <= 16, quality=82)
    return base64.b64encode(buffer.getvalue()).decode()
