"""The kept pictures over HTTP: they are private, so that all of it needs the token."""

from typing import Any

from fastapi import APIRouter, Depends

from geodl.app.kept import Kept
from geodl.app.serve import schemas
from geodl.app.serve.api import REFUSALS, Here, model, needs_token
from geodl.app.serve.server import Server
from geodl.model.page import thumbnail, webp

SIDE = 192
"""Pixels a side of a picture that is shown."""

pictures = APIRouter(
    prefix="/api/v1/pictures",
    responses=REFUSALS,
    dependencies=[Depends(needs_token)],
    tags=["pictures"],
)


@pictures.get("", response_model=list[Kept])
def listed(here: Here) -> Any:
    """List the images with doubtful classes, the surest mistakes first, then the other pictures that the model keeps."""
    return [] if here.model.version is None else here.model.kept()


@pictures.get("/{key}", response_model=schemas.Picture)
async def picture(key: str, here: Here) -> dict[str, str]:
    """Show a kept picture."""
    return {"image": await here.run(True, _shown, here, key)}


def _shown(here: Server, key: str) -> str:
    images, row = here.model.kept_picture(key)
    image = thumbnail(images.decode(row, at_least=SIDE), SIDE)
    return f"data:image/webp;base64,{webp(image)}"


@pictures.post("/move", response_model=schemas.Model)
def move(wanted: schemas.Move, here: Here) -> dict[str, Any]:
    """Move learned images to another class, as if they had been learned so; to their own: it is no longer doubted."""
    here.writer.insist_idle()
    here.model.relabel(wanted.ids, wanted.label)
    return model(here, True)


@pictures.post("/forget", response_model=schemas.Model)
def forget(wanted: schemas.Forget, here: Here) -> dict[str, Any]:
    """Forget learned images, as if they had never been learned."""
    here.writer.insist_idle()
    here.model.forget(wanted.ids)
    return model(here, True)
