"""The report's figures as inline SVG.

Every figure is drawn at phone width and scaled up, so its text stays readable on both. Colours are drawn in one light
palette and then replaced by CSS variables of the page, so that one SVG serves the light and the dark theme; every
series also has its own marker.
"""

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from eval.table import (
    Row,
    at_main_k,
    by_route,
    draft_seconds,
    finite,
    formula_speedup,
    interval,
    number,
    overall,
    target_pass,
)

INK, GRID = "#1a1b1c", "#dadbdc"
# Okabe and Ito's hues, darkened where too pale on white; the page's --s1..--s6 are their likes for a dark ground.
PALETTE = ["#0072b2", "#d55e00", "#008060", "#aa4499", "#8a6d00", "#332288"]
THEME = {INK: "currentColor", GRID: "var(--grid)"} | {colour: f"var(--s{i})" for i, colour in enumerate(PALETTE, 1)}
MARKERS = "osD^vP"
WIDTH = 4.6  # inches; 331 points, about one CSS pixel each on a phone
STYLE: dict[Any, Any] = {  # matplotlib types these names as a 300-way Literal
    "svg.fonttype": "none",  # text stays text: small, selectable, in the page's font
    "svg.hashsalt": "drafthead",  # the same rows give the same file
    "text.parse_math": False,  # a route named "$x" is not a formula
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """One figure of the page; `svg` is None when there was nothing to draw, and the caption says why."""

    name: str
    title: str
    caption: str
    svg: Markup | None


@dataclass(frozen=True)
class Line:
    """One series of a line figure: its points, how it looks, and the interval (low, high) around each point, if any."""

    label: str
    points: Points
    style: dict[str, Any]
    bounds: list[tuple[float, float] | None] | None = None


def styles(labels: list[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each series, the same in every figure; plain decoding is ink."""
    drawn = list(dict.fromkeys(label for label in labels if label != "plain"))
    found = {name: {"color": PALETTE[i % 6], "marker": MARKERS[i % 6]} for i, name in enumerate(drawn)}
    return {"plain": {"color": INK, "marker": "x"}} | found


def short(text: str, length: int = 22) -> str:
    """A label that fits: control characters and line breaks become blanks, a long one is cut."""
    clean = "".join(letter if letter.isprintable() else " " for letter in str(text)).strip()
    return clean if len(clean) <= length else clean[: length - 1] + "…"


def _render(name: str, title: str, caption: str, alt: str, draw: Callable[[Axes], None], height: float) -> Plot:
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the browser's fonts have it
        drawing = Figure(figsize=(WIDTH, height), layout="constrained")
        drawing.patch.set_visible(False)
        axes = drawing.add_subplot()
        axes.patch.set_visible(False)
        draw(axes)
        # Above the axes: over the lines it would hide points, and beside them it would halve the plot on a phone.
        drawing.legend(loc="outside upper left", ncols=2, handlelength=2.4, columnspacing=1.2)
        out = io.StringIO()
        FigureCanvasSVG(drawing).print_svg(out, metadata={"Date": None})
    return Plot(name, title, caption, _inline(out.getvalue(), name, f"{title}. {alt}"))


def _inline(svg: str, name: str, alt: str) -> Markup:
    """Matplotlib's SVG file as an element of the page: no prolog, metadata or global style; own ids, themed colours."""
    body = svg[svg.index("<svg") :]
    view = re.search(r'viewBox="[^"]*"', body)
    assert view, f"no viewBox in {body[:200]}"
    body = f'<svg {view[0]} role="img" aria-label="{escape(alt)}">' + body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style type=\"text/css\">.*?</style>", "", body, flags=re.S)
    body = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", body)
    return Markup(re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})", lambda m: m[1] + THEME.get(m[2], m[2]), body))


def _chart(name: str, title: str, caption: str, lines: list[Line], height: float = 3.0, **axes_settings: Any) -> Plot:
    """A line figure; its text alternative lists every drawn value (the ends only, for a long line)."""
    lines = [line for line in lines if line.points]
    if not lines:
        return Plot(name, title, f"Not measured. {caption}", None)

    def draw(axes: Axes) -> None:
        for line in lines:
            x, y = zip(*line.points, strict=True)
            axes.plot(x, y, **{"ms": 4.5, "lw": 1.6, **line.style}, label=short(line.label, 30))
            for i, bounds in enumerate(line.bounds or []):
                if bounds:
                    axes.vlines(x[i], *bounds, colors=line.style["color"], lw=1)
        axes.set(**axes_settings)

    spoken = []
    for line in lines:
        shown = line.points if len(line.points) <= 16 else [line.points[0], line.points[-1]]
        spoken.append(f"{line.label}: {', '.join(f'{x:g}: {number(y)}' for x, y in shown)}.")
    return _render(name, title, caption, " ".join(spoken), draw, height)


def _thin(points: Points, most: int = 150) -> Points:
    """Mean over equal runs of neighbours, so that a long training log stays a small figure."""
    size = -(-len(points) // most) or 1
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]


def _log(rows: list[Row], split: str, key: str) -> Points:
    found = [(finite(row.get("step")), finite(row.get(key))) for row in rows if row.get("split") == split]
    return [(x, y) for x, y in found if x is not None and y is not None]


def training(logs: dict[str, list[Row]], look: dict[str, Any]) -> list[Plot]:
    """Loss and held-out predicted acceptance length by optimiser step, one colour per head."""
    losses, lengths = [], []
    for name, rows in logs.items():
        thin = {"color": look[name]["color"], "lw": 0.9, "alpha": 0.6}
        losses.append(Line(f"{name}, training", _thin(_log(rows, "train", "loss")), thin))
        losses.append(Line(f"{name}, held-out", _log(rows, "heldout", "loss"), look[name] | {"ls": "--"}))
        lengths.append(Line(name, _log(rows, "heldout", "predicted_acceptance_length"), look[name]))
    return [
        _chart(
            "loss",
            "Loss in training",
            "Each head's own loss: two heads with different losses do not compare.",
            losses,
            xlabel="step",
            ylabel="loss",
        ),
        _chart(
            "length",
            "Predicted acceptance length in training",
            "Tokens per target pass predicted from held-out conversations.",
            lengths,
            xlabel="step",
            ylabel="tokens per target pass",
        ),
    ]


def position(rows: list[Row], temperature: float, k: int, look: dict[str, Any]) -> Plot:
    """Joint acceptance by draft position at the main k."""
    lines = []
    for row in at_main_k(overall(rows, temperature), k):
        known = [(float(i), finite(value)) for i, value in enumerate(row.get("position_acceptance_joint") or [], 1)]
        lines.append(Line(row["label"], [(i, value) for i, value in known if value is not None], look[row["label"]]))
    ticks = sorted({i for line in lines for i, _ in line.points})
    return _chart(
        _name("position", temperature),
        f"Acceptance by position, T = {temperature:g}",
        f"Share of target passes that accepted the draft up to and including this position (joint), at k = {k}.",
        lines,
        xlabel="draft position",
        ylabel="share accepted",
        ylim=(0, 1),
        xticks=ticks,
    )


def speedup_by_k(rows: list[Row], temperature: float, cost: dict[str, Any], look: dict[str, Any]) -> Plot:
    """Measured speedup_decode by k with its interval, and the formula at the measured cost curve, dashed."""
    found = [row for row in overall(rows, temperature) if row["method"] != "plain"]
    found.sort(key=lambda row: row["k"])
    lines, without = [], []
    for label in dict.fromkeys(row["label"] for row in found):
        own = [row for row in found if row["label"] == label]
        seen = [row for row in own if finite(row.get("speedup_decode")) is not None]
        bounds = [row["speedup_decode_ci"] if interval(row.get("speedup_decode_ci")) else None for row in seen]
        lines.append(Line(label, [(row["k"], row["speedup_decode"]) for row in seen], look[label], bounds))
        told = [(row["k"], value) for row in own if (value := formula_speedup(row, cost)) is not None]
        lines.append(Line(f"{label}, formula", told, {"color": look[label]["color"], "ls": "--", "lw": 1.2}))
        without += [] if told else [label]
    ks = sorted({k for line in lines for k, _ in line.points})
    if ks:
        lines.append(Line("plain decoding", [(ks[0], 1), (ks[-1], 1)], {"color": INK, "lw": 0.9, "ls": ":"}))
    caption = (
        "Decode speed over plain decoding, with its interval. "
        "Formula, from the measured costs: tokens per pass × t(1) ÷ (t(k + 1) + draft time)."
    )
    if without:
        caption += f" No formula where the draft cost was not measured: {'; '.join(without)}."
    return _chart(
        _name("speedup", temperature),
        f"Speedup by draft length, T = {temperature:g}",
        caption,
        lines,
        height=3.6,
        xlabel="k, drafted tokens per pass",
        ylabel="times plain decoding",
        xticks=ks,
    )


def routes(rows: list[Row], temperature: float, k: int, look: dict[str, Any]) -> Plot:
    """Acceptance length by route at the main k: one group of bars per route."""
    name, title = _name("routes", temperature), f"Acceptance length by route, T = {temperature:g}"
    caption = f"Tokens per target pass at k = {k}; the line at 1 is plain decoding."
    values = by_route(rows, temperature, k)
    labels = list(dict.fromkeys(label for found in values.values() for label in found if label != "plain"))
    if not labels:
        return Plot(name, title, f"Not measured. {caption}", None)
    thick = 0.8 / len(labels)
    # One scale for every temperature: the figures stand side by side.
    longest = max((finite(row.get("acceptance_length")) or 1 for row in rows if row["route"] != "all"), default=1)

    def draw(axes: Axes) -> None:
        for j, label in enumerate(labels):
            lengths = [finite(found.get(label, {}).get("acceptance_length")) for found in values.values()]
            places = [i + (j - (len(labels) - 1) / 2) * thick for i in range(len(values))]
            widths = [length or 0 for length in lengths]
            bars = axes.barh(places, widths, thick * 0.92, color=look[label]["color"], label=short(label, 30))
            axes.bar_label(bars, [number(length) for length in lengths], padding=2, fontsize=7)
        axes.set_yticks(range(len(values)), [short(route) for route in values])
        axes.axvline(1, color=INK, lw=0.9, ls=":")
        axes.grid(visible=False, axis="y")
        axes.set(xlabel="tokens per target pass", xlim=(0, longest * 1.12), ylim=(len(values) - 0.5, -0.5))

    spoken = []
    for route, found in values.items():
        lengths = [f"{label} {number(row.get('acceptance_length'))}" for label, row in found.items()]
        spoken.append(f"{route}: {', '.join(lengths)}.")
    return _render(name, title, caption, " ".join(spoken), draw, height=1.1 + len(values) * (0.14 * len(labels) + 0.12))


def cost_curve(cost: dict[str, Any], look: dict[str, Any]) -> Plot:
    """Milliseconds of one target pass by its number of tokens, and of drafting as many tokens with each head."""
    passes = [(n, 1000 * s) for n, s in zip(*target_pass(cost), strict=True)]
    lines = [Line("target pass", passes, {"color": INK, "marker": "x"})]
    for method in cost.get("draft_step_s") or {}:
        drafted = [(k, s) for k in range(1, 9) if (s := draft_seconds(cost, method, k)) is not None]
        lines.append(Line(f"{method} draft", [(k, 1000 * s) for k, s in drafted], look[method]))
    return _chart(
        "cost",
        "Cost of a target pass",
        "Measured time of one target pass over 1 to 16 tokens, and of drafting k tokens; at 1: one draft step.",
        lines,
        xlabel="tokens",
        ylabel="milliseconds",
        ylim=(0, None),
    )


def _name(kind: str, temperature: float) -> str:
    return f"{kind}-t{temperature:g}".replace(".", "_")
