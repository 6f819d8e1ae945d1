"""The HTTP API for the pictures that a model keeps: they are private, so every request needs the token."""

from typing import Any

from fastapi import APIRouter, Depends

from geodl.app.kept import Kept
from geodl.app.serve import schemas
from geodl.app.serve.api import REFUSALS, ServerDep, model, needs_token
from geodl.app.serve.server import Server

SIDE = 192
"""Side of a picture in a response, in pixels."""

pictures = APIRouter(
    prefix="/api/v1/pictures",
    responses=REFUSALS,
    dependencies=[Depends(needs_token)],
    tags=["pictures"],
)


@pictures.get("", response_model=list[Kept])
def listed(server: ServerDep) -> Any:
    """List the images that look mislabelled, the most certain mistakes first, then the other pictures that the model keeps."""
    return [] if server.model.version is None else server.model.kept()


@pictures.get("/{key}", response_model=schemas.Picture)
async def picture(key: str, server: ServerDep) -> schemas.Picture:
    """Return a kept picture."""
    return await server.run(True, _thumbnail, server, key)


def _thumbnail(server: Server, key: str) -> schemas.Picture:
    images, row = server.model.kept_picture(key)
    return schemas.Picture.of(images.decode(row, at_least=SIDE), SIDE)


@pictures.post("/move", response_model=schemas.Model)
def move(body: schemas.Move, server: ServerDep) -> dict[str, Any]:
    """Move learned images to another class, as if they had been learned that way; moving them to their own class confirms it."""
    server.teacher.require_idle()
    server.model.relabel(body.ids, body.label)
    return model(server, True)


@pictures.post("/forget", response_model=schemas.Model)
def forget(body: schemas.Forget, server: ServerDep) -> dict[str, Any]:
    """Forget learned images, as if they had never been learned."""
    server.teacher.require_idle()
    server.model.forget(body.ids)
    return model(server, True)
