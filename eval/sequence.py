"""One sequence while it is decoded: its own seed, budget, prefix and answer, whatever else is in the batch."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from eval import stop, verify
from eval.adaptive import next_depth
from eval.decoding import Decoding, Generation
from eval.drafter import Ask, Proposal, empty
from eval.judge import alphas, judge
from eval.tree import depths
from heads.target import Target


class Sequence:
    """`slot` is its place in the drafter, `own` its newest token, which the next pass consumes.

    Raises ValueError for an empty prompt, one that fills the context, or a decoding that means nothing.
    """

    def __init__(
        self,
        target: Target,
        prompt: list[int],
        decoding: Decoding,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        context = target.spec.max_position_embeddings
        room = context - len(prompt)
        if not prompt or room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens: the context holds {context}")
        decoding.check()
        self.eos_ids, self.prompt, self.decoding, self.decode = target.eos_ids, prompt, decoding, decode
        self.budget = min(decoding.max_new_tokens, room)
        self.found = Generation()
        self.generator = torch.Generator().manual_seed(verify.mix(decoding.seed, len(prompt)))
        # the draft knows no penalty: q stays the law it draws from, which is all that exactness asks
        self.drafting = dataclasses.replace(decoding.warpers, repetition_penalty=1.0)
        self.prefix: Tensor | None = None  # which tokens occurred so far, bool [V]; None where no penalty asks
        if decoding.warpers.repetition_penalty != 1:
            self.prefix = torch.zeros(target.spec.vocab_size, dtype=torch.bool, device=target.device)
            self.prefix[prompt] = True
        self.texts = [""]  # the answer up to each token, where a stop string is looked for
        self.slot, self.own, self.ended = 0, 0, self.budget < 1
        self.depth = decoding.depth()  # most tokens deep it drafts now
        self.expected = 1.0  # accepted drafts that the drafter expected, and those that came; 1 each to start from
        self.accepted = 1.0

    def ask(self, live: int, most: int) -> Ask:
        """What it wants drafted next, with `live` sequences in the batch; never more than could still be emitted."""
        d = self.decoding
        off = d.most_live is not None and live > d.most_live
        return Ask(
            budget=0 if off else min(self.depth, most, self.budget - len(self.found.output_ids)),
            sampled=d.proposal == "sampled",
            warpers=self.drafting,
            generator=self.generator,
            with_probs=d.record_alpha,
            shape=d.shape(),
            min_confidence=d.min_confidence,
            gain=d.gain,
            trust=self.accepted / self.expected,
            replacement=d.replacement,
        )

    def first(self, logits: Tensor) -> None:
        """The token that the prompt's pass gives, logits [1, V]."""
        self._judge(empty(), logits, None)

    def settle(self, proposal: Proposal, logits: Tensor, best: list[int] | None) -> tuple[list[int], list[int]]:
        """Verify what was drafted against the target's rows, logits [N+1, V] -> (accepted rows, tokens of the round).

        What is really emitted of these is appended to the answer; `ended` says whether it goes on.
        """
        drafted = max(depths(proposal.parents))
        self.found.nodes.append(len(proposal.parents))
        self.found.steps.append([drafted, 0])
        path, tokens = self._judge(proposal, logits, best)
        if self.decoding.heuristic:
            self.depth = next_depth(self.depth, drafted, len(path))
        if proposal.expected:
            self.expected, self.accepted = self.expected + proposal.expected, self.accepted + len(path)
        return path, tokens

    def _judge(self, proposal: Proposal, logits: Tensor, best: list[int] | None) -> tuple[list[int], list[int]]:
        position = len(self.prompt) + len(self.found.output_ids)
        (path, self.own), p = judge(proposal, logits, self.decoding, self.generator, position, self.prefix, best)
        tokens = [*(int(proposal.tokens[row - 1]) for row in path), self.own]
        if self.prefix is not None:
            self.prefix[tokens] = True
        if recorded := alphas(proposal, p, len(path)):
            self.found.alpha_sum_min.append(recorded[0])
            self.found.alpha_greedy.append(recorded[1])
        self._emit(tokens)
        return path, tokens

    def _emit(self, tokens: list[int]) -> None:
        """Append what is really emitted; the step's a_s counts emitted drafts."""
        found = self.found
        kept, ended = stop.cut(tokens, self.eos_ids, self.budget - len(found.output_ids))
        found.output_ids.extend(kept)
        if self.decoding.stop_strings and self.decode is not None:
            start = len(self.texts) - 1
            self.texts += [self.decode(found.output_ids[: i + 1]) for i in range(start, len(found.output_ids))]
            pieces = [text[len(before) :] for before, text in zip(self.texts, self.texts[1:], strict=False)]
            if cutting := stop.cut_at_string(pieces, self.decoding.stop_strings):
                gone = len(found.output_ids) - cutting[1]
                del found.output_ids[cutting[1] :]
                kept, ended = kept[: max(len(kept) - gone, 0)], "stop"
        if found.steps:
            found.steps[-1][1] = min(len(tokens) - 1, len(kept))
        if ended:
            found.stop, self.ended = ended, True
