"""A head that others made becomes ours, or one format another: checked like every export.

    python -m scripts.convert source=user/repo@rev target_id=user/model to=outputs/heads/theirs
    python -m scripts.convert source=folder target_id=user/model to=folder format=speculators

`source` is a folder or Hub id: an original EAGLE or Medusa checkpoint (pytorch_model.bin, medusa_lm_head.pt or
safetensors; pickles are read with weights_only), a folder in an engine's layout, a speculators folder, or one of ours.
Format native, the default, is what `python -m eval`, warm start and `python -m scripts.export` read.
"""

from dataclasses import dataclass

from conf.entry import run
from scripts import export
from scripts.export import ExportRun


@dataclass
class ConvertRun:
    """Settings of this stage; conf/convert.yaml merges into it."""

    name: str = "convert"
    outputs: str = "outputs"
    source: str = ""  # folder or Hub id (user/repo@rev)
    to: str = ""  # folder to write
    target_id: str | None = None  # embedded name, folder or Hub id of the target; heads made here know theirs
    format: str = "native"  # native | vllm | sglang | speculators
    dtype: str = "float32"
    base_model: str | None = None  # Hub id to serve with; null: the target
    license: str = "other"  # of the head: its makers say which
    untrained: bool = False  # true: norms that are all exactly 1.0 are meant


def main(settings: ConvertRun) -> None:
    for key in ("source", "to"):
        if not getattr(settings, key):
            raise ValueError(f"{key} is missing: python -m scripts.convert source=FOLDER_OR_ID to=FOLDER target_id=ID")
    export.main(
        ExportRun(
            name=settings.name,
            outputs=settings.outputs,
            trained=settings.source,
            target_id=settings.target_id,
            out=settings.to,
            format=settings.format,
            dtype=settings.dtype,
            base_model=settings.base_model,
            license=settings.license,
            untrained=settings.untrained,
        )
    )


if __name__ == "__main__":
    run("convert", ConvertRun, main)
