"""Says in one line what is wrong with a configuration: the key, the value, and what was probably meant."""

import difflib
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Union, get_args, get_origin, get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

COULD_NOT_OVERRIDE = re.compile(r"Could not override '([^']+)'")
ERROR_IN_FILE = re.compile(r"In '([^']+)': (\w+) raised while composing config:\s*(.*)", re.DOTALL)
FULL_KEY = re.compile(r"full_key: (\S+)")
UNKNOWN_KEY = re.compile(r"Key '[^']*' (?:not in|is not in)")


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def setting_keys(settings_type: type, prefix: str = "") -> list[str]:
    """Every dotted key of a nested dataclass: `["name", "train", "train.lr"]`."""
    keys = []
    hints = get_type_hints(settings_type)
    for field in fields(settings_type):
        keys.append(prefix + field.name)
        hint = hints[field.name]
        # `Nested | None` is a nested group too
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        for option in options:
            if isinstance(option, type) and is_dataclass(option):
                keys += setting_keys(option, f"{prefix}{field.name}.")
    return keys


def known_keys(settings_type: type, schemas: Mapping[str, type], conf: Path) -> list[str]:
    """Keys a user may set: those of the settings, of the settings of each group choice, and the groups of `conf`.

    `schemas` maps a choice such as `head/eagle3` to its dataclass, whose keys then stand under `head.`.
    """
    keys = setting_keys(settings_type)
    for choice, schema in schemas.items():
        keys += setting_keys(schema, choice.split("/")[0] + ".")
    keys += [folder.name for folder in sorted(conf.iterdir()) if any(folder.glob("**/*.yaml"))]
    return sorted(set(keys))


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key most like `key`. A key with the same last part wins: `lr` -> `train.lr`."""

    def likeness(candidate: str) -> tuple[float, float]:
        last = difflib.SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        return (max(whole, 0.95 * last), whole)

    return max(sorted(known), key=likeness)


def extra_key(composed: DictConfig, prefix: str = "") -> str | None:
    """The first key, dotted, that `+key=value` forced into a node whose dataclass does not have it; else None."""
    declared = OmegaConf.get_type(composed)
    names = {field.name for field in fields(declared)} if declared and is_dataclass(declared) else None
    for name, node in composed.items_ex(resolve=False):
        key = str(name)
        if names is not None and key not in names:
            return f"{prefix}{key}"
        if isinstance(node, DictConfig) and not (node._is_none() or node._is_missing() or node._is_interpolation()):
            if extra := extra_key(node, f"{prefix}{key}."):
                return extra
    return None


def explain(error: Exception, known: list[str]) -> str:
    """One line for an error that Hydra or OmegaConf raised while it composed or converted the configuration."""
    if isinstance(error, OverrideParseException):
        return _explain_grammar(error.override)
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        # The dataclasses that entry.register puts beside the choices are none themselves.
        choices = [option for option in error.options if not option.endswith("_settings")]
        return f"{group}={choice}: no such choice; there is {', '.join(choices)}"
    message = str(error)
    if override := COULD_NOT_OVERRIDE.search(message):
        if "No match in the defaults list" in message and override[1] in known:
            return f"{override[1]}= chooses from conf/{override[1]}, a group that this command does not use"
        return unknown(override[1], known)
    if in_file := ERROR_IN_FILE.search(message):
        path, _, detail = in_file.groups()
        where = f"conf/{path.removesuffix('.yaml')}.yaml: "
        return where + _explain_value(detail, known)
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        line = message.removeprefix("Error merging override ")
        if UNKNOWN_KEY.search(str(error.__cause__)):
            return unknown(line.lstrip("+~").partition("=")[0], known)
        return f"{line}: {_first_line(error.__cause__)}"
    if isinstance(error, InterpolationResolutionError):
        return _first_line(message).partition(" raised while resolving interpolation: ")[2] or _first_line(message)
    if isinstance(error, OmegaConfBaseException):
        return _explain_value(message, known)
    return one_line(message)


def unknown(key: str, known: list[str]) -> str:
    return f"unknown configuration key '{key}'; the nearest known key is '{nearest(key, known)}'"


def _first_line(text: object) -> str:
    # The lines after the first name OmegaConf's own classes.
    return str(text).strip().splitlines()[0].strip()


def _explain_value(detail: str, known: list[str]) -> str:
    full_key = FULL_KEY.search(detail)
    key = full_key[1] if full_key else ""
    if key and UNKNOWN_KEY.search(detail):
        return unknown(key, known)
    return f"{key}: {_first_line(detail)}" if key else _first_line(detail)


def _explain_grammar(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals:
        return f"cannot read '{override}': an override is key=value"
    reason = "a value that holds '=' must be quoted" if "=" in value else "the value must be quoted"
    return f"cannot read '{override}': {reason}, write \"{key}='{value}'\" (double quotes for the shell)"
