"""The report page and the console table say what the rows say. All numbers here are sample inputs of the tests."""

import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.report import best, losses, write
from eval.table import DASH, formula_speedup, labelled, main_k, print_table, speedup

Row = dict[str, Any]
ROUTES = ["chat", "code", "code edit", "maths", "summarise", "extract", "translate", "qa with context", "creative"]
COST = {
    "target_pass_s": {str(n): 0.05 + 0.002 * n for n in range(1, 17)},
    "draft_step_s": {"medusa": 0.001, "eagle3": 0.006},
    "draft_fixed_s": {"medusa": 0.004},
}


def sample_row(method: str, k: int, temperature: float, route: str, joint: list[float], speed: float) -> Row:
    """A result row whose figures agree with each other: tau = 1 + sum of joint."""
    length = 1 + sum(joint)
    conditional = [b / a for a, b in zip([1.0, *joint], joint, strict=False)]
    return {
        "method": method,
        "k": k,
        "temperature": temperature,
        "rule": "greedy" if temperature == 0 else "rejection",
        "proposal": "greedy" if temperature == 0 else "sampled",
        "route": route,
        "prompts": 40 if route == "all" else 4,
        "tokens": 2560,
        "acceptance_length": length,
        "acceptance_length_ci": [length - 0.1, length + 0.1],
        "acceptance_length_macro": length + 0.02,
        "acceptance_rate": sum(joint) / k if k else None,
        "position_acceptance_joint": joint,
        "position_acceptance_conditional": conditional,
        "alpha_sum_min": conditional,
        "alpha_greedy": [0.9 * value for value in conditional],
        "predicted_acceptance_length": length * 1.02 if k else None,
        "draft_overhead": 0.0 if k == 0 else 0.12,
        "tokens_per_second": 17.3 * speed,
        "speedup_decode": speed,
        "speedup_decode_ci": [speed - 0.06, speed + 0.06],
        "speedup_e2e": 1 + (speed - 1) * 0.8,
        "speedup_efficiency": speed / length,
        "loop_share": 0.14,
    }


def sample_rows() -> list[Row]:
    """Plain, lookup, two heads and a random head at T = 0 and 1; eagle3 wins, random loses, medusa loses at T = 1."""
    found = []
    shares = {"lookup": 0.3, "medusa": 0.45, "eagle3": 0.6, "random": 0.01}
    for temperature in (0.0, 1.0):
        found.append(sample_row("plain", 0, temperature, "all", [], 1.0))
        for method, share in shares.items():
            share *= 1 - 0.3 * temperature
            for k in range(1, 6):
                joint = [share**i for i in range(1, k + 1)]
                found.append(sample_row(method, k, temperature, "all", joint, (1 + sum(joint)) / (1 + 0.13 * k)))
            for i, route in enumerate(ROUTES):
                joint = [(share * (0.7 + 0.06 * i)) ** j for j in range(1, 5)]
                found.append(sample_row(method, 4, temperature, route, joint, (1 + sum(joint)) / 1.52))
    return found


def sample_training() -> dict[str, list[Row]]:
    logs = {}
    for head, start in (("medusa", 5.0), ("eagle3", 6.5)):
        rows: list[Row] = []
        for step in range(1, 401):
            loss = start * math.exp(-step / 150) + 2 + 0.3 * math.sin(step)
            rows.append(
                {"step": step, "split": "train", "loss": loss, "lr": 1e-3, "tokens": 512 * step, "seconds": step}
            )
            if step % 50 == 0:
                length = start / 3 - math.exp(-step / 120)
                rows.append(
                    {"step": step, "split": "heldout", "loss": loss + 0.2, "predicted_acceptance_length": length}
                )
        logs[head] = rows
    return logs


META = {
    "target": "smollm2-135m",
    "revision": "sample",
    "dtype": "float32",
    "device": "cpu",
    "threads": 2,
    "batch": 1,
    "prompts": 40,
    "tokens": 25600,
    "rule": "greedy at T = 0, rejection at T = 1",
    "proposal": "greedy and sampled",
    "temperature": "0, 1",
    "k": 4,
    "date": "2030-01-01",
    "greedy_equality": {"prompts": 20, "tokens": 1280, "equal": True},
    "checks": [
        {"name": "1 <= tau <= k + 1", "ok": True, "detail": ""},
        {"name": "joint acceptance never rises", "ok": True, "detail": "48 rows"},
    ],
}


