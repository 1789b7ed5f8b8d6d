"""Make the data folder: python -m data [name=default] [data=own-prompts] [data.limit=64] [data.regenerate.seed=1] ...

Answers by a server: data.regenerate.server=http://localhost:8000 data.regenerate.server_model=NAME (an API key is read
from the environment variable DRAFTHEAD_SERVER_KEY). Other data: 'data.source=[FILE]' data.columns.prompt=COLUMN; what
data.evaluation_sets holds is kept out of training.

Prompts are split by hash, answered by the target, and written as token ids with loss masks to outputs/data/<name>; with
data.capture.enabled=true the target's hidden states follow in outputs/features/<fingerprint>, by several processes with
launcher=cpu2 or launcher=gpu. Interrupted, it goes on where it stopped; finished, it says so in one line. The last line
of standard output is a JSON object.
"""

import datetime
import json
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState

from conf.entry import run
from conf.launch import LauncherSettings, processes_to_start, relaunch_if_needed
from data import rows
from data.build import DataSettings, build
from data.capture import Ranks, capture
from heads.target import Target, TargetSettings

# Ranks wait for the first one's rows and for each other's shards; the default of half an hour is for training steps.
PATIENCE = datetime.timedelta(days=30)


@dataclass
class DataRun:
    """Settings of this stage; conf/data.yaml merges into it."""

    name: str = "default"
    outputs: str = "outputs"
    target: TargetSettings = field(default_factory=TargetSettings)
    data: DataSettings = field(default_factory=DataSettings)
    launcher: LauncherSettings = field(default_factory=LauncherSettings)  # of the capture; rows are made by one process


def main(settings: DataRun) -> int | None:
    """Build the rows, then the hidden states where asked for."""
    settings.data.check()
    folder = Path(settings.outputs) / "data" / settings.name
    if not settings.data.capture.enabled:
        build(_reader(settings), settings.data, folder)
        _report(folder, {})
        return None
    if processes_to_start(settings.launcher) > 1:
        # here, with all cores to itself: the ranks then find the rows finished
        build(_reader(settings), settings.data, folder)
        return relaunch_if_needed(settings.launcher, "data")
    state = PartialState(cpu=settings.launcher.cpu, timeout=PATIENCE)
    target = Target.load(settings.target)
    if state.is_main_process:
        build(target, settings.data, folder)
    state.wait_for_everyone()
    features = _capture(settings, target.to(state.device), folder, state)
    if state.is_main_process:
        _report(folder, features)
    state.destroy_process_group()
    return None


def _reader(settings: DataRun) -> Target:
    """The target for making rows: without its weights where nothing runs it."""
    return Target.load(settings.target, weights=settings.data.regenerate.in_process)


def _capture(settings: DataRun, target: Target, folder: Path, state: PartialState) -> dict[str, str]:
    """Folder of the features of each split that has rows."""
    ranks = Ranks(state.process_index, state.num_processes, state.wait_for_everyone)
    counts = rows.manifest(folder)["counts"]
    capture_settings, outputs = settings.data.capture, settings.outputs
    splits = [split for split in ("train", "heldout") if counts[split]]
    return {split: str(capture(target, capture_settings, folder, split, outputs, ranks)) for split in splits}


def _report(folder: Path, features: dict[str, str]) -> None:
    manifest = rows.manifest(folder)
    names = ("fingerprint", "counts")
    print(json.dumps({"folder": str(folder), **{name: manifest[name] for name in names}, "features": features}))


if __name__ == "__main__":
    run("data", DataRun, main)
