"""The HTTP API under /api/v1: predict, teach, inspect, change, export."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
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
"""Number of similar stored images that are returned with a prediction."""
KEEP_ALIVE = 15.0
"""Seconds between two keep-alive comments of an event stream."""


async def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


async def _trusted(request: Request) -> bool:
    return bool(request.scope["trusted"])


ServerDep = Annotated[Server, Depends(_server)]
Trusted = Annotated[bool, Depends(_trusted)]
_bearer = HTTPBearer(
    auto_error=False, description="The token that the server printed at its start, or GEODL_TOKEN."
)


async def needs_token(
    server: ServerDep, trusted: Trusted, _: Annotated[Any, Depends(_bearer)]
) -> None:
    """Refuse requests without the token, and all changes if the server is read-only."""
    if server.read_only:
        raise Refused(403, "this server was started with --read-only")
    if not trusted:
        raise Refused(
            401, "this changes the model and needs the token that the server printed at its start"
        )


REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Error}
    for status in (400, 401, 403, 404, 408, 409, 411, 413, 422, 429, 500, 503)
}
"""The statuses with which a request may be refused."""
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
    """Await work for a client; it is cancelled when the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


# ---------------------------------------------------------------------------------------------------------- predicting

_TOP = Query(ge=1, le=1000, description="Number of likeliest classes to return.")
_SIMILAR = Query(
    description="Also return the most similar stored images; they are private, so this needs the token."
)


@reading.post(
    "/predict",
    response_model=schemas.Predictions,
    openapi_extra=_multipart(images=_IMAGES),
    tags=["predict"],
)
async def predict(
    request: Request,
    server: ServerDep,
    trusted: Trusted,
    top: Annotated[int, _TOP] = 5,
    similar: Annotated[bool, _SIMILAR] = False,
) -> dict[str, Any]:
    """Predict the classes of one or many images."""
    async with received(request, server, server.limits.predict_images, in_memory=True) as upload:
        work = _predict_all(server, upload, trusted, top, NEAREST if similar and trusted else 0)
        results = await _while_connected(request, work)
    predictions, skipped = [], []
    for i, (name, result) in enumerate(zip(upload.names, results, strict=True)):
        if isinstance(result, str):
            skipped.append({"name": name, "reason": printable(result)})
        else:
            predictions.append(result | {"index": i, "name": name})
    return {"predictions": predictions, "skipped": skipped}


async def _predict_all(
    server: Server, upload: Upload, trusted: bool, top: int, near: int
) -> list[dict[str, Any] | str]:
    """Return, for each image, its prediction or the reason why it cannot be used."""

    async def one(image: Path | bytes) -> dict[str, Any] | str:
        answer: Future[Answer | str] = Future()
        server.predicting[trusted].submit(
            server.predictor.predict, image, transform, top, trusted, answer
        )
        result = await asyncio.wrap_future(answer)
        if isinstance(result, str):
            return result
        nearest = server.predictor.nearest
        similar = await server.run(trusted, nearest, result.pixels, near) if near else []
        return result.prediction.to_json() | {"similar": similar}

    most = server.limits.megapixels
    try:
        async with asyncio.timeout(server.limits.answer_seconds):
            transform, size = await server.run(trusted, server.predictor.measure, upload.images)
            if size > most:
                raise Refused(413, f"more than {most:.0f} megapixels in one request")
            with server.decoding.one(trusted, size):
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
async def learn(request: Request, server: ServerDep) -> schemas.Job:
    """Teach images: as many `labels` (class names) as `images`, in the same order. Returns the job that learns them."""
    async with received(request, server, server.limits.learn_images) as upload:
        job = server.teacher.add(
            Job.of_files(
                upload.files, upload.names, upload.classes(), lambda job, state: upload.remove()
            )
        )
        upload.kept = True
    return job.facts


@changing.post("/learn/folder", response_model=schemas.Job, status_code=202, tags=["teach"])
def learn_folder(body: schemas.Folder, server: ServerDep) -> schemas.Job:
    """Teach a folder of class folders on the server, below the one that `--allow-folder` names."""
    if server.allow_folder is None:
        raise Refused(403, "this server was not started with --allow-folder")
    root = server.allow_folder.resolve()
    try:
        folder = (root / body.folder).resolve()
        allowed = folder.is_relative_to(root) and folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
        allowed = False
    if not allowed:
        raise Refused(404, "no such folder below the one of --allow-folder")
    return server.teacher.add(Job(folder, {})).facts


@changing.get("/tray", response_model=list[schemas.Collected], tags=["teach"])
def tray(server: ServerDep) -> list[schemas.Collected]:
    """List the images collected for teaching."""
    return server.tray.listed()


@changing.post(
    "/tray/add",
    response_model=list[schemas.Collected],
    openapi_extra=_multipart(images=_IMAGES, labels=_LABELS),
    tags=["teach"],
)
async def tray_add(request: Request, server: ServerDep) -> list[schemas.Collected]:
    """Collect images for teaching, in the form of `learn`; an image that is collected already gets the new class."""
    async with received(request, server, server.limits.learn_images) as upload:
        return await asyncio.to_thread(server.tray.add, upload)


@changing.post("/tray/drop", response_model=list[schemas.Collected], tags=["teach"])
def tray_drop(body: schemas.Drop, server: ServerDep) -> list[schemas.Collected]:
    """Drop collected images, except those that are being taught."""
    server.tray.drop(body.ids, body.label)
    return server.tray.listed()


@changing.get("/tray/{key}", response_model=schemas.Picture, tags=["teach"])
async def tray_picture(key: str, server: ServerDep) -> schemas.Picture:
    """Return a collected image."""
    return await server.run(True, server.tray.picture, key)


