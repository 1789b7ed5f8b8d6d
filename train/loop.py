"""One loop for every head: batch -> features -> loss -> step, held-out evaluation, best checkpoint, exact resume."""

import contextlib
import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from heads.hub import save_head
from heads.target import Target
from train import checkpoint
from train.batches import Batch, FeatureStore, Order, collate, share
from train.evaluate import Tally, evaluate
from train.objective import LossSettings, Objective, slot_counts
from train.optim import OptimSettings, build_optimizer, learning_rate
from train.track import Track
from train.unroll import draw_slots, step_mask


@dataclasses.dataclass
class TrainSettings:
    steps: int = 2000  # optimizer steps
    batch_size: int = 8  # conversations per optimizer step, over all ranks and micro-batches
    micro_batch_size: int = 8  # conversations in one forward pass of one rank
    eval_every: int = 250
    eval_rows: int = 64  # held-out conversations per evaluation (0: all)
    save_every: int = 250
    predict_k: int = 4  # chain length the predicted acceptance length is for
    predict_tokens: int = 64  # answers are cut here, as evaluation cuts them
    seed: int = 0
    max_bad_steps: int = 10  # non-finite steps in a row before the run stops
    features: str = "online"  # online: run the target in each step | captured: read what data.capture wrote
    captured_taps: list[int] | None = None  # taps of that capture; null: the head's own
    captured_dtype: str = "float32"
    wandb: str = "auto"  # auto: online when logged in, else offline | online | offline | disabled
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
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at least 1")
        if self.features not in ("online", "captured"):
            raise ValueError(f"train.features={self.features!r} must be 'online' or 'captured'")
        if self.predict_tokens < 2:
            raise ValueError(f"train.predict_tokens={self.predict_tokens} must be at least 2")


@dataclasses.dataclass
class Data:
    """Token rows of one run and, when captured, their features."""

    train: list[dict[str, Any]]
    heldout: list[dict[str, Any]]
    train_store: FeatureStore | None = None
    heldout_store: FeatureStore | None = None


@dataclasses.dataclass
class State:
    """Counters of a run; saved with each checkpoint."""

    step: int = 0
    tokens: int = 0  # trained first-step slots so far
    seconds: float = 0.0
    bad_in_a_row: int = 0
    skipped: int = 0
    best: float = 0.0


class Stopped(KeyboardInterrupt):
    """SIGTERM or Ctrl-C: the state is saved, the same command goes on."""


