"""Models on the Hugging Face hub: `push` uploads a model with its card; ``hf://USER/NAME`` is the path to load it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from geodl.core.errors import ConfigError, MissingExtraError, StoreError, install
from geodl.core.text import count, one_line
from geodl.learning.saving import load_model, model_directory, save_model
from geodl.model.memory import Memory
from geodl.model.model import Model
from geodl.store import Directory

if TYPE_CHECKING:
    from geodl.learning.learner import Learner

SCHEME = "hf://"
FILES = ("head.json", "head-copy.json", "objects/*", "README.md")
"""The files of a repository: no lock, no events."""
MANY = 200
"""The maximum number of classes that a model card lists."""


def push(
    model: "Learner | str | Path", repo: str, *, private: bool = True, with_images: bool = False
) -> str:
    """Upload a model and its model card to the Hugging Face hub; return the page's URL.

    ``Learner.load("hf://USER/NAME")`` loads it. The token comes from ``hf auth login`` or ``HF_TOKEN``.
    A closed-form model contains features of the images that it learned, even without the images.

    Args:
        model: a Learner, or the directory of a model.
        repo: ``USER/NAME``; created if it does not exist.
        private: whether a new repository is private.
        with_images: also upload the exemplars; without them, further learning has no images of the old
            classes.
    """
    hub, repo = _hub(), _repository(SCHEME + repo)[0]
    loaded = load_model(Directory(Path(model)).phase(-1)) if isinstance(model, str | Path) else None
    shared = _for_strangers(loaded or model.known, with_images)  # type: ignore[union-attr]
    with TemporaryDirectory() as folder:
        store = model_directory(Path(folder) / "model")
        config: dict[str, Any] = shared.record()["config"]
        config["imports"] = [Path(name).name for name in config.get("imports", ())]
        with store.lock():
            save_model(store, shared, action={"action": "push"}, notes={"config": config})
        (store.path / "README.md").write_text(card(shared, repo), encoding="utf-8")
        with _errors_of(repo):
            hub.create_repo(repo, private=private, exist_ok=True)
            hub.upload_folder(
                repo_id=repo,
                folder_path=store.path,
                allow_patterns=list(FILES),
                delete_patterns=["objects/*"],
                commit_message=f"{count(len(shared.classes), 'class')}",
            )
    return f"{hub.endpoint}/{repo}"


def fetched(path: str | Path) -> str | Path:
    """Return the local copy of a model on the hub, ``hf://USER/NAME[@REVISION]``; any other path unchanged."""
    if not str(path).startswith(SCHEME):
        return path
    repo, revision = _repository(str(path))
    hub = _hub()
    with _errors_of(repo):
        folder = hub.snapshot_download(repo, revision=revision, allow_patterns=list(FILES))
    return str(folder)


def card(model: Model, repo: str) -> str:
    """Return the model card."""
    names = [f"- {_escaped(name)}" for name in model.classes[:MANY]]
    if len(model.classes) > MANY:
        names.append(f"- and {len(model.classes) - MANY} more")
    rows = "\n".join(f"| {key} | {value} |" for key, value in _facts(model).items())
    return f"""---
library_name: geodl
pipeline_tag: image-classification
tags: [image-classification, class-incremental-learning, continual-learning]
---

# {repo.split("/")[-1]}

An image classifier that learned its classes step by step with geodl.

| | |
|---|---|
{rows}

```python
# {install("hub")}
import geodl

learner = geodl.Learner.load("{SCHEME}{repo}")
print(learner.predict(["photo.jpg"]).labels)
```

## Classes

{chr(10).join(names)}
"""


def _facts(model: Model) -> dict[str, str]:
    """Return the rows of the model card's table."""
    images = 0 if model.memory.images is None else len(model.memory.images)
    facts = {
        "classes": f"{len(model.classes)}, learned in {count(model.phases, 'step')}",
        "method": model.config.method,
        "network": model.config.network,
        "image size": f"{model.transform.size} x {model.transform.size}",
        "classifiers": ", ".join(model.classifiers),
        "images stored": f"{images}",
    }
    left_out = model.left_out()
    if left_out is not None:
        low, high = left_out.interval
        interval = f"95 % interval {low:.1f} to {high:.1f}"
        judged = f"{left_out.images} learned images, each judged without itself and its series"
        facts["accuracy"] = f"{left_out.accuracy:.1f} % ({interval}) on {judged}"
    return facts


def _escaped(name: str) -> str:
    """Escape a class name for Markdown."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", name)


def _for_strangers(model: Model, with_images: bool) -> Model:
    """Return the model without paths of this machine and, unless with_images, without images."""
    config = model.config.model_copy(update={"data_dir": None, "weights": None})
    memory = model.memory if with_images else Memory(store_images=model.memory.store_images)
    return replace(model, config=config, memory=memory)


def _repository(path: str) -> tuple[str, str | None]:
    """Split ``hf://USER/NAME[@REVISION]``."""
    parsed = re.fullmatch(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?", path)
    if not parsed:
        raise ConfigError(f"model = {path}: allowed values are hf://USER/NAME, hf://USER/NAME@TAG")
    return parsed[1], parsed[2]


def _hub() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingExtraError("hub", SCHEME) from None
    return HfApi(library_name="geodl")


@contextmanager
def _errors_of(repo: str) -> Iterator[None]:
    """Raise any of the hub's many errors as a StoreError of one line."""
    try:
        yield
    except Exception as error:
        raise StoreError(f"{SCHEME}{repo}: {one_line(error)}") from error