@changing.post("/tray/teach", response_model=schemas.Job, status_code=202, tags=["teach"])
def tray_teach(server: ServerDep) -> schemas.Job:
    """Teach all collected images. Learned images leave the collection; those that cannot be used stay, with the reason."""
    return server.tray.teach(server.teacher).facts


@reading.get("/jobs", response_model=list[schemas.Job], tags=["teach"])
def jobs(server: ServerDep, trusted: Trusted) -> list[dict[str, Any]]:
    """List the jobs: waiting and running ones, and the last that ended."""
    return server.jobs(trusted)


@reading.get("/jobs/{key}", response_model=schemas.Job, tags=["teach"])
def job(key: str, server: ServerDep, trusted: Trusted) -> schemas.Job:
    """Return the progress of a job."""
    return server.teacher.find(key).visible(trusted)


@changing.post("/jobs/{key}/cancel", response_model=schemas.Job, tags=["teach"])
def cancel(key: str, server: ServerDep) -> schemas.Job:
    """Cancel a job; the model stays as it was."""
    return server.teacher.cancel(key).facts


# ------------------------------------------------------------------------------------------------------------- inspecting


@reading.get("/model", response_model=schemas.Model, tags=["model"])
def model(server: ServerDep, trusted: Trusted) -> dict[str, Any]:
    """Describe the model: its classes with their accuracy, confusions, stored images, and history."""
    facts: dict[str, Any] = {"classes": [], "steps": []}
    if server.model.version is not None:
        facts = server.model.info()
    elif exists(server.path):  # all steps may have been undone
        facts["redo"] = len(Directory(server.path).undone())
    if not trusted:  # names of images are private
        for step in facts["steps"]:
            step.pop("image", None)
    name = printable(server.path.resolve().name)
    return facts | {"name": name, "read_only": server.read_only, "onnx": can_export()}


@reading.get("/classes", response_model=list[schemas.KnownClass], tags=["model"])
def classes(server: ServerDep, trusted: Trusted) -> Any:
    """List the classes with their accuracy in %, in the order in which they were learned."""
    return model(server, trusted)["classes"]


@reading.get("/history", response_model=list[dict[str, Any]], tags=["model"])
def history(server: ServerDep, trusted: Trusted) -> Any:
    """List the steps, oldest first."""
    return model(server, trusted)["steps"]


_STREAM = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


@reading.get("/events", response_class=StreamingResponse, responses=_STREAM, tags=["model"])  # type: ignore[arg-type]
async def events(server: ServerDep, trusted: Trusted) -> StreamingResponse:
    """Send server-sent events at every change: the version of the model, whether another program writes it, all jobs."""

    async def stream() -> AsyncIterator[str]:
        last, quiet = "", 0.0
        while not server.closing:
            status = await server.status(trusted)
            quiet += TICK
            if status != last:
                last, quiet = status, 0.0
                yield f"data: {status}\n\n"
            elif quiet >= KEEP_ALIVE:
                quiet = 0.0
                yield ": keep-alive\n\n"
            await asyncio.sleep(TICK)

    return StreamingResponse(stream(), media_type="text/event-stream")


# ------------------------------------------------------------------------------------------------------------ changing


@changing.post("/undo", response_model=schemas.Done, tags=["change"])
def undo(server: ServerDep) -> dict[str, Any]:
    """Undo the last step, such as a learn step, a rename or a removal."""
    server.teacher.require_idle()
    return {"record": server.model.undo()}


@changing.post("/redo", response_model=schemas.Done, tags=["change"])
def redo(server: ServerDep) -> dict[str, Any]:
    """Restore the step that was undone last."""
    server.teacher.require_idle()
    return {"record": server.model.redo()}


@changing.post("/classes/rename", response_model=schemas.Model, tags=["change"])
def rename(body: schemas.Rename, server: ServerDep) -> dict[str, Any]:
    """Rename a class."""
    server.teacher.require_idle()
    server.model.rename(body.old, body.new)
    return model(server, True)


@changing.post("/classes/remove", response_model=schemas.Model, tags=["change"])
def remove(body: schemas.Remove, server: ServerDep) -> dict[str, Any]:
    """Remove a class with its images."""
    server.teacher.require_idle()
    if body.for_good:
        server.teacher.require_none_of(body.name)
    server.model.remove(body.name, for_good=body.for_good)
    if body.for_good:
        server.tray.drop(label=body.name)
    return model(server, True)


# --------------------------------------------------------------------------------------------------------- exporting


async def _export(request: Request, server: Server, kind: Kind, media: str) -> FileResponse:
    version = server.model.version
    if version is None:
        raise Refused(409, "the model has learned nothing yet")
    path = await _while_connected(request, server.exports.make(kind, version))
    return FileResponse(
        path, media_type=media, filename=f"{server.path.resolve().name}{path.suffix}"
    )


_BINARY = {"schema": {"type": "string", "format": "binary"}}
_FILE = {200: {"content": {"application/octet-stream": _BINARY}}}
_PAGE = {200: {"content": {"text/html": {"schema": {"type": "string"}}}}}


@reading.get("/export/onnx", response_class=FileResponse, responses=_FILE, tags=["export"])  # type: ignore[arg-type]
async def export_onnx(request: Request, server: ServerDep) -> FileResponse:
    """Return the model as one ONNX file with labels and preprocessing, without images."""
    return await _export(request, server, "onnx", "application/octet-stream")


@reading.get("/export/report", response_class=FileResponse, responses=_PAGE, tags=["export"])  # type: ignore[arg-type]
async def export_report(request: Request, server: ServerDep) -> FileResponse:
    """Return the report about the model as one HTML page."""
    return await _export(request, server, "report", "text/html")
