"""Make the data folder: python -m data [name=default] [data=own-prompts] [data.limit=64] [data.regenerate.seed=1] ...

Answers by a server: data.regenerate.server=http://localhost:8000 data.regenerate.server_model=NAME (an API key is read
from the environment variable DRAFTHEAD_SERVER_KEY). Other data: 'data.source=[FILE]' data.columns.prompt=COLUMN; what
data.evaluation_sets holds is kept out of training.

Prompts are split by hash, answered by the target, and written as token ids with loss masks to outputs/data/<name>; with
data.capture.enabled=true the target's hidden states follow in outputs/features/<fingerprint>. Interrupted, it goes on
where it stopped; finished, it says so in one line. The last line of standard output is a JSON object.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from conf.entry import run
from data.build import DataSettings, build
from data.capture import capture
from heads.target import Target, TargetSettings


@dataclass
class DataRun:
    """Settings of this stage; conf/data.yaml merges into it."""

    name: str = "default"
    outputs: str = "outputs"
    target: TargetSettings = field(default_factory=TargetSettings)
    data: DataSettings = field(default_factory=DataSettings)


def main(settings: DataRun) -> None:
    """Build the rows, then the hidden states where asked for."""
    settings.data.check()
    folder = Path(settings.outputs) / "data" / settings.name
    target = Target.load(settings.target)
    manifest = build(target, settings.data, folder)
    features = {}
    if settings.data.capture.enabled:
        for split in ("train", "heldout"):
            if manifest["counts"][split]:
                features[split] = str(capture(target, settings.data.capture, folder, split, settings.outputs))
    result = {
        "folder": str(folder),
        "fingerprint": manifest["fingerprint"],
        "counts": manifest["counts"],
        "features": features,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    run("data", DataRun, main)
