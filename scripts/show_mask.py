"""Show which tokens a chat template and tokenizer put under the loss, conversation by conversation.

    python -m scripts.show_mask FILE --tokenizer DIR_OR_ID [--template FILE] [--date DAY] [--last-turn-only]
        [--max-length N] [--block-bytes N] [--json]

Green: supervised (what the assistant produces, end of turn included). Dim: context. With --json, one object per record:
line, keep, reason, n_tokens, n_supervised, spans (token positions, end exclusive), supervised (texts).
Exit status 1, with one sentence on stderr, when the file is empty or holds no supervised token at all.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.chat import Encoded, RowError, encode_row
from data.prompts import read
from data.records import BLOCK_BYTES, Bad, DataError
from data.tally import Tally
from data.template import DATE, ChatFormat


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    tally = Tally(options.file)
    try:
        chat = ChatFormat(_tokenizer(options.tokenizer), _template(options.template), date=options.date)
        for row in read(options.file, options.block_bytes):
            line, encoded = row.line, None
            try:
                encoded = (
                    row if isinstance(row, Bad) else encode_row(chat, row, options.max_length, options.last_turn_only)
                )
            except RowError as error:
                encoded = Bad(options.file, line, error.reason, error.detail)
            if isinstance(encoded, Bad):
                tally.drop(encoded)
            else:
                tally.kept(encoded)
            if options.json:
                print(json.dumps(_as_dict(chat, line, encoded)))
            elif tally.read <= options.show:
                _show(console, chat, line, encoded)
        tally.check()
    except ValueError as error:
        code = f"{error.code}: " if isinstance(error, DataError) else ""
        print(f"error: {code}{error}", file=sys.stderr)
        return 1
    finally:
        if tally.read and not options.json:
            _statistics(console, tally)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.show_mask", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="JSONL, JSON array, Parquet or CSV file, a folder, or a Hub dataset id")
    parser.add_argument("--tokenizer", default="smollm2-135m", help="folder, Hub id, or smollm2-135m (embedded)")
    parser.add_argument("--template", help="chat template file: Jinja, or JSON with a chat_template field")
    parser.add_argument("--max-length", type=int, help="cut rows after this many tokens")
    parser.add_argument("--last-turn-only", action="store_true", help="supervise the last answer alone")
    parser.add_argument("--date", default=DATE, help="the day on which templates that print it render (data.date)")
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES, help="block size of the reader")
    parser.add_argument("--show", type=int, default=20, help="conversations printed in colour (statistics cover all)")
    parser.add_argument("--json", action="store_true", help="one JSON object per record instead of colours")
    return parser.parse_args(arguments)


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    from heads.embedded import EMBEDDED, embedded_folder

    try:
        return AutoTokenizer.from_pretrained(embedded_folder()[0] if name == EMBEDDED else name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {name}: no tokenizer there ({str(error).splitlines()[0]})") from error


def _template(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--template {name}: {error.strerror}") from error
    if not name.endswith(".json"):
        return text
    found = json.loads(text)
    if not isinstance(found, dict) or not isinstance(found.get("chat_template"), str):
        raise ValueError(f"--template {name}: the JSON file has no chat_template field")
    return str(found["chat_template"])


def _as_dict(chat: ChatFormat, line: int, row: Encoded | Bad) -> dict[str, Any]:
    if isinstance(row, Bad):
        nothing: dict[str, Any] = {"n_tokens": 0, "n_supervised": 0, "spans": [], "supervised": []}
        return {"line": line, "keep": False, "reason": row.reason, "detail": row.detail, **nothing}
    return {
        "line": line,
        "keep": True,
        "reason": None,
        "n_tokens": len(row.ids),
        "n_supervised": row.supervised,
        "spans": [list(span) for span in row.spans],
        "supervised": [chat.tokenizer.decode(row.ids[a:b]) for a, b in row.spans],
    }


def _show(console: Console, chat: ChatFormat, line: int, row: Encoded | Bad) -> None:
    if isinstance(row, Bad):
        console.print(Text(f"line {line}: dropped, {row.reason}  {row.detail}", style="red"))
        return
    console.print(Text(f"line {line}: {row.supervised} of {len(row.ids)} tokens supervised", style="bold"))
    text, at = Text(), 0
    for start, end in row.spans:
        text.append(chat.tokenizer.decode(row.ids[at:start]), style="dim")
        text.append(chat.tokenizer.decode(row.ids[start:end]), style="bold green")
        at = end
    text.append(chat.tokenizer.decode(row.ids[at:]), style="dim")
    console.print(text)


def _statistics(console: Console, tally: Tally) -> None:
    table = Table("rows", "count", title=tally.source, title_justify="left")
    table.add_row("read", str(tally.read))
    table.add_row("kept", str(tally.kept_rows))
    for reason, count in tally.dropped.most_common():
        table.add_row(f"dropped: {reason}", str(count))
    share = tally.supervised / tally.tokens if tally.tokens else 0.0
    table.add_row("tokens", str(tally.tokens))
    table.add_row("supervised tokens", f"{tally.supervised} ({share:.1%})")
    table.add_row("rows truncated", str(tally.truncated))
    table.add_row("answers left out (history rewritten)", str(tally.skipped_turns))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
