"""The HTTP interface under /api/v1: predict, teach, change, look, take away."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi.security import HTTPBearer
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, StreamingResponse

from geodl.app.export import can_export
from geodl.app.serve import schemas
from geodl.app.serve.batching import Answer
from geodl.app.serve.exports import Kind
from geodl.app.serve.jobs import Job
from geodl.app.serve.limits import Refused
from geodl.app.serve.server import TICK, Server
from geodl.app.serve.uploads import Upload, received
from geodl.core.text import printable
from geodl.data.names import LONGEST
from geodl.store import Directory, exists

T = TypeVar("T")
NEAREST = 4
"""So many stored validation images are shown beside a prediction."""
ALIVE = 15.0
"""Seconds between two signs of life of an event stream."""


async def _server(request: Request) -> Server:
    found: Server = request.app.state.server
    return found


async def _trusted(request: Request) -> bool:
    return bool(request.scope["trusted"])


Here = Annotated[Server, Depends(_server)]
Trusted = Annotated[bool, Depends(_trusted)]
_bearer = HTTPBearer(
    auto_error=False, description="The token that the server printed at its start, or GEODL_TOKEN."
)


async def needs_token(here: Here, trusted: Trusted, _: Annotated[Any, Depends(_bearer)]) -> None:
    """Let only those change the model who know the token."""
    if here.read_only:
        raise Refused(403, "this server was started with --read-only")
    if not trusted:
        raise Refused(
            401, "this changes the model and needs the token that the server printed at its start"
        )


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Error}
    for status in (400, 401, 403, 404, 408, 409, 411, 413, 422, 429, 500, 503)
}
"""How every request may be refused."""
reading = APIRouter(prefix="/api/v1", responses=REFUSALS)
changing = APIRouter(prefix="/api/v1", responses=REFUSALS, dependencies=[Depends(needs_token)])

_IMAGES = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
_NAME = {"type": "string", "minLength": 1, "maxLength": LONGEST}
_LABELS = {"type": "array", "minItems": 1, "items": _NAME}


def _multipart(**fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work for a client; it is given up when the client goes."""

    async def leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(leaves())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _received(
    request: Request, here: Server, most: int, *, in_memory: bool = False
) -> AbstractAsyncContextManager[Upload]:
    how = (here.limits.upload_seconds, most, partial(here.run, request.scope["trusted"]))
    return received(request, here.folder, *how, in_memory=in_memory)


# ---------------------------------------------------------------------------------------------------------- predicting

_TOP = Query(ge=1, le=1000, description="So many of the likeliest classes.")
_SIMILAR = Query(
    description="Show the nearest stored validation images; they are private, so the token is needed."
)


@reading.post(
    "/predict",
    response_model=schemas.Predictions,
    openapi_extra=_multipart(images=_IMAGES),
    tags=["predict"],
)
async def predict(
    request: Request,
    here: Here,
    trusted: Trusted,
    top: Annotated[int, _TOP] = 5,
    similar: Annotated[bool, _SIMILAR] = False,
) -> dict[str, Any]:
    """Predict the classes of one or many images."""
    async with _received(request, here, here.limits.predict_images, in_memory=True) as upload:
        work = _predict_all(here, upload, trusted, top, NEAREST if similar and trusted else 0)
        found = await _while_connected(request, work)
    predictions, skipped = [], []
    for i, (name, each) in enumerate(zip(upload.names, found, strict=True)):
        if isinstance(each, str):
            skipped.append({"name": name, "reason": printable(each)})
        else:
            predictions.append(each | {"index": i, "name": name})
    return {"predictions": predictions, "skipped": skipped}


async def _predict_all(
    here: Server, upload: Upload, trusted: bool, top: int, near: int
) -> list[dict[str, Any] | str]:
    """Return, for each image, its prediction or why it cannot be used."""

    async def one(image: Path | bytes) -> dict[str, Any] | str:
        answer: Future[Answer | str] = Future()
        here.predicting[trusted].submit(here.predictor.predict, image, seen, top, trusted, answer)
        found = await asyncio.wrap_future(answer)
        if isinstance(found, str):
            return found
        nearest = here.predictor.nearest
        similar = await here.run(trusted, nearest, found.pixels, near) if near else []
        return found.prediction.to_json() | {"similar": similar}

    most = here.limits.megapixels
    try:
        async with asyncio.timeout(here.limits.answer_seconds):
            seen, size = await here.run(trusted, here.predictor.measure, upload.images)
            if size > most:
                raise Refused(413, f"more than {most:.0f} megapixels in one request")
            with here.decoding.one(trusted, size):
                return await asyncio.gather(*map(one, upload.images))
    except TimeoutError:
        raise Refused(503, "the prediction took too long; try again, with fewer images") from None


