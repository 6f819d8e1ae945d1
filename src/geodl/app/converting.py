"""A model's network and classifier as one ONNX graph, for predictions without torch (`geodl.app.quick`)."""

import io
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geodl.app.quick import ABOUT, About, run, session_of
from geodl.core.cache import CONVERTED, Cache
from geodl.data.batches import as_inputs
from geodl.data.images import ArrayImages
from geodl.model.features import Features
from geodl.model.recognizer import Recognizer
from geodl.nets import Backbone, Network, OnnxBackbone

KEPT = 8
"""Converted models in the cache."""
TOLERANCE = 1e-4
"""The largest difference between confidences."""
OUTPUTS = ["probabilities", "scores"]
_log = logging.getLogger("geodl")


class _Views(nn.Module):
    """From pixels, uint8 (B, 3, size, size), to inputs of the network: (B, 3, size, size), and mirrored copies after them."""

    def __init__(self, recognizer: Recognizer) -> None:
        super().__init__()
        self.transform, self.mirrors = recognizer.transform, recognizer.scorer.mirrors

    def forward(self, pixels: Tensor) -> Tensor:
        x = as_inputs(pixels.float(), self.transform)
        return torch.cat([x, x.flip(3)]) if self.mirrors else x


class _Given(Backbone):
    """The maps of all levels, which another graph computes, in the place of a backbone."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.width, self.level_grids = backbone.width, backbone.level_grids

    def levels(self, x: Any) -> dict[str, Tensor]:
        return dict(zip(self.level_grids, x, strict=True))


class _Answers(nn.Module):
    """From the maps of all levels for the views of B images to probabilities (B, C) and scores (B,)."""

    def __init__(self, recognizer: Recognizer) -> None:
        super().__init__()
        network = recognizer.network
        self.scorer, self.network = (
            recognizer.scorer,
            Network(_Given(network.backbone), network.head),
        )

    def forward(self, *maps: Tensor) -> tuple[Tensor, Tensor]:
        sides = 2 if self.scorer.mirrors else 1
        parts = (part.chunk(sides) for part in maps)
        views = [self._features(each) for each in zip(*parts, strict=True)]
        answers = self.scorer.answers(*views)
        return answers.probabilities, answers.measure

    def _features(self, maps: Sequence[Tensor]) -> Features:
        output, levels = self.network.with_levels(maps, self.scorer.levels)  # type: ignore[arg-type]
        return Features(output.pooled, output.logits, torch.empty(0), levels)


def keep_converted(recognizer: Recognizer, name: str) -> None:
    """Put the graph into the cache under a name; where that does not work, nothing is lost but time."""
    try:
        graph = converted(recognizer)
        if graph is not None:
            Cache().write(name, graph)
            Cache().keep_latest(CONVERTED, KEPT)
    except Exception as error:  # of a library that converts, of the disk
        _log.debug("not converted: %s", error)


def converted(recognizer: Recognizer) -> bytes | None:
    """Return the graph; None where the network has none of its own, or the graph gives other answers."""
    backbone, transform = recognizer.network.backbone, recognizer.transform
    if not isinstance(backbone, OnnxBackbone) or transform.shorter_side != transform.size:
        return None
    import onnx
    from onnx.compose import add_prefix_graph, merge_graphs

    size, names = transform.size, list(backbone.level_grids)
    drawn = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=drawn)
    views, answers = _Views(recognizer), _Answers(recognizer)
    with torch.no_grad():
        maps = list(backbone.levels(views(pixels)).values())
        answers(*maps)  # the expansion draws its weights at the first use: not while it is traced
    first = _traced(views, [pixels], ["pixels"], ["views"])
    last = _traced(answers, maps, names, OUTPUTS)
    levels = onnx.load_from_string(backbone.graph())
    begin = add_prefix_graph(first.graph, "first/", rename_inputs=False, rename_outputs=False)
    inner = merge_graphs(begin, levels.graph, [("views", "images")])
    used = [(each.name, each.name) for each in last.graph.input]  # not all levels may be
    outer = merge_graphs(inner, last.graph, used, outputs=OUTPUTS)
    whole = onnx.helper.make_model(
        outer, ir_version=levels.ir_version, opset_imports=levels.opset_import
    )
    lowest = recognizer.scorer.threshold
    about = About(recognizer.classes, size, transform.whole, lowest)
    whole.metadata_props.add(key=ABOUT, value=json.dumps(asdict(about)))
    graph: bytes = whole.SerializeToString()
    return graph if _agrees(graph, recognizer, pixels) else None


def _traced(module: nn.Module, inputs: list[Tensor], names: list[str], outputs: list[str]) -> Any:
    """Return the ONNX graph of a module, for any number of images."""
    import onnx

    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch prefers its other exporter, which takes ten seconds
        torch.onnx.export(
            module.eval(),
            tuple(inputs),
            file,  # type: ignore[arg-type]  # which it takes
            dynamo=False,
            input_names=names,
            output_names=outputs,
            dynamic_axes={name: {0: "batch"} for name in (*names, *outputs)},
            opset_version=17,
        )
    found = onnx.load_from_string(file.getvalue())
    _share_constants(found.graph)
    return found


def _share_constants(graph: Any) -> None:
    """Let equal constants be one: an image and its mirrored copy pass the same large weights."""
    first: dict[bytes, str] = {}
    names: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        if node.op_type == "Constant":
            content = node.attribute[0].SerializeToString(deterministic=True)
            names[node.output[0]] = first.setdefault(content, node.output[0])
        if names.get(node.output[0]) in (None, node.output[0]):
            node.input[:] = [names.get(each, each) for each in node.input]
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _agrees(graph: bytes, recognizer: Recognizer, pixels: Tensor) -> bool:
    """Return whether the graph gives what the model gives for pixels."""
    images = ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))
    answers = recognizer.answers(images)
    ours = (answers.probabilities, answers.measure)
    theirs = run(session_of(graph), pixels.numpy())
    return all(
        np.allclose(a.numpy(), b, rtol=0, atol=TOLERANCE) for a, b in zip(ours, theirs, strict=True)
    )
