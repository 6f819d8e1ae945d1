"""A server on a free port of this machine, in a thread, for tests; and the digits as files that a person would hand over."""

import io
import threading
import time
from contextlib import contextmanager

import httpx

from geodl.serve.app import bind, create_app, server_of

TOKEN = "a-token-for-the-tests-alone"
QUICK = {"epochs": 2, "threads": 1}
ENDED = ("done", "cancelled", "failed")


class Client(httpx.Client):
    """An HTTP client that knows the token, teaches and waits."""

    def __init__(self, url, token=TOKEN):
        super().__init__(base_url=url, timeout=60, headers={"Authorization": f"Bearer {token}"} if token else {})
        self.url = url

    def predict(self, *contents, **query):
        files = [("images", (f"{i}.png", content)) for i, content in enumerate(contents)]
        return self.post("/api/v1/predict", files=files, params=query)

    def learn(self, images):
        """Hand over {class: [contents]}."""
        pairs = [(label, content) for label, contents in images.items() for content in contents]
        files = [("images", (f"{i}.png", content)) for i, (_, content) in enumerate(pairs)]
        return self.post("/api/v1/learn", data={"labels": [label for label, _ in pairs]}, files=files)

    def job(self, key):
        return self.get(f"/api/v1/jobs/{key}").json()

    def ended(self, answer, seconds=60):
        assert answer.status_code == 202, answer.text
        return self.until(lambda: (job := self.job(answer.json()["id"]))["state"] in ENDED and job, seconds)

    def until(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.02)
        raise AssertionError("it did not come to that")

    def names(self):
        return [each["name"] for each in self.get("/api/v1/classes").json()]


@contextmanager
def running(model, **how):
    """Serve a model; yield the address."""
    app = create_app(model, token=TOKEN, **({"options": QUICK} | how))
    server, listening = server_of(app), bind("127.0.0.1")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        assert not thread.is_alive()


def pictures(digits, label, some=slice(12)):
    """Return digits as PNG files."""
    rows = (digits.train.labels == label).nonzero().flatten()[some].tolist()
    return [encoded(digits.train.decode(i)) for i in rows]


def encoded(image, form="PNG"):
    buffer = io.BytesIO()
    image.save(buffer, format=form)
    return buffer.getvalue()
