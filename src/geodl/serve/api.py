"""The HTTP interface under /api/v1: predict, teach, change, look, take away."""

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.security import HTTPBearer
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, StreamingResponse
from torch import Tensor

from geodl.app.about import undone
from geodl.data.names import LONGEST
from geodl.serve import schemas
from geodl.serve.exports import Kind
from geodl.serve.security import Refused, has_token
from geodl.serve.server import Server
from geodl.store import RunDirectory, has_record
from geodl.text import printable

NEAREST = 4
"""So many stored validation images are shown beside a prediction."""
TICK, ALIVE = 0.25, 15.0
"""Seconds between two looks at what has changed, and between two signs of life."""


def _server(request: Request) -> Server:
    found: Server = request.app.state.server
    return found


Here = Annotated[Server, Depends(_server)]
_bearer = HTTPBearer(auto_error=False, description="The token that the server printed at its start, or GEODL_TOKEN.")


def _changing(request: Request, here: Here, _: Annotated[Any, Depends(_bearer)]) -> None:
    """Let only those change the model who know the token."""
    if here.read_only:
        raise Refused(403, "this server was started with --read-only")
    if not has_token(request.headers.get("authorization"), here.token):
        raise Refused(401, "this changes the model and needs the token that the server printed at its start")


_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Error} for status in (400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 503)
}
reading = APIRouter(prefix="/api/v1", responses=_REFUSALS)
changing = APIRouter(prefix="/api/v1", responses=_REFUSALS, dependencies=[Depends(_changing)])


# ---------------------------------------------------------------------------------------------------------- multipart


def _multipart(fields: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": fields, "required": list(required)}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


_IMAGES = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
_LABELS = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1, "maxLength": LONGEST}}


