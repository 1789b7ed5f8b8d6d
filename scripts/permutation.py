"""A target whose next token is perm[current], and analytic heads that draft it right by construction.

It proves that a layout is understood, not merely loaded: which half is the embedding, what step j reads and predicts,
what the vocabulary map says. With 3 prompts of 48 new tokens and k = 3 a right head needs 36 rounds and has
[36, 36, 36] drafts accepted, in our engine (tests/test_heads_permutation.py) and in vLLM (scripts/prove_vllm.py).

Attention and MLP of the target write nothing, its embedding rows E have norm 1 and lm_head[v] = E[perm^-1(v)]. perm is
one cycle over the ids that are no multiple of 3 and leaves the others alone, so that a reduced draft vocabulary can
hold all that is ever said, and no draft id is its own target id:

    ids 0 1 2 3 4 5 6 7 ...   said 1 2 4 5 7 ...   draft id 0 -> 1, 1 -> 2, 2 -> 4: d2t = [1, 1, 2, 2, 3, ...]
"""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from heads.eagle1 import Eagle1, Eagle1Config
from heads.eagle3 import Eagle3, Eagle3Config
from heads.medusa import Medusa, MedusaConfig
from heads.target import Target

V, H, K, NEW_TOKENS = 96, 32, 3, 48
SAID = [i for i in range(V) if i % 3]
PROMPTS = [[5, 9, 3, 22, 41], [7, 60, 2], [33, 33, 1, 0, 12, 63, 8]]


def permutation(power: int = 1) -> Tensor:
    """perm^power, int64 [V] (power may be negative)."""
    cycle = torch.tensor(SAID)[torch.randperm(len(SAID), generator=torch.Generator().manual_seed(5))]
    perm = torch.arange(V)
    perm[cycle] = cycle.roll(-power)
    return perm


def embeddings() -> Tensor:
    """E, float [V, H]: rows of norm 1 that are far from each other."""
    return torch.nn.functional.normalize(torch.randn(V, H, generator=torch.Generator().manual_seed(6)), dim=-1)


def permutation_target() -> tuple[Target, Tensor]:
    """(target, its embedding rows E [V, H])."""
    E = embeddings()
    # one attention head: with several, another token's slice may match better than the token's own
    return speaking(E, num_attention_heads=1, num_key_value_heads=1), E


def speaking(E: Tensor, **sizes: int | None) -> Target:
    """A target of 4 layers that add nothing, with embeddings E [V, H] and an LM head that reads E[u] as perm(u)."""
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    shape = {"vocab_size": V, "hidden_size": E.shape[1], "intermediate_size": 2 * E.shape[1], "num_hidden_layers": 4}
    config = LlamaConfig(**{**shape, **ends, "max_position_embeddings": 256, **sizes})
    target = Target(AutoModelForCausalLM.from_config(config), name="permutation")
    with torch.no_grad():
        for layer in target.layers:
            layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr,operator]
            layer.mlp.down_proj.weight.zero_()  # type: ignore[union-attr,operator]
        target.model.get_input_embeddings().weight.copy_(E)
        target.head.weight.copy_(E[permutation(-1)])
    target.eos_ids = frozenset()
    return target


def eagle1_head(target: Target, E: Tensor, swapped: bool = False) -> Eagle1:
    """fc = [I|0], all else 0: the predicted feature is the embedding of the newest token."""
    head = Eagle1(Eagle1Config(), target.spec)
    with torch.no_grad():
        for parameter in head.layers.parameters():
            parameter.zero_()
        head.fc.weight.copy_(halves(torch.eye(H), torch.zeros(H, H), swapped))
    return head.attach(target).eval()


def eagle3_head(target: Target, E: Tensor, swapped: bool = False, reduced: bool = False) -> Eagle3:
    """fc = 0, q = k = 8[I|0], v = [I|-I], o = I, MLP 0, norms 1, lm_head = E[perm^-1]."""
    kept = torch.tensor(SAID if reduced else range(V))
    vocabulary = kept - torch.arange(len(kept)), torch.zeros(V, dtype=torch.bool).index_fill(0, kept, True)
    config = Eagle3Config(taps=[1, 2, 3], draft_vocab_size=len(kept) if reduced else None)
    head = Eagle3(config, target.spec, vocabulary if reduced else None)
    layer, attn, eye = head.midlayer, head.midlayer.self_attn, torch.eye(H)
    with torch.no_grad():
        head.fc.weight.zero_()
        attn.q_proj.weight.copy_(halves(8 * eye, torch.zeros(H, H), swapped))
        attn.k_proj.weight.copy_(attn.q_proj.weight)
        attn.v_proj.weight.copy_(halves(eye, -eye, swapped))
        attn.o_proj.weight.copy_(eye)
        layer.mlp.down_proj.weight.zero_()
        head.lm_head.weight.copy_(E[permutation(-1)][kept])
    return head.attach(target).eval()


def medusa_head(target: Target, E: Tensor, wrong_third: bool = False) -> Medusa:
    """linear = 0, head i lm = E[perm^-(2+i)]."""
    head = Medusa(MedusaConfig(num_heads=K, shared_lm_head=False), target.spec)
    with torch.no_grad():
        for i in range(K):
            power = 2 + i + (1 if wrong_third and i == 2 else 0)
            head.medusa_heads[i][-1].weight.copy_(E[permutation(-power)])  # type: ignore[index]
    return head.attach(target).eval()


def halves(left: Tensor, right: Tensor, swapped: bool) -> Tensor:
    return torch.cat([right, left] if swapped else [left, right], dim=1)
