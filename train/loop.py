"""One loop for every head: batch -> features -> loss -> step, held-out evaluation, best checkpoint, exact resume."""

import contextlib
import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm  # type: ignore[import-untyped]

from heads.hub import save_head
from heads.target import Target
from train import checkpoint
from train.batches import Batch, FeatureStore, Order, collate
from train.joint import Joint
from train.objective import Objective
from train.optim import build_optimizer, learning_rate, set_rate
from train.select import Measure, Selection
from train.settings import TrainSettings
from train.track import Track
from train.unroll import draw_slots, step_mask


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
    best: float = 0.0  # acceptance length of the head in best/
    waited: int = 0  # selections since then


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
        measure: Measure | None = None,
    ) -> None:
        """`measure` decodes for live runs; needed where `settings.live_prompts` is above 0."""
        self.settings, self.target, self.data, self.folder = settings, target, data, folder
        self.accelerator, self.provenance = accelerator, provenance
        self.head = head.to(accelerator.device)
        target.to(accelerator.device)
        head.attach(target)
        joint = settings.joint
        objective = Joint(head, target, settings.loss, joint) if joint.mode else Objective(head, target, settings.loss)
        self.objective, self.lora = objective.to(accelerator.device), objective.lora
        adapters = self.lora.parameters() if self.lora is not None else ()
        times = joint.head_lr_times if joint.mode else 1.0
        self.optimizer = build_optimizer(head.parameters(), settings.optim, adapters, times)
        self.state = State()
        self.lengths = [len(row["ids"]) for row in data.train]
        self.order = Order(self.lengths, settings.batch_size, settings.seed)
        self.layout = settings.layout()
        self.selection = Selection(settings, self.objective, data.heldout, data.heldout_store, accelerator, measure)
        self._stop = False

    @property
    def exhausted(self) -> bool:
        """Whether the run has waited long enough for a better head."""
        return 0 < self.settings.patience <= self.state.waited

    def run(self) -> State:
        """Train to `settings.steps`; raises Stopped after SIGTERM or SIGINT, with the state saved."""
        checkpoints = self.folder / "checkpoints"
        found = checkpoint.latest(checkpoints)
        if found is not None:
            self.state = State(**checkpoint.restore(found, self.head, self.optimizer, self.lora))
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
        while state.step < settings.steps and not self.exhausted:
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
                last = last or self.exhausted
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
        batches = [self._batch(part, numbers) for part in self.layout.passes(numbers, self.lengths, rank, world)]
        self.objective.progress = (state.step + 1) / settings.steps
        local = torch.stack([self.objective.counts(b) for b in batches]).sum(0)
        tokens = torch.tensor([sum(b.ids.numel() for b in batches)], device=local.device)
        totals = accelerator.reduce(torch.cat([local, tokens]).to(accelerator.device), reduction="sum")
        counts, padded = totals[:-1], int(totals[-1])
        lr = learning_rate(state.step, settings.steps, settings.optim)
        set_rate(self.optimizer, lr)
        sums = torch.zeros(len(self.objective.figures), len(counts), device=accelerator.device)
        for i, batch in enumerate(batches):
            waits = contextlib.nullcontext() if i == len(batches) - 1 else accelerator.no_sync(model)
            with waits:
                loss, metrics = model(batch, counts)
                # DDP averages gradients over ranks; the loss is already over the slots of all of them.
                accelerator.backward(loss * world)
            sums += torch.stack([metrics[name] for name in self.objective.figures])
        norm = accelerator.clip_grad_norm_(self.objective.parameters(), settings.optim.clip)
        sums = accelerator.reduce(sums, reduction="sum").cpu()
        if int(counts.max()):
            self._apply(optimizer, bool(torch.isfinite(sums).all()) and bool(torch.isfinite(torch.as_tensor(norm))))
        else:  # nothing to learn from: momentum and weight decay must not move the head either
            optimizer.zero_grad()
            state.skipped += 1
        state.tokens += int(counts[0])
        found = dict(zip(self.objective.figures, sums / counts.cpu().clamp_min(1), strict=True))
        return {
            "loss": self.objective.weighted(found["loss"]),
            "step_loss": found["loss"].tolist(),
            "accuracy": found["correct"].tolist(),
            **{f"loss_{name}": found[name].tolist() for name in self.objective.terms},
            "lr": lr,
            "gradient_norm": float(norm),
            "skipped": state.skipped,
            "padding_share": 1 - sum(self.lengths[n] for n in numbers) / padded,
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

    def _batch(self, part: list[list[int]], numbers: list[int]) -> Batch:
        """One pass; an empty share (fewer conversations than ranks) becomes one conversation without loss."""
        found = part or [numbers[:1]]
        rows = [n for line in found for n in line]
        store, sizes = self.data.train_store, [len(line) for line in found]
        batch = collate([self.data.train[n] for n in rows], rows, store, sizes)
        if not part:
            batch.asst = torch.zeros_like(batch.asst)
        if most := self.head.max_slots:
            every = step_mask(batch.asst, batch.documents, 0)
            batch.drawn = draw_slots(every, batch.documents, most, rows, self.settings.seed, self.state.step)
        return batch.to(self.accelerator.device)

    def _evaluate(self, track: Track | None) -> None:
        """Held-out figures and, when one is due, a live run; saves the head as `best/` when it is the best so far."""
        state = self.state
        figures = self.selection.figures(state.step)
        if track is not None:
            for split, values in figures.items():
                track.log(state.step, split, values)
        if self.selection.by not in figures:
            return
        found = self.selection.acceptance_length(figures)
        better = found > state.best or state.step == 0
        state.waited = 0 if better else state.waited + 1
        if better:
            state.best = found
            if track is not None:
                note = {**self.provenance, "step": state.step, "tokens": state.tokens, "selected_by": self.selection.by}
                save_head(self.folder / "best", self.head, self.target.spec, {**note, **figures}, self.lora)

    def _save(self, checkpoints: Path) -> None:
        if self.accelerator.is_main_process:
            state = dataclasses.asdict(self.state)
            checkpoint.save(checkpoints, self.state.step, self.head, self.optimizer, state, self.lora)
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
