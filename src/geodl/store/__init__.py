"""Directories of runs and models: one pointer file, immutable files named by their SHA-256, nothing pickled.

- `head.json`: what the directory was made with, its complete phases with the files of each, and those that were undone;
- `head-copy.json`: the same, for where the head is lost or damaged;
- `objects/SHA256`: the files, each once, however many phases name it;
- `progress/checkpoint-GENERATION`: where the unfinished phase stands; it can always be computed again;
- `events.jsonl`: what happened when (phases hold no times);
- `tensorboard/`: curves, where they are asked for;
- `report.html`: written by the report;
- `lock`: held by the one writer, and `writer.json`: who that is.

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