# ------------------------------------------------------------------------------------------------------------ teaching


@changing.post(
    "/learn",
    response_model=schemas.Job,
    status_code=202,
    openapi_extra=_multipart(images=_IMAGES, labels=_LABELS),
    tags=["teach"],
)
async def learn(request: Request, here: Here) -> schemas.Job:
    """Teach images: as many `labels` (class names) as `images`, in the same order. The answer is a job to look at."""
    async with _received(request, here, here.limits.learn_images) as upload:
        job = here.writer.add(Job.of_upload(upload))
        upload.kept = True
    return job.facts


@changing.post("/learn/folder", response_model=schemas.Job, status_code=202, tags=["teach"])
def learn_folder(wanted: schemas.Folder, here: Here) -> schemas.Job:
    """Teach a folder of class folders on the server, below the one that `--allow-folder` names."""
    if here.allow_folder is None:
        raise Refused(403, "this server was not started with --allow-folder")
    root = here.allow_folder.resolve()
    try:
        folder = (root / wanted.folder).resolve()
        there = folder.is_relative_to(root) and folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # the last: links that lead in a circle
        there = False
    if not there:
        raise Refused(404, "no such folder below the one that may be taught from")
    return here.writer.add(Job(folder, {})).facts


@changing.get("/tray", response_model=list[schemas.Collected], tags=["teach"])
def tray(here: Here) -> list[schemas.Collected]:
    """List the images collected for teaching."""
    return here.tray.listed()


@changing.post(
    "/tray/add",
    response_model=list[schemas.Collected],
    openapi_extra=_multipart(images=_IMAGES, labels=_LABELS),
    tags=["teach"],
)
async def tray_add(request: Request, here: Here) -> list[schemas.Collected]:
    """Collect images for teaching, given as for `learn`; one that is collected already gets its new class."""
    async with _received(request, here, here.limits.learn_images) as upload:
        return await asyncio.to_thread(here.tray.add, upload)


@changing.post("/tray/drop", response_model=list[schemas.Collected], tags=["teach"])
def tray_drop(wanted: schemas.Drop, here: Here) -> list[schemas.Collected]:
    """Drop collected images; those that are being taught stay."""
    here.tray.drop(wanted.ids, wanted.label)
    return here.tray.listed()


@changing.get("/tray/{key}", response_model=schemas.Picture, tags=["teach"])
async def tray_picture(key: str, here: Here) -> dict[str, str]:
    """Show a collected image."""
    return {"image": await here.run(True, here.tray.picture, key)}


@changing.post("/tray/teach", response_model=schemas.Job, status_code=202, tags=["teach"])
def tray_teach(here: Here) -> schemas.Job:
    """Teach all collected images. What is learned leaves the collection, what cannot be used stays with its reason."""
    return here.tray.teach(here.writer).facts


@reading.get("/jobs", response_model=list[schemas.Job], tags=["teach"])
def jobs(here: Here, trusted: Trusted) -> list[dict[str, Any]]:
    """List the jobs: those that wait or run, and the last that ended."""
    return here.jobs(trusted)


@reading.get("/jobs/{key}", response_model=schemas.Job, tags=["teach"])
def job(key: str, here: Here, trusted: Trusted) -> schemas.Job:
    """Show how far a job is."""
    if here.teacher is None:
        raise Refused(404, "no such job")
    return here.teacher.find(key).told(trusted)


@changing.post("/jobs/{key}/cancel", response_model=schemas.Job, tags=["teach"])
def cancel(key: str, here: Here) -> schemas.Job:
    """Cancel a job; the model stays as it was before."""
    return here.writer.cancel(key).facts


# ------------------------------------------------------------------------------------------------------------- looking


