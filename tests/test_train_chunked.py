"""The chunked loss equals the plain one, value and gradient, and never holds the logits of more than a chunk."""

from typing import Any

import pytest
import torch
from test_train_objective import DRAFT, counts_of, gradients
from tiny import tiny_target
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import batch_of, conversations, eagle3, largest_gap, medusa, train, weights

from train.losses import LOSSES
from train.mixture import LossSettings
from train.objective import Objective

CHUNK, HIDDEN = 7, 32


def biased(objective: Objective) -> Objective:
    """A trained LM head with a bias, as no head of ours has one yet."""
    lm_head = objective.head.lm_head
    objective.head.lm_head = nn.Linear(lm_head.in_features, lm_head.out_features)
    with torch.no_grad():
        objective.head.lm_head.weight.copy_(lm_head.weight)
        objective.head.lm_head.bias.normal_(generator=torch.Generator().manual_seed(0))
    return objective


MAKES: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle3": (eagle3, {}),
    "eagle3 with a bias, reduced": (eagle3, {"draft": DRAFT}),
    "medusa, own LM heads": (medusa, {"num_heads": 3, "shared_lm_head": False}),
}


def objective_of(what: str, chunk: int, **loss: Any) -> Objective:
    make, options = MAKES[what]
    target = tiny_target(layers=4)
    found = Objective(make(target, std=0.2, **options), target, LossSettings(chunk=chunk, **loss))
    return biased(found) if "bias" in what else found


def same(objectives: list[Objective], upstream: float = 1.0) -> None:
    batches, results = [batch_of(conversations(2)), batch_of(conversations(2, seed=4))], []
    for objective in objectives:
        if upstream == 1.0:
            results.append(gradients(objective, *batches))
            continue
        objective.zero_grad()
        (objective(batches[0], counts_of(objective, batches[0]))[0] * upstream).backward()
        results.append((0.0, {n: p.grad.clone() for n, p in objective.head.named_parameters() if p.grad is not None}))
    (value, found), (plain_value, plain) = results
    assert value == pytest.approx(plain_value, abs=1e-5, rel=1e-6)
    assert largest_gap(found, plain) < 1e-5 * max(1.0, upstream)
    assert max(float(g.abs().max()) for g in plain.values()) > 1e-2, "gradients this flat would prove little"


@pytest.mark.parametrize("what", list(MAKES))
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_chunks_give_the_loss_and_gradients_of_the_whole(what: str, loss: str) -> None:
    same([objective_of(what, chunk, terms={loss: 1.0}) for chunk in (CHUNK, 0)])


def test_chunks_of_any_size_a_sum_of_losses_and_an_upstream_factor() -> None:
    terms = {"kl": 0.5, "neg_log_alpha": 2.0}
    for chunk in (1, 5, 64):
        same([objective_of("eagle3", size, terms=terms) for size in (chunk, 0)])
    same([objective_of("eagle3", size, terms=terms) for size in (CHUNK, 0)], upstream=8.0)


class TallestLogits(TorchDispatchMode):
    """The most rows any tensor [rows, D] had while it was on, forward and backward; a weight [H, D] is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            wide = isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self.width
            if wide and tensor.shape[0] != HIDDEN:
                self.rows = max(self.rows, tensor.numel() // self.width)
        return result


def tallest(chunk: int, grad: bool = True) -> tuple[int, int]:
    """(most rows of logits that existed, trained slots of the first step)."""
    target = tiny_target(layers=4, vocab_size=72)  # a width that no other tensor has
    head = eagle3(target, std=0.2, draft=list(range(71)))
    objective = Objective(head, target, LossSettings(chunk=chunk, terms={"kl": 1.0, "top_m": 1.0}))
    batch = batch_of(conversations(6))
    output = target.forward(batch.ids, taps=head.taps)
    batch.last, batch.taps = output.last, output.taps
    counts = counts_of(objective, batch)
    with TallestLogits(71) as seen, torch.set_grad_enabled(grad):
        loss, _ = objective(batch, counts)
        if grad:
            loss.backward()
    return seen.rows, int(counts[0])


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_no_more_logits_than_a_chunk_exist_at_any_moment(grad: bool) -> None:
    rows, slots = tallest(CHUNK, grad)
    assert rows == CHUNK < slots / 4
    assert tallest(0, grad)[0] == slots, "the plain path holds them all: this test can fail"


def test_a_chunked_run_learns_what_a_plain_one_learns(tmp_path: Any) -> None:
    heads = [train(tmp_path / str(chunk), loss={"chunk": chunk})[0].head for chunk in (CHUNK, 0)]
    assert largest_gap(weights(heads[0]), weights(heads[1])) < 1e-5
