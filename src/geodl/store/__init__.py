"""Directories of runs and models: one pointer file, immutable files named by their SHA-256, nothing pickled.

- `head.json`: configuration and environment, the complete phases with their files, and the undone phases;
- `head-copy.json`: a copy, used if the head is lost or damaged;
- `objects/SHA256`: the files; phases that have a file in common share it;
- `progress/checkpoint-GENERATION`: the checkpoint of the unfinished phase, which is disposable;
- `events.jsonl`: the log, with times (phases hold none);
- `tensorboard/`: curves, if they are enabled;
- `report.html`: written by the report;
- `lock`: held by the only writer, and `writer.json`: its process and host.

Replacing `head.json` is the commit of every change. Version 0.2 wrote another layout (`old_format`).
"""

from geodl.store.directory import Directory, reading, refuse_foreign, remove_directory
from geodl.store.head import File, SavedPhase, exists, stamp

__all__ = [
    "Directory",
    "File",
    "SavedPhase",
    "exists",
    "reading",
    "refuse_foreign",
    "remove_directory",
    "stamp",
]
