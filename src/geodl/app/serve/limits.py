"""Limits for clients: sizes, times, and shares of concurrent work."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

BUSY = "the server is busy; try again in a moment"
BACKLOG = 32
"""Connections that are accepted at once, before any of them can be closed."""
Pair = tuple[float, float]
"""A limit for clients with the token, and one for all others: neither group can use up the other's share."""


class Refused(Exception):  # noqa: N818  # a response, not a fault
    """A request that is refused with an HTTP status and one plain sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Limits of a server: sizes in bytes, times in seconds.

    predict_body, learn_body:     size of one request with images.
    other_body:                   size of any other request; it is read before the token is checked.
    predict_images, learn_images: images in one request.
    megapixels:                   in one request to predict; a JPEG counts an eighth, as it is decoded at reduced size.
    header_seconds:               for the header of a request.
    idle_seconds:                 until the client sends the next bytes of a request, or reads those of a response.
    upload_seconds:               for a whole request.
    answer_seconds:               for predicting one request, or for writing an ONNX file or a report.
    connections:                  open at once; fewer if the system allows few open files.
    requests, streams, uploads:   requests, event streams and requests to learn at once.
    decoding:                     megapixels that are decoded at once.
    jobs:                         jobs in the queue.
    tray_bytes, tray_seconds:     size of the images collected for teaching, and how long each is kept.
    """

    predict_body: int = 64_000_000
    learn_body: int = 1_000_000_000
    other_body: int = 64_000
    predict_images: int = 100
    learn_images: int = 10_000
    megapixels: float = 250
    header_seconds: float = 10
    idle_seconds: float = 30
    upload_seconds: float = 600
    answer_seconds: float = 300
    connections: int = 512
    requests: Pair = (512, 64)
    streams: Pair = (64, 32)
    decoding: Pair = (1000, 250)
    uploads: Pair = (4, 4)
    jobs: int = 8
    tray_bytes: int = 1_000_000_000
    tray_seconds: float = 86_400

    @property
    def open_connections(self) -> int:
        """The number of connections that may be open: each may need a second file for its upload.

        The remaining files are for the program itself, and for two rounds of accepted connections: those that are closed
        are still open when the next round is accepted.
        """
        if resource is None:
            return self.connections
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return min(self.connections, max(16, (files - 64 - 2 * BACKLOG) // 2))


class Share:
    """Counts concurrent work and refuses more than the limit; used only in the event loop."""

    def __init__(self, most: Pair, sentence: str) -> None:
        self.most = dict(zip((True, False), most, strict=True))
        self.now = {True: 0.0, False: 0.0}
        self.sentence = sentence

    @contextmanager
    def one(self, trusted: bool, weight: float = 1) -> Iterator[None]:
        """Count a piece of work of this weight while the block runs."""
        if self.now[trusted] + weight > self.most[trusted]:
            raise Refused(429, self.sentence)
        self.now[trusted] += weight
        try:
            yield
        finally:
            self.now[trusted] -= weight
