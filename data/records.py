"""Bytes to JSON records, streaming, with the physical line each record began on.

A JSONL record ends at `\n` and nowhere else: `str.splitlines` would also cut at U+2028, U+0085 and form feeds, which
are ordinary characters inside a JSON string. The outcome does not depend on `block_bytes`.
"""

import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from pyarrow import ArrowInvalid

BLOCK_BYTES = 1 << 20
MAX_ELEMENT_CHARS = 1 << 28  # one element of a JSON array; beyond this the bracket is surely missing
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, ArrowInvalid)  # of a whole file, not of a record
NO_UTF8 = re.compile("[\udc80-\udcff]")
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".jsonl.xz", ".json.gz", ".json.xz")


class DataError(ValueError):
    """A data set that cannot be used; `code` is a stable name of the reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Bad:
    """A record that cannot become a row, and why."""

    file: str
    line: int
    reason: str
    detail: str = ""


def open_bytes(path: Path) -> BinaryIO:
    """A byte stream of `path`, decompressed where the name ends in .gz or .xz."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return cast(BinaryIO, lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb"))


def records(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, Any] | Bad]:
    """Yield (physical line, JSON value) or Bad for each record of a JSONL, JSON-array, Parquet or CSV file."""
    if block_bytes < 1:
        raise ValueError(f"block_bytes={block_bytes}: the reader needs blocks of at least 1 byte")
    if not path.is_file():
        raise ValueError(f"{path}: no such data file")
    try:
        yield from _records(path, block_bytes)
    except DataError:
        raise
    except (*DAMAGED, UnicodeDecodeError) as error:
        raise DataError("damaged_file", f"{path}: the file is cut short or damaged ({error})") from error


def _records(path: Path, block_bytes: int) -> Iterator[tuple[int, Any] | Bad]:
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    if name.endswith(".parquet"):
        yield from _parquet(path)
    elif name.endswith(".csv"):
        yield from _csv(path)
    elif name.endswith(".json") and _first_byte(path) == b"[":
        yield from _json_array(path, block_bytes)
    else:
        yield from _json_lines(path, block_bytes)


def physical_lines(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Lines of a byte stream without their `\n` (or `\r\n`), whatever the block size."""
    pieces: list[bytes] = []
    with open_bytes(path) as stream:
        while block := stream.read(block_bytes):
            head, *rest = block.split(b"\n")
            pieces.append(head)
            for piece in rest:
                yield b"".join(pieces).removesuffix(b"\r")
                pieces = [piece]
    if any(pieces):
        yield b"".join(pieces).removesuffix(b"\r")


def _json_lines(path: Path, block_bytes: int) -> Iterator[tuple[int, Any] | Bad]:
    for number, line in enumerate(physical_lines(path, block_bytes), start=1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield Bad(str(path), number, "invalid_utf8", f"byte {error.start} of the line is not UTF-8")
        except (json.JSONDecodeError, RecursionError) as error:
            yield Bad(str(path), number, "malformed_json", str(error))


def _first_byte(path: Path) -> bytes:
    with open_bytes(path) as stream:
        while block := stream.read(4096):
            if text := block.removeprefix(codecs.BOM_UTF8).lstrip():
                return text[:1]
    return b""


def _json_array(path: Path, block_bytes: int) -> Iterator[tuple[int, Any]]:
    """Elements of one top-level JSON array; memory holds one element and one block.

    A broken element ends the file (nothing after it can be told apart), so it raises instead of yielding Bad.
    """
    decoder, parse = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
    text, at, line, opened = "", 0, 1, False
    with open_bytes(path) as stream:
        ended = False
        while True:
            start = at
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            line += text.count("\n", start, at)
            if at < len(text) and not opened:
                opened, at = True, at + 1
                continue
            if at < len(text) and text[at] == "]":
                return
            problem = "the array is not closed"
            if at < len(text):
                try:
                    value, end = parse(text, at)
                    if end < len(text) or ended:  # a number at the very end may go on in the next block
                        yield line, value
                        line += text.count("\n", at, end)
                        at = end
                        continue
                except json.JSONDecodeError as error:
                    problem = error.msg
            if ended or len(text) - at > MAX_ELEMENT_CHARS:
                raise DataError("malformed_json", f"{path}: malformed JSON array at line {line}: {problem}")
            block = stream.read(max(block_bytes, len(text) - at))  # doubling keeps long elements linear
            ended = not block
            text, at = text[at:] + decoder.decode(block, final=ended), 0


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    from pyarrow import parquet

    row = 0
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
        for value in batch.to_pylist():
            row += 1
            yield row, without_nulls(value)


def _csv(path: Path) -> Iterator[tuple[int, Any] | Bad]:
    """Rows of a table with a header line; one that cannot be read is Bad and the next goes on."""
    csv.field_size_limit(MAX_ELEMENT_CHARS)  # the library's own limit, 128 KB, is below a long document
    with open_bytes(path) as stream:
        # bytes that are no UTF-8 become lone surrogates, so that they spoil their own row alone
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, strict=True)  # or a quote that is never closed would swallow every row after it
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield Bad(str(path), line, "malformed_csv", str(error))
                continue
            if not cells or header is None:
                header = cells or header
                continue
            value = {name: cell for name, cell in zip(header, cells, strict=False) if name}
            if any(NO_UTF8.search(cell) for cell in value.values()):
                yield Bad(str(path), line, "invalid_utf8", "a byte of the row is not UTF-8")
            else:
                yield line, value


def without_nulls(value: Any) -> Any:
    """Drop keys that hold None, at every depth: a columnar file invents them for fields that other rows have."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value