class Page(HTMLParser):
    """What a test asks of the page: text in order, attribute values, open elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if data.strip() and not {"style", "title"} & set(self.inside):
            self.texts.append(data.strip())


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("run"), sample_rows(), COST, sample_training(), META)


def page(tmp_path: Path, rows: list[Row] | None = None, **changes: Any) -> str:
    given = {"rows": sample_rows() if rows is None else rows, "cost": COST, "training": sample_training(), "meta": META}
    return write(tmp_path, **(given | changes)).read_text(encoding="utf-8")


def test_the_page_loads_nothing_from_anywhere(sample: Path) -> None:
    html = sample.read_text(encoding="utf-8")
    tags = Page(html).tags
    linked = [value for _, attrs in tags for name, value in attrs.items() if name.split(":")[-1] in ("src", "href")]
    assert linked and all((value or "").startswith("#") for value in linked), linked
    assert not {"link", "script", "img", "iframe", "object"} & {tag for tag, _ in tags}
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    assert len(html) < 600_000
    assert [path.name for path in sample.parent.iterdir()] == ["report.html"]


def test_passed_checks_are_the_first_line(sample: Path) -> None:
    assert Page(sample.read_text(encoding="utf-8")).texts[0] == "All 2 self-checks passed."


@pytest.mark.parametrize("checks", [[{"name": "tau = 1 + sum of joint", "ok": False, "detail": "2.1 is not 1.9"}], []])
def test_a_failed_or_missing_check_is_named_in_red_on_the_first_line(tmp_path: Path, checks: list[Row]) -> None:
    html = page(tmp_path, [], training={}, meta=META | {"checks": checks})
    first = Page(html).texts[0]
    assert first.startswith("Self-check FAILED")
    assert not checks or "tau = 1 + sum of joint (2.1 is not 1.9)" in first
    assert re.search(r'class="verdict bad"', html) and "<title>FAILED" in html


def test_every_figure_is_drawn_with_a_text_alternative_and_ids_of_its_own(sample: Path) -> None:
    html = sample.read_text(encoding="utf-8")
    tags = Page(html).tags
    drawn = [attrs["id"] for tag, attrs in tags if tag == "figure"]
    per_temperature = [f"{name}-t{t}" for name in ("position", "speedup", "routes") for t in (0, 1)]
    assert drawn == [*per_temperature, "cost", "loss", "length"]
    pictures = [attrs for tag, attrs in tags if tag == "svg"]
    assert len(pictures) == len(drawn) and all(p["role"] == "img" and p["aria-label"] for p in pictures)
    assert "eagle3: 1: 0.60, 2: 0.36" in (pictures[0]["aria-label"] or "")
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_the_verdict_names_the_best_method_and_every_losing_row() -> None:
    rows = labelled(sample_rows())
    assert best(rows, 0.0).startswith("T = 0: fastest is eagle3 at k = 3, 1.57 times plain decoding (interval 1.51 to")
    told = [f"{where}: {figures}" for where, figures in losses(rows)]
    slow = [row for row in rows if row["method"] != "plain" and row["speedup_decode"] < 1]
    assert slow and any(row["route"] != "all" for row in slow)
    for row in slow:
        where = f"{row['label']} at T = {row['temperature']:g}"
        if row["route"] == "all":
            assert any(t.startswith(f"{where}, all prompts: ") and f"k = {row['k']} (" in t for t in told)
        else:
            assert any(t.startswith(f"{where}, k = 4, routes: ") and f"{row['route']} (0." in t for t in told)


def test_a_report_without_a_winner_says_so() -> None:
    rows = labelled([sample_row("medusa", 4, 1.0, "all", [0.2, 0.1], 0.82)])
    assert best(rows, 1.0).startswith(
        "T = 1: no method beats plain decoding. Closest: medusa at k = 4, 0.82 times plain"
    )


def test_a_speedup_within_its_noise_is_not_called_faster() -> None:
    rows = labelled([sample_row("medusa", 4, 0.0, "all", [0.5], 1.04)])
    assert best(rows, 0.0).endswith("The interval reaches down to 1, so this is not shown to be faster.")


@pytest.mark.filterwarnings("error")
def test_hostile_names_are_text(tmp_path: Path) -> None:
    names = [
        "<script>alert(1)</script>",
        '"><img src=x>',
        "$\\frac",
        "--></svg>",
        "{{ 7 * 7 }}",
        "日本語\n\x00",
        "&lt;b&gt;",
    ]
    joint = [0.5, 0.2, 0.1, 0.05]
    rows = [sample_row("eagle3", 4, 0.0, "all", joint, 1.2)]
    rows += [sample_row(name, 4, 0.0, name, joint, 0.9) for name in names]
    html = page(
        tmp_path,
        rows,
        meta=META | {"target": "</title><script>", "checks": [{"name": "<b>", "ok": False, "detail": "<i>"}]},
    )
    tags = Page(html).tags
    assert not {"script", "img", "b", "i"} & {tag for tag, _ in tags}
    assert "<b> (<i>)" in Page(html).texts[0]
    assert "{{ 7 * 7 }}" in Page(html).texts


def test_missing_values_are_a_dash_never_nan(tmp_path: Path) -> None:
    full = sample_row("eagle3", 4, 0.0, "all", [0.5, 0.2, 0.1, 0.05], 1.2)
    keep = ("method", "k", "temperature", "rule", "proposal", "route", "prompts", "tokens")
    rows = []
    for value in (None, float("nan"), math.inf):
        rows += [
            {key: full[key] if key in keep else value for key in full} | {"method": f"m{value}", "route": r}
            for r in ("all", "x")
        ]
    rows = [row | {key: None for key in row if "position" in key or "alpha" in key or "_ci" in key} for row in rows]
    rows += [{key: full[key] for key in keep}]
    meta = {"target": None, "rule": float("nan"), "checks": META["checks"]}
    texts = Page(
        page(tmp_path, rows, cost={"target_pass_s": {}, "draft_step_s": {"m": None}}, training={"h": []}, meta=meta)
    ).texts
    page_text = " ".join(texts).replace("mnan", "")
    assert (
        DASH in texts
        and "nan" not in page_text.lower()
        and "None" not in page_text.replace("mNone", "").replace("None was", "")
    )
    assert "T = 0: no method's speed was measured." in texts
    assert "No measured row is slower than plain decoding." not in texts


def test_no_rows_at_all_still_give_a_page(tmp_path: Path) -> None:
    assert "There are no result rows." in Page(page(tmp_path, [], cost={}, training={})).texts


def test_a_failed_write_leaves_the_old_report_and_one_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ValueError, match="cannot write the report .*report.html.*: choose a run folder"):
        write(blocked, sample_rows(), COST, {}, META)
    assert blocked.read_text() == "not a folder"


def test_the_formula_uses_the_measured_curve() -> None:
    row = sample_row("eagle3", 3, 0.0, "all", [0.6, 0.36, 0.2], 1.3)
    flat = {"target_pass_s": {"1": 0.1, "16": 0.1}, "draft_step_s": {"eagle3": 0.01}}
    assert formula_speedup(row, flat) == pytest.approx(2.16 / (3 * 0.1 + 1))
    steep = {"target_pass_s": {1: 0.1, 4: 0.2}, "draft_step_s": {"eagle3": 0.01}, "draft_fixed_s": {"eagle3": 0.02}}
    assert formula_speedup(row, steep) == pytest.approx(2.16 * 0.1 / (0.2 + 0.05))
    assert formula_speedup(row, {"target_pass_s": {"1": 0.1}, "draft_step_s": {"eagle3": 0.01}}) is None
    assert formula_speedup(row | {"method": "lookup"}, flat) is None


def test_a_loss_is_never_rounded_up_to_no_loss() -> None:
    assert [speedup(value) for value in (0.9999, 0.984, 1.0, None)] == ["0.99× ↓", "0.98× ↓", "1.00×", DASH]


def test_two_proposals_of_one_method_are_two_series() -> None:
    row = sample_row("eagle3", 4, 1.0, "all", [0.5], 1.1)
    rows = labelled([row, row | {"proposal": "greedy", "rule": "one-hot"}, row | {"method": "medusa"}])
    assert [r["label"] for r in rows] == ["eagle3, sampled draft", "eagle3, greedy draft", "medusa"]


def test_the_main_k_is_the_wanted_one_if_it_was_run() -> None:
    rows = sample_rows()
    assert (main_k(rows, 2), main_k(rows, "1, 2, 3"), main_k(rows, 9), main_k([])) == (2, 4, 4, 0)


@pytest.mark.parametrize("width", [80, 140])
def test_the_console_table_holds_both_temperatures_and_marks_losses(width: int) -> None:
    out = io.StringIO()
    hostile = sample_row("[red]x", 4, 0.0, "all", [0.1], 0.7) | {"speedup_e2e": None}
    print_table([*sample_rows(), hostile], Console(file=out, width=width))
    text = out.getvalue()
    assert "T = 0, k = 4" in text and "T = 1, k = 4" in text
    assert "0.70× ↓" in text and "[red]x" in text and DASH in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_a_sweep_on_few_prompts_does_not_win_the_verdict() -> None:
    sweep = {"method": "eagle3", "k": 1, "temperature": 0.0, "route": "all", "prompts": 2, "speedup_decode": 1.9}
    table = {"method": "lookup", "k": 4, "temperature": 0.0, "route": "all", "prompts": 20, "speedup_decode": 1.2}
    assert "lookup" in best(labelled([sweep, table]), 0.0)
    assert "eagle3" in best(labelled([{**sweep, "prompts": 20}, table]), 0.0)
