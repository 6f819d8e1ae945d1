"""Uploads: the images of a request, in memory if it is small, else in files 0, 1, ... of a folder, one open at a time."""

import asyncio
import io
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from geodl.app.serve.limits import Refused
from geodl.core.text import printable
from geodl.data.names import LONGEST, typed_name

if TYPE_CHECKING:
    from geodl.app.serve.server import Server

NEEDED = "images are needed, as multipart/form-data with files in fields named `images`"
SMALL = 1 << 20
"""Bytes of a request that is kept in memory, or parsed in the event loop; the rest is parsed in another thread."""
OTHER_PARTS = 16
"""Parts of a request that are neither images nor labels, at most."""
Work = Callable[..., Awaitable[Any]]
_CALLBACKS = ["_header_field", "_header_value", "_header_end"]
_CALLBACKS += ["_headers_finished", "_part_data", "_part_end"]


class Upload:
    """The images and labels of one request.

    folder: where the images are written; None: they stay in memory. names: only shown to people, never used as paths.
    """

    def __init__(self, folder: Path | None, most: int) -> None:
        self.folder, self.most, self.kept, self.size = folder, most, False, 0
        self.images: list[Path | bytes] = []
        self.names: list[str] = []
        self.labels: list[str] = []
        self._parts = 0
        self._header = self._value = b""  # of the part that is being read
        self._about: dict[bytes, bytes] = {}
        self._label = bytearray()
        self._file: BinaryIO | None = None

    async def receive(self, request: Request, work: Work) -> None:
        """Read a whole request; work: calls a function in another thread."""
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data":
            raise Refused(422, NEEDED)
        callbacks: Any = {f"on{name}": getattr(self, name) for name in _CALLBACKS}
        try:
            parser = MultipartParser(options.get(b"boundary", b""), callbacks)
            async for chunk in request.stream():
                self.size += len(chunk)
                if self.size > SMALL:
                    await work(parser.write, chunk)
                else:
                    parser.write(chunk)
            parser.finalize()
        except FormParserError as error:
            raise Refused(400, f"not a complete multipart request: {error}") from None
        except OSError as error:
            raise Refused(503, f"the upload cannot be stored: {error.strerror}") from None
        finally:
            self._part_end()
        if not self.images:
            raise Refused(422, NEEDED)

    @property
    def files(self) -> list[Path]:
        """The images that are files."""
        return [image for image in self.images if isinstance(image, Path)]

    def remove(self) -> None:
        """Delete the files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def classes(self) -> list[str]:
        """Return the class of each image."""
        labels = [typed_name(label) for label in self.labels]
        if len(labels) != len(self.names):
            raise Refused(422, f"{len(self.names)} images have {len(labels)} labels: one each")
        return labels

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._about = parse_options_header(self._value)[1]
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        self._parts += 1  # even empty parts take time
        if self._parts > 2 * self.most + OTHER_PARTS:
            raise Refused(413, f"more parts in one request than {self.most} images have")
        if self._about.get(b"name") == b"images":
            if b"filename" not in self._about:
                raise Refused(422, NEEDED)
            if len(self.names) == self.most:
                raise Refused(413, f"more than {self.most} images in one request")
            name = self._about[b"filename"].decode(errors="replace").replace("\\", "/")
            short = printable(name.rpartition("/")[2])[:200]
            self.names.append(short or f"image {len(self.names)}")
            if self.folder is None:
                self._file = io.BytesIO()
            else:
                path = self.folder / str(len(self.images))
                self.images.append(path)
                self._file = path.open("xb")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._file.write(data[start:end])
        elif len(self._label) <= 4 * LONGEST:  # more is too long for a name anyway
            self._label += data[start:end]

    def _part_end(self) -> None:
        if isinstance(self._file, io.BytesIO):
            self.images.append(self._file.getvalue())
        elif self._file is not None:
            self._file.close()
        elif self._about.get(b"name") == b"labels" and len(self.labels) <= self.most:
            self.labels.append(self._label.decode(errors="surrogateescape"))
        self._file, self._about, self._label = None, {}, bytearray()


@asynccontextmanager
async def received(
    request: Request, server: "Server", most: int, *, in_memory: bool = False
) -> AsyncIterator[Upload]:
    """Receive a request of at most `most` images; its folder is deleted at the end unless the upload is `kept`.

    in_memory: a small request is not written to files.
    """
    length = request.headers.get("content-length", "")
    small = in_memory and length.isdigit() and int(length) <= SMALL
    upload = Upload(None if small else server.folder / secrets.token_hex(8), most)
    seconds, work = server.limits.upload_seconds, partial(server.run, request.scope["trusted"])
    if upload.folder is not None:
        upload.folder.mkdir()
    try:
        try:
            async with asyncio.timeout(seconds):
                await upload.receive(request, work)
        except TimeoutError:
            raise Refused(408, f"the request did not arrive within {seconds:.0f} s") from None
        yield upload
    finally:
        if upload.folder is not None and not upload.kept:
            await asyncio.to_thread(upload.remove)
