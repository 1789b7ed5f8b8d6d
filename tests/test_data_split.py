"""Claim: the side of a conversation depends on what the user wrote alone; repeats go once; limits keep routes even."""

from collections import Counter

import pytest

from data.prompts import Row
from data.split import Item, assign, is_heldout, user_key, whole_key


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
