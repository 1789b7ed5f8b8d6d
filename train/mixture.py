"""Which losses a run adds up, and how much each step of a draft counts.

loss = sum_i w_i / n_i * sum over the n_i trained slots of step i of
       ( sum_terms weight * loss(draft logits, target logits) + sum_feature weight * loss(hidden, target feature) )

step i           0      1      2
step_decay .8    1     .8    .64      EAGLE-3, Medusa: decay^i
position_gamma 4 1    .78    .61      block heads: exp(-(k - 1) / gamma) of position k = i + 1
step_weights     as listed
"""

import dataclasses
import functools
import math

from train.losses import FEATURE_LOSSES, LOSSES, Loss, top_m


@dataclasses.dataclass
class LossSettings:
    """Raises ValueError for unknown losses, weights below 0, and more than one spelling of the step weights."""

    terms: dict[str, float] = dataclasses.field(default_factory=dict)  # loss -> weight; empty: {kl: 1.0}
    feature: dict[str, float] = dataclasses.field(default_factory=dict)  # the same for heads that regress features
    step_decay: float = 0.8  # weight of step i is decay^i
    step_weights: list[float] | None = None  # in place of the decay: one weight for each step
    position_gamma: float | None = None  # in place of the decay: exp(-i / gamma)
    top_m: int = 10  # tokens of the top_m loss
    teacher_temperature: float = 1.0  # of the target's distribution, before any loss
    chunk: int = 1024  # most positions whose logits exist at one moment; 0: all of them

    def __post_init__(self) -> None:
        for key, given, known in (("terms", self.terms, LOSSES), ("feature", self.feature, FEATURE_LOSSES)):
            for name, weight in given.items():
                if name not in known:
                    raise ValueError(f"train.loss.{key}={name!r} must be one of {', '.join(sorted(known))}")
                if not 0 <= weight < math.inf:
                    raise ValueError(f"train.loss.{key}.{name}={weight} must be a number of at least 0")
        if not self.mixture() and not self.regression():
            raise ValueError("train.loss.terms has no weight above 0: nothing would be trained")
        if self.step_weights is not None and self.position_gamma is not None:
            raise ValueError("train.loss.step_weights and train.loss.position_gamma are both set: give one of them")
        if not 0 <= self.step_decay < math.inf:
            raise ValueError(f"train.loss.step_decay={self.step_decay} must be a number of at least 0")
        if self.position_gamma is not None and not self.position_gamma > 0:
            raise ValueError(f"train.loss.position_gamma={self.position_gamma} must be above 0")
        if self.step_weights is not None and (min(self.step_weights, default=0) < 0 or not any(self.step_weights)):
            raise ValueError(f"train.loss.step_weights={self.step_weights}: give numbers of at least 0, not only 0")
        if not self.teacher_temperature > 0:
            raise ValueError(f"train.loss.teacher_temperature={self.teacher_temperature} must be above 0")
        if self.top_m < 1 or self.chunk < 0:
            raise ValueError(f"train.loss.top_m={self.top_m} must be at least 1 and chunk={self.chunk} at least 0")

    def mixture(self) -> dict[str, tuple[Loss, float]]:
        """Losses on logits with their weights; those of weight 0 are left out."""
        table: dict[str, Loss] = {**LOSSES, "top_m": functools.partial(top_m, m=self.top_m)}
        return {name: (table[name], weight) for name, weight in (self.terms or {"kl": 1.0}).items() if weight}

    def regression(self) -> dict[str, tuple[Loss, float]]:
        """Losses on features with their weights."""
        return {name: (FEATURE_LOSSES[name], weight) for name, weight in self.feature.items() if weight}

    def weights(self, steps: int) -> list[float]:
        """Weight of each of a head's `steps` steps. Raises ValueError when the listed ones are not that many."""
        if self.step_weights is not None:
            if len(self.step_weights) != steps:
                raise ValueError(
                    f"train.loss.step_weights has {len(self.step_weights)} numbers for a head that trains {steps} steps"
                )
            return list(self.step_weights)
        if self.position_gamma is not None:
            return [math.exp(-i / self.position_gamma) for i in range(steps)]
        return [self.step_decay**i for i in range(steps)]
