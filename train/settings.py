"""Settings of a training run; those of the loss and the optimizer stand beside what reads them."""

import dataclasses

from data.store import TEACHERS
from train.joint import JointSettings
from train.layout import Layout
from train.mixture import LossSettings
from train.optim import OptimSettings


@dataclasses.dataclass
class TrainSettings:
    steps: int = 2000  # optimizer steps
    batch_size: int = 8  # conversations per optimizer step, over all ranks and micro-batches
    micro_batch_size: int = 8  # conversations (packing: lines of them) in one forward pass of one rank
    max_tokens: int | None = None  # in place of micro_batch_size: padded tokens in one forward pass of one rank
    packing: bool = False  # conversations of a step share lines of pack_length tokens, see train/layout.py
    pack_length: int = 2048
    eval_every: int = 250
    eval_rows: int = 64  # held-out conversations per evaluation (0: all)
    save_every: int = 250
    predict_k: int = 4  # chain length the predicted acceptance length is for
    predict_tokens: int = 64  # answers are cut here, as evaluation cuts them
    live_prompts: int = 8  # held-out prompts that a live run decodes; its acceptance length selects. 0: predicted does
    live_every: int | None = None  # steps between live runs, a multiple of eval_every; null: at each evaluation
    live_tokens: int = 64  # new tokens of each prompt
    live_temperatures: list[float] = dataclasses.field(default_factory=lambda: [1.0])  # their mean selects
    patience: int = 0  # selections without a better one before the run stops; 0: never
    seed: int = 0
    max_bad_steps: int = 10  # non-finite steps in a row before the run stops
    warm_start: str | None = None  # start from the trained head in this folder or Hub repository, with its map
    features: str = "online"  # online: run the target in each step | captured: read what data.capture wrote
    captured_taps: list[int] | None = None  # taps of that capture; null: the head's own
    captured_dtype: str = "float32"
    captured_teacher: str = "last"  # last | top_m, and how many, as in that capture
    captured_top_m: int = 32
    wandb: str = "auto"  # auto: online when logged in, else offline | online | offline | disabled
    joint: JointSettings = dataclasses.field(default_factory=JointSettings)
    loss: LossSettings = dataclasses.field(default_factory=LossSettings)
    optim: OptimSettings = dataclasses.field(default_factory=OptimSettings)

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "micro_batch_size",
            "eval_every",
            "save_every",
            "predict_k",
            "max_bad_steps",
            "pack_length",
            "captured_top_m",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 1")
        if self.features not in ("online", "captured"):
            raise ValueError(f"train.features={self.features!r} must be 'online' or 'captured'")
        if self.joint.mode and self.features == "captured":
            raise ValueError(
                f"train.joint.mode={self.joint.mode} changes the target at every step, captured features stay those of "
                "the frozen one: set train.features=online"
            )
        if self.captured_teacher not in TEACHERS:
            raise ValueError(f"train.captured_teacher={self.captured_teacher!r} must be 'last' or 'top_m'")
        if self.max_tokens is not None and self.max_tokens < (self.pack_length if self.packing else 1):
            least = "train.pack_length" if self.packing else "1"
            raise ValueError(f"train.max_tokens={self.max_tokens} must be null or at least {least}")
        for name in ("predict_tokens", "live_tokens"):
            if getattr(self, name) < 2:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 2")
        for name in ("live_prompts", "patience", "eval_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 0")
        if self.live_every is not None and (self.live_every < 1 or self.live_every % self.eval_every):
            raise ValueError(f"train.live_every={self.live_every} must be a multiple of eval_every={self.eval_every}")
        if not self.live_temperatures or min(self.live_temperatures) < 0:
            raise ValueError(f"train.live_temperatures={self.live_temperatures}: give at least one, none below 0")

    def layout(self) -> Layout:
        return Layout(self.micro_batch_size, self.max_tokens, self.pack_length if self.packing else None)
