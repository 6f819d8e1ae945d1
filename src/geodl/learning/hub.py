"""Models on the Hugging Face hub: `push` uploads one with a model card, ``hf://USER/NAME`` names one to load."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

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
"""What a repository holds: no lock, no events."""
MANY = 200
"""Classes that a model card lists."""
T = TypeVar("T")


def push(
    model: "Learner | str | Path", repo: str, *, private: bool = True, with_images: bool = False
) -> str:
    """Upload a model and its model card to the Hugging Face hub; return the page's address.

    ``Learner.load("hf://USER/NAME")`` loads it. The token is that of ``hf auth login`` or ``HF_TOKEN``.
    A model in closed form holds features of the images that it learned, also without the images.

    Args:
        model: a Learner, or the directory of a model.
        repo: ``USER/NAME``; made if there is none.
        private: whether a repository that is made here is private.
        with_images: also upload the exemplars; without them further learning has none of the old
            classes.
    """
    hub, repo = _hub(), _repository(SCHEME + repo)[0]
    given = load_model(Directory(Path(model)).phase(-1)) if isinstance(model, str | Path) else None
    shared = _for_strangers(given or model.known, with_images)  # type: ignore[union-attr]
    with TemporaryDirectory() as folder:
        store = model_directory(Path(folder) / "model")
        with store.lock():
            save_model(store, shared, action={"action": "push"}, notes={"config": _config(shared)})
        (store.path / "README.md").write_text(card(shared, repo), encoding="utf-8")

        def upload() -> Any:
            hub.create_repo(repo, private=private, exist_ok=True)
            return hub.upload_folder(
                repo_id=repo,
                folder_path=store.path,
                allow_patterns=list(FILES),
                delete_patterns=["objects/*"],
                commit_message=f"{count(len(shared.classes), 'class')}",
            )

        _asked(repo, upload)
    return f"{hub.endpoint}/{repo}"


def fetched(path: str | Path) -> str | Path:
    """Return the local copy of a model on the hub, ``hf://USER/NAME[@REVISION]``; any other path as it is."""
    if not str(path).startswith(SCHEME):
        return path
    repo, revision = _repository(str(path))
    hub = _hub()

    def download() -> str:
        return str(hub.snapshot_download(repo, revision=revision, allow_patterns=list(FILES)))

    return _asked(repo, download)


def card(model: Model, repo: str) -> str:
    """Return the model card, made from the model."""
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
    """Return what the table of a model card shows."""
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
    """Return a class name as Markdown shows it: no sign is markup."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", name)


def _for_strangers(model: Model, with_images: bool) -> Model:
    """Return the model without paths of this machine, and without images unless they are wanted."""
    config = model.config.model_copy(update={"data_dir": None, "weights": None})
    memory = model.memory if with_images else Memory(store_images=model.memory.store_images)
    return replace(model, config=config, memory=memory)


def _config(model: Model) -> dict[str, Any]:
    """Return the stored configuration; of files that were imported their names alone."""
    config: dict[str, Any] = model.record()["config"]
    config["imports"] = [Path(name).name for name in config.get("imports", ())]
    return config


def _repository(path: str) -> tuple[str, str | None]:
    """Split ``hf://USER/NAME[@REVISION]``."""
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?", path)
    if not found:
        raise ConfigError(f"model = {path}: allowed values are hf://USER/NAME, hf://USER/NAME@TAG")
    return found[1], found[2]


def _hub() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingExtraError("hub", SCHEME) from None
    return HfApi(library_name="geodl")


def _asked(repo: str, ask: Callable[[], T]) -> T:
    """Return what the hub answers; its many kinds of errors as one line."""
    try:
        return ask()
    except Exception as error:
        raise StoreError(f"{SCHEME}{repo}: {one_line(error)}") from error