class Loop:
    def __init__(
        self,
        settings: TrainSettings,
        head: Any,
        target: Target,
        data: Data,
        folder: Path,
        accelerator: Accelerator,
        provenance: dict[str, Any],
    ) -> None:
        self.settings, self.target, self.data, self.folder = settings, target, data, folder
        self.accelerator, self.provenance = accelerator, provenance
        self.head = head.to(accelerator.device)
        target.to(accelerator.device)
        head.attach(target)
        self.objective = Objective(head, target, settings.loss).to(accelerator.device)
        self.optimizer = build_optimizer(head.parameters(), settings.optim)
        self.state = State()
        self.order = Order([len(row["ids"]) for row in data.train], settings.batch_size, settings.seed)
        self._stop = False

    def run(self) -> State:
        """Train to `settings.steps`; raises Stopped after SIGTERM or SIGINT, with the state saved."""
        checkpoints = self.folder / "checkpoints"
        found = checkpoint.latest(checkpoints)
        if found is not None:
            self.state = State(**checkpoint.restore(found, self.head, self.optimizer))
        model, optimizer = self.accelerator.prepare(self.objective, self.optimizer)
        main = self.accelerator.is_main_process
        mode = self.settings.wandb if main else "disabled"
        # Without a checkpoint the run starts over: even the line of step 0 will be written again.
        kept = self.state.step if found is not None else -1
        track = Track(self.folder, self.folder.name, self.provenance, mode, kept) if main else None
        try:
            with self._signals():
                self._steps(model, optimizer, track, checkpoints)
        finally:
            if track is not None:
                track.close()
        return self.state

    def _steps(self, model: Any, optimizer: Any, track: Track | None, checkpoints: Path) -> None:
        settings, state = self.settings, self.state
        progress = tqdm(
            total=settings.steps,
            initial=state.step,
            desc=f"train {self.head.config.kind}",
            unit="step",
            disable=track is None,
        )
        if state.step == 0:
            self._evaluate(track)
        while state.step < settings.steps:
            started = time.perf_counter()
            figures = self._step(model, optimizer)
            state.step += 1
            state.seconds += time.perf_counter() - started
            if track is not None:
                track.log(state.step, "train", {**figures, "tokens": state.tokens, "seconds": round(state.seconds, 2)})
            progress.update()
            progress.set_postfix(loss=f"{figures['loss']:.3f}", acc=f"{figures['accuracy'][0]:.2f}", refresh=False)
            last = state.step == settings.steps
            if state.step % settings.eval_every == 0 or last:
                self._evaluate(track)
            stopping = self._should_stop()
            if state.step % settings.save_every == 0 or last or stopping:
                self._save(checkpoints)
            if stopping and not last:
                progress.close()
                raise Stopped(f"stopped at step {state.step}; the same command goes on from there")
        progress.close()

    def _step(self, model: Any, optimizer: Any) -> dict[str, Any]:
        settings, state, accelerator = self.settings, self.state, self.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        numbers = self.order.at(state.step)
        batches = [self._batch(part, numbers) for part in share(numbers, rank, world, settings.micro_batch_size)]
        steps = self.head.train_steps
        local = torch.stack([slot_counts(b.asst, b.documents, steps, b.drawn) for b in batches]).sum(0)
        counts = accelerator.reduce(local.to(accelerator.device), reduction="sum")
        lr = learning_rate(state.step, settings.steps, settings.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sums = torch.zeros(2, steps)
        for i, batch in enumerate(batches):
            waits = contextlib.nullcontext() if i == len(batches) - 1 else accelerator.no_sync(model)
            with waits:
                loss, metrics = model(batch, counts)
                # DDP averages gradients over ranks; the loss is already over the slots of all of them.
                accelerator.backward(loss * world)
            sums += torch.stack([metrics["loss"], metrics["correct"]])
        norm = accelerator.clip_grad_norm_(self.head.parameters(), settings.optim.clip)
        sums = accelerator.reduce(sums.to(accelerator.device), reduction="sum").cpu()
        if int(counts[0]):
            self._apply(optimizer, bool(torch.isfinite(sums).all()) and bool(torch.isfinite(torch.as_tensor(norm))))
        else:  # nothing to learn from: momentum and weight decay must not move the head either
            optimizer.zero_grad()
            state.skipped += 1
        state.tokens += int(counts[0])
        per_slot = sums / counts.cpu().clamp_min(1)
        weights = settings.loss.step_decay ** torch.arange(steps)
        return {
            "loss": float((per_slot[0] * weights).sum()),
            "step_loss": per_slot[0].tolist(),
            "accuracy": per_slot[1].tolist(),
            "lr": lr,
            "gradient_norm": float(norm),
            "skipped": state.skipped,
        }

    def _apply(self, optimizer: Any, finite: bool) -> None:
        """Step the optimizer, or skip a non-finite step and stop after too many in a row."""
        state = self.state
        if finite:
            optimizer.step()
            state.bad_in_a_row = 0
        else:
            state.skipped += 1
            state.bad_in_a_row += 1
        optimizer.zero_grad()
        if state.bad_in_a_row >= self.settings.max_bad_steps:
            raise ValueError(
                f"loss or gradient was not finite for {state.bad_in_a_row} steps in a row (step {state.step + 1}): "
                "lower train.optim.lr or use launcher.mixed_precision=bf16 or no"
            )

    def _batch(self, part: list[int], numbers: list[int]) -> Batch:
        """A micro-batch; an empty share (fewer conversations than ranks) becomes one conversation without loss."""
        rows = part or numbers[:1]
        batch = collate([self.data.train[n] for n in rows], rows, self.data.train_store)
        if not part:
            batch.asst = torch.zeros_like(batch.asst)
        if most := self.head.max_slots:
            every = step_mask(batch.asst, batch.documents, 0)
            batch.drawn = draw_slots(every, most, rows, self.settings.seed, self.state.step)
        return batch.to(self.accelerator.device)

    def _evaluate(self, track: Track | None) -> None:
        """Held-out figures over all ranks; saves the head as `best/` when its predicted tau is the best so far."""
        settings, accelerator = self.settings, self.accelerator
        k = min(settings.predict_k, self.head.max_draft)
        rows = self.data.heldout[: settings.eval_rows or None]
        mine = list(range(accelerator.process_index, len(rows), accelerator.num_processes))
        tally, losses = Tally.empty(k), torch.zeros(2, self.head.train_steps, dtype=torch.float64)
        self.head.eval()
        for start in range(0, len(mine), settings.micro_batch_size):
            part = mine[start : start + settings.micro_batch_size]
            batch = collate([rows[n] for n in part], part, self.data.heldout_store).to(accelerator.device)
            tally.add(evaluate(self.objective, batch, k, settings.predict_tokens))
            losses += self._heldout_loss(batch)
        self.head.train()
        for field in dataclasses.fields(tally):
            value = torch.as_tensor(getattr(tally, field.name), dtype=torch.float64).to(accelerator.device)
            total = accelerator.reduce(value, reduction="sum").cpu()
            setattr(tally, field.name, total if isinstance(getattr(tally, field.name), Tensor) else int(total))
        losses = accelerator.reduce(losses.to(accelerator.device), reduction="sum").cpu()
        figures = tally.figures()
        figures["loss"] = float((losses[0] / losses[1].clamp_min(1) * self._weights()).sum())
        if track is not None:
            track.log(self.state.step, "heldout", figures)
            predicted = float(figures["predicted_acceptance_length"])  # type: ignore[arg-type]
            if predicted > self.state.best or self.state.step == 0:
                self.state.best = predicted
                note = {**self.provenance, "step": self.state.step, "tokens": self.state.tokens, "heldout": figures}
                save_head(self.folder / "best", self.head, self.target.spec, note)

    def _heldout_loss(self, batch: Batch) -> Tensor:
        counts = slot_counts(batch.asst, batch.documents, self.head.train_steps)
        with torch.no_grad():
            _, metrics = self.objective(batch, counts)
        return torch.stack([metrics["loss"].double(), counts.double().cpu()])

    def _weights(self) -> Tensor:
        return self.settings.loss.step_decay ** torch.arange(self.head.train_steps, dtype=torch.float64)

    def _save(self, checkpoints: Path) -> None:
        if self.accelerator.is_main_process:
            checkpoint.save(checkpoints, self.state.step, self.head, self.optimizer, dataclasses.asdict(self.state))
        self.accelerator.wait_for_everyone()

    def _should_stop(self) -> bool:
        """Whether any rank was asked to stop: all ranks leave at the same step."""
        if self.accelerator.num_processes == 1:
            return self._stop
        flag = torch.tensor(float(self._stop), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    @contextlib.contextmanager
    def _signals(self) -> Any:
        def ask(number: int, frame: Any) -> None:
            self._stop = True

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