async def _form(request: Request, seconds: float, most: int) -> FormData:
    """Read a multipart request; its files are kept in memory or under names of our own, never under the client's."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refused(422, "images are needed, as multipart/form-data with fields named `images`")
    try:
        async with asyncio.timeout(seconds):
            return await request.form(max_files=most + 1, max_fields=most + 1)
    except TimeoutError:
        raise Refused(408, f"the request did not arrive within {seconds:.0f} s") from None
    except HTTPException as error:
        many = "Too many" in str(error.detail)
        raise Refused(413 if many else 400, _many(most) if many else f"not a whole request: {error.detail}") from None


def _many(most: int) -> str:
    return f"more than {most} images in one request"


def _files(form: FormData, most: int) -> list[UploadFile]:
    found = form.getlist("images")
    files = [each for each in found if isinstance(each, UploadFile)]
    if len(files) < len(found) or not files:
        raise Refused(422, "images are needed, as files in fields named `images`")
    if len(files) > most:
        raise Refused(413, _many(most))
    return files


def _name(upload: UploadFile, index: int) -> str:
    """Name an image for people; no file is ever opened or made by this name."""
    return printable((upload.filename or "").replace("\\", "/").rpartition("/")[2])[:200] or f"image {index}"


# ---------------------------------------------------------------------------------------------------------- predicting


@reading.post(
    "/predict",
    response_model=schemas.Predictions,
    openapi_extra=_multipart({"images": _IMAGES}, ["images"]),
    tags=["predict"],
)
async def predict(
    request: Request,
    here: Here,
    top: Annotated[int, Query(ge=1, le=1000, description="So many of the likeliest classes.")] = 5,
    similar: Annotated[
        bool, Query(description="Show the nearest stored validation images; they are private, so the token is needed.")
    ] = False,
) -> dict[str, Any]:
    """Say what is in one or many images."""
    shows = similar and has_token(request.headers.get("authorization"), here.token)
    with here.predictions.one():
        form = await _form(request, here.limits.upload_seconds, here.limits.predict_images)
        try:
            files = _files(form, here.limits.predict_images)
            names = [_name(file, i) for i, file in enumerate(files)]
            async with asyncio.timeout(here.limits.answer_seconds):
                # Read where they are decoded: of many requests at once only a few are in memory.
                decoded = await _threaded(here, lambda: here.predictor.decode([file.file.read() for file in files]))
                answers = [_answer(here, each, top, shows) for each in decoded if isinstance(each, Tensor)]
                found = await asyncio.gather(*answers)
        except TimeoutError:
            raise Refused(503, "the prediction took too long; try again, with fewer images") from None
        finally:
            await form.close()
    good = [i for i, each in enumerate(decoded) if isinstance(each, Tensor)]
    skipped = [
        {"name": names[i], "reason": printable(each)} for i, each in enumerate(decoded) if not isinstance(each, Tensor)
    ]
    predictions = [{"index": i, "name": names[i]} | each for i, each in zip(good, found, strict=True)]
    return {"predictions": predictions, "skipped": skipped}


async def _threaded(here: Server, work: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(here.decoding, work)


async def _answer(here: Server, pixels: Tensor, top: int, similar: bool) -> dict[str, Any]:
    found = await asyncio.wrap_future(here.predictor.submit(pixels, top))
    near = await _threaded(here, lambda: here.predictor.nearest(pixels, NEAREST)) if similar else []
    return {
        "label": found.label,
        "unknown": found.unknown,
        "top": [{"label": label, "confidence": confidence} for label, confidence in found.top],
        "similar": near,
    }


# ------------------------------------------------------------------------------------------------------------ teaching


@changing.post(
    "/learn",
    response_model=schemas.Job,
    status_code=202,
    openapi_extra=_multipart({"images": _IMAGES, "labels": _LABELS}, ["images", "labels"]),
    tags=["teach"],
)
async def learn(request: Request, here: Here) -> dict[str, Any]:
    """Teach images: as many `labels` (class names) as `images`, in the same order. The answer is a job to look at."""
    most = here.limits.learn_images
    with here.uploads.one():
        form = await _form(request, here.limits.upload_seconds, most)
        try:
            files, labels = _files(form, most), form.getlist("labels")
            if len(labels) != len(files) or not all(isinstance(label, str) for label in labels):
                raise Refused(422, f"{len(files)} images have {len(labels)} labels: one each is needed")
            names = [_name(file, i) for i, file in enumerate(files)]
            texts = [str(label) for label in labels]
            if any(len(text) > LONGEST for text in texts):
                raise Refused(422, f"the name of a class has more than {LONGEST} characters")
            return await _threaded(here, lambda: _handed_over(here, files, texts, names))  # type: ignore[no-any-return]
        finally:
            await form.close()


def _handed_over(here: Server, files: list[UploadFile], labels: list[str], names: list[str]) -> dict[str, Any]:
    with here.writer.preparing() as job:
        for i, file in enumerate(files):
            with (job.folder / str(i)).open("xb") as target:
                while part := file.file.read(1 << 20):
                    target.write(part)
        return here.writer.add(job, labels, names).facts()


@changing.post("/learn/folder", response_model=schemas.Job, status_code=202, tags=["teach"])
def learn_folder(wanted: schemas.Folder, here: Here) -> dict[str, Any]:
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
    with here.writer.preparing() as job:
        return here.writer.add(job, source=folder).facts()


@reading.get("/jobs", response_model=list[schemas.Job], tags=["teach"])
def jobs(here: Here) -> list[dict[str, Any]]:
    """List the jobs: those that wait or run, those that were interrupted, and the last that ended."""
    return here.facts()["jobs"]  # type: ignore[no-any-return]


@reading.get("/jobs/{key}", response_model=schemas.Job, tags=["teach"])
def job(key: str, here: Here) -> dict[str, Any]:
    """Say how far a job is."""
    if here.teacher is None:
        raise Refused(404, "no such job")
    return here.teacher.find(key).facts()


@changing.post("/jobs/{key}/cancel", response_model=schemas.Job, tags=["teach"])
def cancel(key: str, here: Here) -> dict[str, Any]:
    """Cancel a job, or throw away one that was interrupted; the model stays as it was before."""
    return here.writer.cancel(key).facts()


@changing.post("/jobs/{key}/resume", response_model=schemas.Job, tags=["teach"])
def resume(key: str, here: Here) -> dict[str, Any]:
    """Go on with a job that was interrupted when the server was stopped or killed."""
    return here.writer.resume(key).facts()


# ------------------------------------------------------------------------------------------------------------- looking


@reading.get("/model", response_model=schemas.Model, response_model_by_alias=True, tags=["model"])
def model(here: Here) -> dict[str, Any]:
    """Say what the model knows and keeps: classes with their accuracy, what it mixes up, its history."""
    facts: dict[str, Any] = dict.fromkeys(schemas.Model.model_fields, 0)
    facts |= {"classes": [], "steps": [], "confusions": [], "accuracy": None, "network": None, "image_size": None}
    if here.model.stamp is not None:
        facts |= here.model.info()
    elif has_record(here.path):  # all that it had learned may have been taken back
        facts["redo"] = len(undone(RunDirectory(here.path)))
    has_onnx = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
    return facts | {
        "name": printable(here.path.resolve().name),
        "read_only": here.read_only,
        "onnx": has_onnx,
    }


@reading.get("/classes", response_model=list[schemas.KnownClass], tags=["model"])
def classes(here: Here) -> Any:
    """List the classes with their accuracy in %, in the order in which they were learned."""
    return model(here)["classes"]


@reading.get("/history", response_model=list[dict[str, Any]], tags=["model"])
def history(here: Here) -> Any:
    """List the steps, oldest first."""
    return model(here)["steps"]


@reading.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    tags=["model"],
)
async def events(request: Request, here: Here) -> StreamingResponse:
    """Tell, as server-sent events, at every change: the state of the model, whether another program writes, all jobs."""
    here.streams.check()

    async def stream() -> AsyncIterator[str]:
        last, quiet = "", 0.0
        with here.streams.one():
            while not here.closing:
                now = json.dumps(await asyncio.to_thread(here.facts))
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
    here.insist_idle()
    return {"record": here.model.undo()}


@changing.post("/redo", response_model=schemas.Done, tags=["change"])
def redo(here: Here) -> dict[str, Any]:
    """Bring back the step that was taken back last."""
    here.insist_idle()
    return {"record": here.model.redo()}


@changing.post("/classes/rename", response_model=schemas.Model, tags=["change"])
def rename(wanted: schemas.Rename, here: Here) -> dict[str, Any]:
    """Give a class another name."""
    here.insist_idle()
    here.model.rename(wanted.old, wanted.new)
    return model(here)


@changing.post("/classes/remove", response_model=schemas.Model, tags=["change"])
def remove(wanted: schemas.Remove, here: Here) -> dict[str, Any]:
    """Remove a class with its images."""
    here.insist_idle()
    here.model.remove(wanted.name, for_good=wanted.for_good)
    if wanted.for_good:
        here.writer.forget(wanted.name)
    return model(here)


# --------------------------------------------------------------------------------------------------------- taking away


async def _export(here: Server, kind: Kind, media: str) -> FileResponse:
    stamp = here.model.stamp
    if stamp is None:
        raise Refused(409, "the model has learned nothing yet")
    path = await here.exports.make(kind, stamp)
    return FileResponse(path, media_type=media, filename=f"{here.path.resolve().name}{path.suffix}")


_FILE = {200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}
_PAGE = {200: {"content": {"text/html": {"schema": {"type": "string"}}}}}


@reading.get("/export/onnx", response_class=FileResponse, responses=_FILE, tags=["take away"])  # type: ignore[arg-type]
async def export_onnx(here: Here) -> FileResponse:
    """Give the model as one ONNX file with labels and preprocessing inside, and no images."""
    return await _export(here, "onnx", "application/octet-stream")


@reading.get("/export/report", response_class=FileResponse, responses=_PAGE, tags=["take away"])  # type: ignore[arg-type]
async def export_report(here: Here) -> FileResponse:
    """Give the report about the model as one HTML page."""
    return await _export(here, "report", "text/html")
