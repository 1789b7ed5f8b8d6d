"""Claim: the side of a conversation depends on what the user wrote alone; repeats go once; limits keep routes even."""

from collections import Counter
from typing import NamedTuple

import pytest

from data.prompts import Row
from data.split import Plan, is_heldout, user_key, whole_key


class Item(NamedTuple):
    unique: str
    key: str
    route: str


def assign(items: list[Item], heldout_share: float, limit: int | None = None) -> dict[str, str]:
    """`unique` -> "train" | "heldout" for the conversations that take part."""
    plan = Plan(heldout_share, limit)
    for item in items:
        plan.add(*item)
    plan.decide()
    sides = {item.unique: plan.side(item.unique) for item in items}
    assert plan.left_out == sum(side is None for side in sides.values())
    return {name: side for name, side in sides.items() if side is not None}


def row(user: str, answer: str | None = None, line: int = 1) -> Row:
    answered = [] if answer is None else [{"role": "assistant", "content": answer}]
    return Row("f", line, f"id{line}", "r", [{"role": "user", "content": user}, *answered])


def items(count: int, routes: int = 4) -> list[Item]:
    keys = [user_key(row(f"prompt {n}")) for n in range(count)]
    return [Item(key, key, f"route{n % routes}") for n, key in enumerate(keys)]


def test_key_ignores_answers_ids_and_lines_and_sees_every_user_character() -> None:
    assert user_key(row("q", "a", 1)) == user_key(row("q", "b", 2)) == user_key(row("q"))
    assert user_key(row("q")) != user_key(row("q "))
    assert whole_key(row("q", "a", 1)) == whole_key(row("q", "a", 2)) != whole_key(row("q", "b", 1))


def test_share_is_held_out_and_is_the_same_whatever_else_is_in_the_set() -> None:
    sides = assign(items(4000), 0.1)
    held = sum(side == "heldout" for side in sides.values())
    assert 340 <= held <= 460  # binomial(4000, .1): three standard deviations are 57
    part = assign(items(1000), 0.1)
    assert all(sides[name] == side for name, side in part.items())


def test_limit_is_even_over_routes_and_holds_out_its_share() -> None:
    sides = assign(items(400), 0.25, limit=40)
    routes = {item.unique: item.route for item in items(400)}
    assert Counter(sides.values()) == {"train": 30, "heldout": 10}
    assert all(9 <= n <= 11 for n in Counter(routes[name] for name in sides).values())
    assert assign(list(reversed(items(400))), 0.25, limit=40) == sides


def test_a_small_set_still_holds_something_out_unless_told_not_to() -> None:
    few = [item for item in items(50) if not is_heldout(item.key, 0.1)][:3]
    assert Counter(assign(few, 0.1).values()) == {"train": 2, "heldout": 1}
    assert set(assign(few, 0.0).values()) == {"train"}


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_is_heldout_is_monotonic_in_the_share(share: float) -> None:
    held = [item for item in items(200) if is_heldout(item.key, share)]
    assert all(is_heldout(item.key, 1.0) for item in held)
    assert abs(len(held) / 200 - share) < 0.12


def in_plain_python(items: list[Item], share: float, limit: int) -> dict[str, str]:
    """The rule of `Plan`, row by row: round robin over routes, each in the order of the second part of its key."""
    sides: dict[str, str] = {}
    held = [item for item in items if is_heldout(item.key, share)]
    count = min(len(held), max(1, round(limit * share)))
    for side, group, wanted in (
        ("heldout", held, count),
        ("train", [item for item in items if item not in held], limit - count),
    ):
        routes: dict[str, list[Item]] = {}
        for item in sorted(group, key=lambda item: item.key[16:]):
            routes.setdefault(item.route, []).append(item)
        taken = [routes[r][n] for n in range(len(group)) for r in sorted(routes) if n < len(routes[r])][:wanted]
        sides |= {item.unique: side for item in taken}
    return sides


@pytest.mark.parametrize("limit", [2, 7, 31, 90])
def test_the_plan_in_arrays_is_the_plan_in_plain_python(limit: int) -> None:
    uneven = [item._replace(route="few" if n < 5 else item.route) for n, item in enumerate(items(80, 3))]
    assert assign(uneven, 0.2, limit) == in_plain_python(uneven, 0.2, limit)


def test_repeats_are_met_once_and_a_source_that_changed_is_noticed() -> None:
    plan = Plan(0.5)
    for item in [*items(3), items(3)[0]]:
        plan.add(*item)
    plan.decide()
    assert len(plan.known) == 3
    assert [plan.meet(item.unique) for item in [*items(3), items(3)[0]]] == [True, True, True, False]
    with pytest.raises(ValueError, match="a source changed while it was read"):
        plan.side(user_key(row("never added")))
