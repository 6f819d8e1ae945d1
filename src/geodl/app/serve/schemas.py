"""The requests and responses of the HTTP API, from which the OpenAPI description is generated."""

from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from geodl.data.names import LONGEST
from geodl.model.page import thumbnail, webp


class Strict(BaseModel):
    """A request body: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


Name = Annotated[str, Field(min_length=1, max_length=LONGEST)]


class Error(BaseModel):
    """The reason why a request was refused, in one sentence."""

    error: str


class Skipped(BaseModel):
    """An image that was skipped, and the reason."""

    name: str
    reason: str


class Confidence(BaseModel):
    """A class and its confidence, 0 to 1."""

    label: str
    confidence: float


class Similar(BaseModel):
    """A stored validation image: its class, its cosine similarity to the predicted image, and a thumbnail as a data URL."""

    label: str
    similarity: float
    image: str


class Predicted(BaseModel):
    """The prediction for one image; `index` is its place in the request.

    `label` is the likeliest class, or "unknown" if `score` is below the threshold: in closed form the probability that the
    image is of a known class, else the largest score.
    """

    index: int
    name: str
    label: str
    unknown: bool
    confidence: float
    score: float
    top: list[Confidence]
    similar: list[Similar] = []


class Predictions(BaseModel):
    """The predictions of a request, in its order, and the images that could not be read."""

    predictions: list[Predicted]
    skipped: list[Skipped]


class KnownClass(BaseModel):
    """A class of the model: when it was learned, from how many images, and how many of them are kept.

    accuracy: in %, measured on `judged` images; interval: its 95 % interval.
    """

    name: str
    step: int
    learned: str | None
    images: int
    exemplars: int
    validation: int
    judged: int
    accuracy: float | None
    interval: tuple[float, float] | None


class Confused(BaseModel):
    """A confusion: `images` of the `of` validation images of a class were predicted as another one."""

    model_config = ConfigDict(populate_by_name=True)

    of_class: str = Field(alias="class")
    taken_for: str
    images: int
    of: int


class Model(BaseModel):
    """The model; `read_only`, `redo` and `onnx`: what this server can do with it.

    matrix: the confusion matrix, as [true class, predicted class, images] by position in `classes`, without zeros;
    left_out: whether accuracy was measured on learned images, each left out in turn; mendable: whether single pictures can
    be moved or forgotten.
    """

    name: str
    read_only: bool
    onnx: bool
    classes: list[KnownClass] = []
    steps: list[dict[str, Any]] = []
    accuracy: float | None = None
    left_out: bool = False
    mendable: bool = False
    confusions: list[Confused] = []
    matrix: list[tuple[int, int, int]] = []
    network: str | None = None
    image_size: int | None = None
    stored_images: int = 0
    stored_bytes: int = 0
    directory_bytes: int = 0
    undo: int = 0
    redo: int = 0
    unfinished: bool = False


State = Literal["waiting", "running", "done", "cancelled", "failed"]


class Job(BaseModel):
    """A learn step: images of each class, its progress (`part` of what it is `doing`, 0 to 1), its result.

    `seconds` is an estimate of the training time and `advice` holds hints, both known once it has begun; `version` is the
    version of the model when it ended.
    """

    id: str
    state: State = "waiting"
    images: int = 0
    classes: dict[str, int]
    made: str
    doing: str = "waiting"
    part: float = 0.0
    epoch: int = 0
    epochs: int = 0
    rate: float = 0.0
    seconds: float | None = None
    advice: list[str] = []
    skipped: list[Skipped] = []
    result: dict[str, Any] | None = None
    version: str | None = None
    error: str | None = None


class Collected(BaseModel):
    """An image collected for teaching: its class, the reason if it cannot be used, the job that teaches it."""

    id: str
    label: str
    name: str
    flaw: str = ""
    job: str | None = None


class Drop(Strict):
    """Drop collected images, by their ids or by class."""

    ids: Annotated[list[str], Field(max_length=500)] = []
    label: Name | None = None


class Picture(BaseModel):
    """A picture as a data URL; empty if it cannot be read."""

    image: str

    @classmethod
    def of(cls, image: Image.Image, side: int) -> "Picture":
        """Return the thumbnail of an image with at most `side` pixels a side."""
        return cls(image=f"data:image/webp;base64,{webp(thumbnail(image, side))}")


Ids = Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=500)]


class Move(Strict):
    """Move learned images to a class, by their ids."""

    ids: Ids
    label: Name


class Forget(Strict):
    """Forget learned images, by their ids."""

    ids: Ids


class Rename(Strict):
    """Rename a class."""

    old: Name
    new: Name


class Remove(Strict):
    """Remove a class; `for_good`: also all earlier states, so that no image of it is left."""

    name: Name
    for_good: bool = False


class Folder(Strict):
    """A folder of class folders, below the one that the server was started with."""

    folder: Annotated[str, Field(min_length=1, max_length=4096)]


class Done(BaseModel):
    """The record of the step that was undone or restored."""

    record: dict[str, Any]