@reading.get("/model", response_model=schemas.Model, tags=["model"])
def model(here: Here, trusted: Trusted) -> dict[str, Any]:
    """Show what the model knows and keeps: classes with their accuracy, what it mixes up, its history."""
    facts: dict[str, Any] = {"classes": [], "steps": []}
    if here.model.version is not None:
        facts = here.model.info()
    elif exists(here.path):  # all that it had learned may have been taken back
        facts["redo"] = len(Directory(here.path).undone())
    if not trusted:  # where an image came from is private
        for step in facts["steps"]:
            step.pop("image", None)
    name = printable(here.path.resolve().name)
    return facts | {"name": name, "read_only": here.read_only, "onnx": can_export()}


@reading.get("/classes", response_model=list[schemas.KnownClass], tags=["model"])
def classes(here: Here, trusted: Trusted) -> Any:
    """List the classes with their accuracy in %, in the order in which they were learned."""
    return model(here, trusted)["classes"]


@reading.get("/history", response_model=list[dict[str, Any]], tags=["model"])
def history(here: Here, trusted: Trusted) -> Any:
    """List the steps, oldest first."""
    return model(here, trusted)["steps"]


_STREAM = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@reading.get("/events", response_class=StreamingResponse, responses=_STREAM, tags=["model"])  # type: ignore[arg-type]
async def events(here: Here, trusted: Trusted) -> StreamingResponse:
    """Send, as server-sent events, at every change: the state of the model, whether another program writes, all jobs."""

    async def stream() -> AsyncIterator[str]:
        last, quiet = "", 0.0
        while not here.closing:
            now = await here.told(trusted)
            quiet += TICK
            if now != last:
                last, quiet = now, 0.0
                yield f"data: {now}\n\n"
            elif quiet >= ALIVE:
                quiet = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(TICK)

    return StreamingResponse(stream(), media_type="text/event-stream")


# ------------------------------------------------------------------------------------------------------------ changing


@changing.post("/undo", response_model=schemas.Done, tags=["change"])
def undo(here: Here) -> dict[str, Any]:
    """Take the last step back: a learning, a rename or a removal."""
    here.writer.insist_idle()
    return {"record": here.model.undo()}


@changing.post("/redo", response_model=schemas.Done, tags=["change"])
def redo(here: Here) -> dict[str, Any]:
    """Bring back the step that was taken back last."""
    here.writer.insist_idle()
    return {"record": here.model.redo()}


@changing.post("/classes/rename", response_model=schemas.Model, tags=["change"])
def rename(wanted: schemas.Rename, here: Here) -> dict[str, Any]:
    """Give a class another name."""
    here.writer.insist_idle()
    here.model.rename(wanted.old, wanted.new)
    return model(here, True)


@changing.post("/classes/remove", response_model=schemas.Model, tags=["change"])
def remove(wanted: schemas.Remove, here: Here) -> dict[str, Any]:
    """Remove a class with its images."""
    here.writer.insist_idle()
    if wanted.for_good:
        here.writer.insist_none_of(wanted.name)
    here.model.remove(wanted.name, for_good=wanted.for_good)
    if wanted.for_good:
        here.tray.drop(label=wanted.name)
    return model(here, True)


# --------------------------------------------------------------------------------------------------------- taking away


async def _export(request: Request, here: Server, kind: Kind, media: str) -> FileResponse:
    version = here.model.version
    if version is None:
        raise Refused(409, "the model has learned nothing yet")
    path = await _while_connected(request, here.exports.make(kind, version))
    return FileResponse(path, media_type=media, filename=f"{here.path.resolve().name}{path.suffix}")


_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FILE = {200: {"content": {"application/octet-stream": _BINARY}}}
_PAGE = {200: {"content": {"text/html": {"schema": {"type": "string"}}}}}


@reading.get("/export/onnx", response_class=FileResponse, responses=_FILE, tags=["take away"])  # type: ignore[arg-type]
async def export_onnx(request: Request, here: Here) -> FileResponse:
    """Give the model as one ONNX file with labels and preprocessing inside, and no images."""
    return await _export(request, here, "onnx", "application/octet-stream")


@reading.get("/export/report", response_class=FileResponse, responses=_PAGE, tags=["take away"])  # type: ignore[arg-type]
async def export_report(request: Request, here: Here) -> FileResponse:
    """Give the report about the model as one HTML page."""
    return await _export(request, here, "report", "text/html")
