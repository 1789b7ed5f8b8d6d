"""Small heads, conversations and training loops on tiny targets, shared by the tests of heads, training and export."""

import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tiny import tiny_target
from torch import Tensor

from heads.block import Block, BlockConfig
from heads.eagle3 import Eagle3, Eagle3Config
from heads.layers import HeadInput
from heads.medusa import Medusa, MedusaConfig
from heads.target import Target
from train.batches import Batch, collate
from train.loop import Data, Loop, State
from train.mixture import LossSettings
from train.optim import OptimSettings
from train.settings import TrainSettings

TAPS = [1, 2, 4]
Row = dict[str, Any]


def vocabulary(ids: list[int], vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t, t2d) of a draft vocabulary: ids [0, 3, 4] -> d2t [0, 2, 2]."""
    kept = torch.tensor(sorted(ids))
    return kept - torch.arange(len(ids)), torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, kept, True)


def eagle3(target: Target, std: float | None = None, draft: list[int] | None = None, **settings: Any) -> Eagle3:
    """An attached head, in eval mode; `std` draws every matrix anew, wide enough that a wrong attention shows."""
    config = Eagle3Config(taps=TAPS, draft_vocab_size=None if draft is None else len(draft), **settings)
    head = Eagle3(config, target.spec, None if draft is None else vocabulary(draft, target.spec.vocab_size))
    return spread(head, std).attach(target).eval()


def medusa(target: Target, std: float | None = None, draft: list[int] | None = None, **settings: Any) -> Medusa:
    config = MedusaConfig(draft_vocab_size=None if draft is None else len(draft), **settings)
    head = Medusa(config, target.spec, None if draft is None else vocabulary(draft, target.spec.vocab_size))
    return spread(head, std).attach(target).eval()


def block(target: Target, std: float | None = None, draft: list[int] | None = None, **settings: Any) -> Block:
    """Row 0 of a block of 4 predicts nothing, unless told."""
    draft_size = None if draft is None else len(draft)
    options = {"taps": TAPS, "block_size": 4, "draft_vocab_size": draft_size, **settings}
    config = BlockConfig(**options)
    head = Block(config, target.spec, None if draft is None else vocabulary(draft, target.spec.vocab_size))
    return spread(head, std).attach(target).eval()


def spread(head: Any, std: float | None, seed: int = 1) -> Any:
    """Every parameter away from its start value: matrices N(0, std), vectors +- 20%."""
    generator = torch.Generator().manual_seed(seed)
    if std is not None:
        with torch.no_grad():
            for parameter in head.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * std if parameter.dim() > 1 else parameter + 0.2 * noise)
    return head


def tokens(*shape: int, vocab_size: int = 64, seed: int = 0) -> Tensor:
    return torch.randint(2, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def head_input(target: Target, head: Any, ids: Tensor, slots: Tensor | None = None) -> HeadInput:
    """What training would give a head for ids [B, T], one document a row; slots 0..T-2 unless told."""
    B, T = ids.shape
    output = target.forward(ids, taps=head.taps)
    positions = torch.arange(T).expand(B, T)
    documents = torch.arange(B)[:, None].expand(B, T)
    if slots is None:
        slots = torch.arange(T - 1).expand(B, T - 1)
    return HeadInput(output.last, output.taps, target.embed(ids), positions, documents, slots)


def conversations(count: int, seed: int = 0, vocab_size: int = 64, longest: int = 14) -> list[Row]:
    """Token rows of uneven length; every third one has two answers."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    for n in range(count):
        prompt, answer = (int(torch.randint(3, longest, (), generator=generator)) for _ in range(2))
        length, spans = prompt + answer, [[prompt, prompt + answer]]
        if n % 3 == 0:
            spans.append([length + 3, length + 9])
            length += 10
        ids = torch.randint(2, vocab_size, (length,), generator=generator).tolist()
        rows.append({"id": str(n), "ids": ids, "spans": spans})
    return rows


def batch_of(rows: list[Row]) -> Batch:
    return collate(rows, list(range(len(rows))))


def settings(**changed: Any) -> TrainSettings:
    """Few quick steps without wandb; `lr` and `loss` (fields of LossSettings) go to their own groups."""
    optim = OptimSettings(
        lr=changed.pop("lr", 1e-2), warmup_share=0.05, final_share=0.0, betas=[0.9, 0.95], weight_decay=0.01, clip=1.0
    )
    loss = LossSettings(**changed.pop("loss", {}))
    few: dict[str, Any] = {"steps": 4, "batch_size": 4, "micro_batch_size": 4, "eval_every": 4, "save_every": 4}
    few |= {"live_prompts": 0, "predict_tokens": 16, "wandb": "disabled"}
    return TrainSettings(**{**few, **changed}, loss=loss, optim=optim)


def loop_of(
    folder: Path,
    target: Target | None = None,
    head: Any = None,
    rows: list[Row] | None = None,
    measure: Any = None,
    precision: str = "no",
    **changed: Any,
) -> Loop:
    """A training run on CPU: EAGLE-3 on tiny llama and 12 conversations unless told; `measure` makes live runs."""
    torch.manual_seed(0)
    target = target or tiny_target(layers=4)
    head = head if head is not None else eagle3(target, std=0.1, init="random")
    data = Data(train=rows or conversations(12), heldout=conversations(5, seed=9))
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    return Loop(settings(**changed), head, target, data, folder, accelerator, {"note": "toy"}, measure)


def train(folder: Path, **changed: Any) -> tuple[Loop, State]:
    loop = loop_of(folder, **changed)
    return loop, loop.run()


def weights(head: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in head.state_dict().items()}


def largest_gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def default_signals() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
