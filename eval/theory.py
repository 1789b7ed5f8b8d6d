"""What constant acceptance promises: expected tokens per target pass and speedup (2211.17192, theorems 3.8 and 3.11).

python -m eval mode=theory
"""

from collections.abc import Sequence


def expected_tokens(alpha: float, k: int) -> float:
    """tau of a chain of k with constant acceptance alpha: (1 - alpha^(k+1)) / (1 - alpha), own token counted."""
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def tau_from_conditionals(alphas: Sequence[float]) -> float:
    """tau of a real head: 1 + sum_k prod_{i<=k} alpha_i."""
    total, product = 1.0, 1.0
    for alpha in alphas:
        product *= alpha
        total += product
    return total


def speedup(tau: float, k: int, draft_cost: float, pass_cost: float = 1.0) -> float:
    """tau / (k c + pass cost); costs in units of a one-token target pass."""
    return tau / (k * draft_cost + pass_cost)


def predicted_speedup(
    joint: Sequence[float], k: int, draft_step_s: float, target_pass_s: Sequence[float], draft_fixed_s: float = 0.0
) -> float:
    """Speedup of a chain of k from measured seconds: target_pass_s[i] is a pass of i + 1 tokens.

    joint: share of steps in which at least i + 1 drafts were accepted.
    """
    tau = 1 + sum(joint[:k])
    return tau * target_pass_s[0] / (draft_fixed_s + k * draft_step_s + target_pass_s[k])


def rows(
    alphas: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.9),
    ks: Sequence[int] = tuple(range(1, 9)),
    costs: Sequence[float] = (0.05, 0.2),
) -> list[dict[str, float]]:
    """The table as rows {alpha, k, draft_cost, acceptance_length, speedup}."""
    return [
        {
            "alpha": alpha,
            "k": k,
            "draft_cost": cost,
            "acceptance_length": expected_tokens(alpha, k),
            "speedup": speedup(expected_tokens(alpha, k), k, cost),
        }
        for cost in costs
        for alpha in alphas
        for k in ks
    ]


def table(found: Sequence[dict[str, float]]) -> str:
    """The rows as text: one block per draft cost, speedup by alpha (lines) and k (columns), tau in brackets."""
    lines = []
    for cost in sorted({row["draft_cost"] for row in found}):
        part = [row for row in found if row["draft_cost"] == cost]
        ks = sorted({int(row["k"]) for row in part})
        lines.append(f"draft step costs {cost:g} of a target pass: speedup (tokens per pass)")
        lines.append("alpha " + "".join(f"{f'k={k}':>13}" for k in ks))
        for alpha in sorted({row["alpha"] for row in part}):
            cells = [row for row in part if row["alpha"] == alpha]
            lines.append(
                f"{alpha:<6g}" + "".join(f"{r['speedup']:>6.2f} ({r['acceptance_length']:.2f})" for r in cells)
            )
    return "\n".join(lines)
