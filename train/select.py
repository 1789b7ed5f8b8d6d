"""Which checkpoint is the best one: by the acceptance length that decoding measures, else by the predicted one.

Loss goes on falling after acceptance has peaked, so it selects nothing. `predicted_acceptance_length` (evaluate.py) is
what greedy decoding would accept on the held-out answers. A live run decodes held-out prompts with the engine itself,
at the temperatures that matter; where live runs are on, theirs is the figure that selects.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from heads.target import Target
from train.batches import FeatureStore
from train.heldout import heldout_figures
from train.objective import Objective
from train.settings import TrainSettings


class Measure(Protocol):
    """What decodes: `eval.live.measure_acceptance`, handed in by the command, since the loop knows nothing of eval."""

    def __call__(
        self,
        target: Target,
        head: Any,
        prompts: Sequence[list[int]],
        k: int,
        temperature: float,
        seed: int,
        max_new_tokens: int,
    ) -> dict[str, Any]:
        """{"acceptance_length": float, "position_acceptance_joint": [k], "rounds": int}."""


class Selection:
    """Held-out figures and live runs of one training. Raises ValueError where no held-out prompt fits a live run."""

    def __init__(
        self,
        settings: TrainSettings,
        objective: Objective,
        rows: list[dict[str, Any]],
        store: FeatureStore | None,
        accelerator: Accelerator,
        measure: Measure | None,
    ) -> None:
        self.settings, self.objective, self.accelerator = settings, objective, accelerator
        self.rows, self.store, self.measure = rows[: settings.eval_rows or None], store, measure
        self.k = min(settings.predict_k, objective.head.max_draft)
        self.prompts: list[list[int]] = []
        if settings.live_prompts:
            assert measure is not None, "live runs need something that decodes"
            room = objective.target.spec.max_position_embeddings - settings.live_tokens
            self.prompts = choose_prompts(rows, settings.live_prompts, room)
        self.by = "live" if self.prompts else "heldout"  # the split whose acceptance length selects

    def figures(self, step: int) -> dict[str, dict[str, Any]]:
        """{"heldout": ...} and, when a live run is due at this step, {"live": ...}: log lines by split."""
        s = self.settings
        heldout = heldout_figures(
            self.objective, self.rows, self.store, self.k, s.predict_tokens, s.micro_batch_size, self.accelerator
        )
        due = s.live_every is None or step % s.live_every == 0 or step == s.steps
        return {"heldout": heldout, "live": self._live()} if self.prompts and due else {"heldout": heldout}

    def acceptance_length(self, figures: dict[str, dict[str, Any]]) -> float:
        """The figure that selects, of what `figures` returned."""
        live = self.by == "live"
        return figures["live"]["acceptance_length"] if live else figures["heldout"]["predicted_acceptance_length"]

    def _live(self) -> dict[str, Any]:
        """A live run by the first rank; the others wait and learn the acceptance length alone.

        `acceptance_length` is the mean over the temperatures, whose own figures are lists.
        """
        s, began = self.settings, time.perf_counter()
        found: dict[str, Any] = {"acceptance_length": 0.0}
        if self.accelerator.is_main_process:
            assert self.measure is not None
            target, head = self.objective.target, self.objective.head
            runs = [
                self.measure(target, head, self.prompts, self.k, temperature, s.seed, s.live_tokens)
                for temperature in s.live_temperatures
            ]
            lengths = [run["acceptance_length"] for run in runs]
            found = {
                "acceptance_length": sum(lengths) / len(lengths),
                "temperatures": list(s.live_temperatures),
                "acceptance_lengths": lengths,
                "position_acceptance_joint": [run["position_acceptance_joint"] for run in runs],
                "rounds": [run["rounds"] for run in runs],
                "k": self.k,
                "prompts": len(self.prompts),
                "seconds": round(time.perf_counter() - began, 2),
            }
        length = torch.tensor(found["acceptance_length"], dtype=torch.float64, device=self.accelerator.device)
        return {**found, "acceptance_length": float(self.accelerator.reduce(length, reduction="sum"))}


def choose_prompts(rows: Sequence[dict[str, Any]], count: int, room: int) -> list[list[int]]:
    """`count` conversations up to their last answer, of at most `room` tokens, one route after the other in turn.

    Routes a, a, b, c with count 3 -> a, b, c. Raises ValueError when none is short enough.
    """
    by_route: dict[str, list[list[int]]] = {}
    for row in rows:
        if row["spans"] and 0 < row["spans"][-1][0] <= room:
            by_route.setdefault(row.get("route", ""), []).append(list(row["ids"][: row["spans"][-1][0]]))
    longest = max(map(len, by_route.values()), default=0)
    found = [held[turn] for turn in range(longest) for held in by_route.values() if len(held) > turn]
    if not found:
        raise ValueError(
            f"no held-out prompt of at most {room} tokens for the live run: lower train.live_tokens, prepare more "
            "held-out conversations, or set train.live_prompts=0"
        )
    return found[:count]
