"""Where a run's features come from: the store that fits it, and checks that they are what the target gives."""

from pathlib import Path
from typing import Any

from data.build import CaptureSettings
from data.capture import contents_of, folder_for
from data.store import PickedTaps, Store
from heads.masks import LayerMasks, document_masks
from heads.target import Target, TargetParityError
from train.batches import collate
from train.settings import TrainSettings


def open_store(
    train: TrainSettings, outputs: str | Path, dataset: Path, split: str, target: Target, head: Any
) -> PickedTaps:
    """The capture of exactly these rows, target, taps, dtype and teacher; the error says how to make it.

    Raises ValueError also for a head that reads what the capture does not keep.
    """
    stored = list(head.taps) if train.captured_taps is None else train.captured_taps
    made = CaptureSettings(True, stored, train.captured_dtype, train.captured_teacher, train.captured_top_m)
    made.check()
    if train.captured_teacher == "top_m" and head.reads_last:
        raise ValueError(
            f"head {head.config.kind!r} reads the target's last hidden state, which a capture with teacher=top_m does "
            "not keep: capture with data.capture.teacher=last and set train.captured_teacher=last"
        )
    contents = contents_of(made, target.spec, split)
    folder = folder_for(outputs, dataset, split, target.spec, contents)
    if not (folder / "index.json").is_file():
        kept = f" data.capture.teacher=top_m data.capture.top_m={train.captured_top_m}"
        raise ValueError(
            f"{folder}: no captured features of {dataset} with taps {stored} in {made.dtype}; make them "
            f"with python -m data data.capture.enabled=true 'data.capture.taps={stored}' "
            f"data.capture.dtype={made.dtype}{kept if made.teacher == 'top_m' else ''}, or set train.features=online"
        )
    return PickedTaps(Store(folder, target.spec, contents), head.taps)


def check_store(target: Target, rows: list[dict[str, Any]], store: PickedTaps, taps: tuple[int, ...]) -> None:
    """A captured cache must be this target's: compare one row with a live pass, token by token."""
    batch = collate(rows[:1], [0], store)
    live = target.forward(batch.ids.to(target.device), taps=taps)
    for kept, own in ((batch.last, live.last), (batch.taps, live.taps)):
        if kept is None or own is None:
            continue
        gap = float(((kept - own.cpu().float()).norm(dim=-1) / own.cpu().float().norm(dim=-1).clamp_min(1e-6)).max())
        if not gap < 0.15:  # int8 is off by up to some percent
            raise TargetParityError(
                f"captured features of row 0 differ from a live pass by {gap:.2g} of their size: capture them again"
            )


def check_packing(target: Target, rows: list[dict[str, Any]]) -> None:
    """Two conversations in one line must be what they are apart: else this target mixes them whatever the mask."""
    short = sorted(range(len(rows)), key=lambda n: len(rows[n]["ids"]))[:2]
    pair = [rows[n] for n in short]
    packed, apart = (collate(pair, short, sizes=sizes).to(target.device) for sizes in ([len(pair)], None))
    mask = document_masks(LayerMasks(target, "train.packing cannot keep packed conversations apart"), packed.documents)
    together = target.forward(packed.ids, positions=packed.positions, mask=mask).last[packed.documents >= 0].float()
    alone = target.forward(apart.ids).last[apart.documents >= 0].float()
    gap = float((together - alone).norm() / alone.norm())
    if not gap < (1e-3 if target.spec.dtype == "float32" else 0.05):
        raise TargetParityError(
            f"target {target.spec.name!r} gives packed conversations other features than the same ones apart "
            f"({gap:.2g} of their size): use train.packing=false, or captured features"
        )
