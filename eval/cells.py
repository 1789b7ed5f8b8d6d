"""Tables of the report page: cells, and the two that every table shows, tokens per pass and decode speed."""

from dataclasses import dataclass, field

from eval.table import Row, finite, interval, number, speedup


@dataclass(frozen=True)
class Cell:
    """One table cell: the figure, a second smaller line, and whether it is a loss against plain decoding."""

    text: str
    note: str = ""
    loses: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the page; each body row starts with its header cell. `groups`: (label, columns) above the head."""

    caption: str
    head: list[str]
    body: list[list[Cell]]
    groups: list[tuple[str, int]] = field(default_factory=list)


def slower(row: Row) -> bool:
    measured = finite(row.get("speedup_decode"))
    return row["method"] != "plain" and measured is not None and measured < 1


def speed(row: Row) -> Cell:
    return Cell(speedup(row.get("speedup_decode")), interval(row.get("speedup_decode_ci")), slower(row))


def length(row: Row) -> Cell:
    return Cell(number(row.get("acceptance_length")), interval(row.get("acceptance_length_ci")))
