"""What the HTTP interface takes and gives; from this the OpenAPI description is made."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from geodl.data.names import LONGEST


class Strict(BaseModel):
    """A request: a misspelt field is an error."""

    model_config = ConfigDict(extra="forbid")


Name = Annotated[str, Field(min_length=1, max_length=LONGEST)]


class Error(BaseModel):
    """Why a request was refused, in one sentence."""

    error: str


class Skipped(BaseModel):
    """An image that was left out, and why."""

    name: str
    reason: str


class Confidence(BaseModel):
    """A class, and how sure the model is of it, 0 to 1."""

    label: str
    confidence: float


class Similar(BaseModel):
    """A stored validation image: its class, its cosine with the image asked about, and itself as a data address."""

    label: str
    similarity: float
    image: str


class Predicted(BaseModel):
    """The prediction for one image; `index` is its place in the request.

    `label` is the likeliest class, or "unknown" where `score` is below the threshold: the probability of being of a known
    class for a model in closed form, else the largest score.
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
    """The predictions of a request in its order, without the images that could not be read."""

    predictions: list[Predicted]
    skipped: list[Skipped]


class KnownClass(BaseModel):
    """A class of the model: when it was learned, from how many images, how many are kept.

    accuracy: in %, on so many images as were `judged`; interval: its 95 % interval.
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
    """So many validation images of a class, of all it has, were predicted as another one."""

    model_config = ConfigDict(populate_by_name=True)

    of_class: str = Field(alias="class")
    taken_for: str
    images: int
    of: int


class Model(BaseModel):
    """What the model knows; `read_only`, `redo` and `onnx` say what this server can do with it.

    matrix: [true class, predicted class, images] by position in `classes`, without zeros; left_out: whether the images
    were learned too, each judged by the model without it; mendable: whether single pictures can be moved or forgotten.
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
    """A learn step: images of each class, how far it is (`part` of what it is `doing`, 0 to 1), its result.

    `seconds` and `advice` are an estimate of the training time and hints that are known once it has begun; `version`
    is the state of the model when it ended.
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
    """An image collected for teaching: its class, why it cannot be used if so, the job that teaches it."""

    id: str
    label: str
    name: str
    flaw: str = ""
    job: str | None = None


class Drop(Strict):
    """Collected images: some of them, or all of a class."""

    ids: Annotated[list[str], Field(max_length=500)] = []
    label: Name | None = None


class Picture(BaseModel):
    """A picture as a data address; empty where it cannot be read."""

    image: str


Ids = Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=500)]


class Move(Strict):
    """Move learned images to a class, by their ids."""

    ids: Ids
    label: Name


class Forget(Strict):
    """Forget learned images, by their ids."""

    ids: Ids


class Rename(Strict):
    """Give a class another name."""

    old: Name
    new: Name


class Remove(Strict):
    """Remove a class; `for_good`: with all earlier states, so that no image of it is left."""

    name: Name
    for_good: bool = False


class Folder(Strict):
    """A folder of class folders, below the one that the server was started with."""

    folder: Annotated[str, Field(min_length=1, max_length=4096)]


class Done(BaseModel):
    """The record of the step that was taken back or brought back."""

    record: dict[str, Any]
