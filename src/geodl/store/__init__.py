"""Run and model directories: every write is atomic, every read verified, nothing is pickled.

- `config.json`: what the directory was made with: configuration, environment, number of phases;
- `phases/NN/`: `model.safetensors`, `memory.safetensors`, `metrics.json`, `extra.json` of one complete phase, of some
  methods `statistics.safetensors`, and `manifest.json` with the checksum of each;
- `undone/NN/`: phases that were taken back, until another one is saved;
- `progress/checkpoint.safetensors`: where the unfinished phase stands; `damaged-progress`: one that was set aside;
- `teaching/`: images that a server took in and has not learned yet;
- `events.jsonl`: what happened when (phases hold no times);
- `tensorboard/`: curves, where they are asked for;
- `report.html`: written by the report;
- `lock`: held by the one writer.
"""

from geodl.store.directory import Phase, RunDirectory, read_steadily
from geodl.store.record import has_record
from geodl.store.runs import list_runs, remove_run, summarize

__all__ = [
    "Phase",
    "RunDirectory",
    "has_record",
    "list_runs",
    "read_steadily",
    "remove_run",
    "summarize",
]
