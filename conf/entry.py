"""Starts a stage: composes `conf/<stage>.yaml`, turns it into the stage's settings and calls the stage with them.

A stage's `__main__.py` is three things: a dataclass made of the settings dataclasses of its files, a `main`, and

    if __name__ == "__main__":
        run("train", TrainRun, main)

Primary configs begin with these defaults, so that a key which the dataclass does not have is refused, in YAML and on
the command line alike, and so that every stage writes to `outputs/<stage>/<name>`:

    defaults:
      - train_settings     # the dataclass, registered here
      - common
      - head: eagle3       # groups
      - _self_
      - experiment: null
    hydra:
      job:
        name: train

All of Hydra's command line works (`--help`, `--cfg job`, `-m`, `hydra/launcher=submitit_local`). A user's mistake ends
the command with one line on standard error and no traceback: exit status 2 when the configuration is wrong, 1 when the
stage raised ValueError or OSError. HYDRA_FULL_ERROR=1 shows the traceback instead.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import explain, extra_key, known_keys, one_line, unknown

CONF = Path(__file__).resolve().parent
CONFIG_ERROR, USER_ERROR, INTERRUPTED = 2, 1, 130
FULL_ERROR = "HYDRA_FULL_ERROR"

T = TypeVar("T")


def run(
    stage: str,
    settings_type: type[T],
    main: Callable[[T], int | None],
    schemas: Mapping[str, type] | None = None,
    conf: Path = CONF,
) -> None:
    """Compose the settings of `stage` from sys.argv and call `main(settings)`; a non-zero return is the exit status.

    `schemas` gives group choices a dataclass of their own: `{"head/eagle3": Eagle3Config}` registers
    `head/eagle3_settings`, which `conf/head/eagle3.yaml` names in its defaults; the field is then declared `head: Any`.
    Raises SystemExit only.
    """
    schemas = schemas or {}
    register(stage, settings_type, schemas)
    known = known_keys(settings_type, schemas, conf)
    shows_tracebacks = os.environ.get(FULL_ERROR)

    def task(composed: DictConfig) -> None:
        if extra := extra_key(composed):
            _stop(unknown(extra, known), CONFIG_ERROR, KeyError(extra), shows_tracebacks)
        try:
            settings = to_settings(composed, settings_type)
        except (OmegaConfBaseException, ValueError) as error:
            _stop(explain(error, known), CONFIG_ERROR, error, shows_tracebacks)
        in_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        if in_sweep:
            # Each job of a sweep is a run of its own: its name is the folder that Hydra numbered.
            settings.name = Path(HydraConfig.get().runtime.output_dir).name  # type: ignore[attr-defined]
        try:
            with _environment(FULL_ERROR, shows_tracebacks):
                status = main(settings)
        except (ValueError, OSError) as error:
            if in_sweep:
                raise  # the sweep's launcher carries it to the process that reports
            _stop(one_line(error) or type(error).__name__, USER_ERROR, error, shows_tracebacks)
        if status:
            raise SystemExit(status)

    arguments = sys.argv
    sys.argv = [arguments[0], *open_names(own_arguments(arguments[1:]), settings_type)]
    try:
        # Hydra prints its own report of an error and exits with 1 unless told to raise it.
        with _environment(FULL_ERROR, "1"):
            hydra.main(version_base="1.3", config_path=str(conf), config_name=stage)(task)()
    except (HydraException, OmegaConfBaseException) as error:
        _stop(explain(error, known), CONFIG_ERROR, error, shows_tracebacks)
    except (ValueError, OSError) as error:
        _stop(one_line(error) or type(error).__name__, USER_ERROR, error, shows_tracebacks)
    except KeyboardInterrupt as error:
        _stop("interrupted; the same command goes on where it stopped", INTERRUPTED, error, shows_tracebacks)
    finally:
        sys.argv = arguments


def register(stage: str, settings_type: type, schemas: Mapping[str, type]) -> None:
    """Make `<stage>_settings` and each `<group>/<choice>_settings` known to Hydra's defaults lists."""
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
    store = ConfigStore.instance()
    store.store(name=f"{stage}_settings", node=opened(OmegaConf.structured(settings_type)))
    for choice, schema in schemas.items():
        group, _, name = choice.rpartition("/")
        store.store(group=group, name=f"{name}_settings", node=schema)


def opened(node: DictConfig) -> DictConfig:
    """`node` with its mappings (fields of type dict) open to keys of the user's own: `heads={mine: outputs/...}`.

    Hydra closes the whole configuration, which would refuse any key that a mapping's default does not have.
    """
    declared = OmegaConf.get_type(node)
    if not (declared and is_dataclass(declared)):
        OmegaConf.set_struct(node, False)
    for _, child in node.items_ex(resolve=False):
        if isinstance(child, DictConfig) and not (child._is_none() or child._is_missing() or child._is_interpolation()):
            opened(child)
    return node


def to_settings(composed: DictConfig, settings_type: type[T]) -> T:
    """The dataclass object for a composed config. Raises OmegaConfBaseException or a `__post_init__`'s ValueError."""
    merged = OmegaConf.merge(OmegaConf.structured(settings_type), composed)
    return cast(T, OmegaConf.to_object(merged))


def folder_name(name: str) -> str:
    """`name`, refused where a folder of that name would need quoting in a later override or leave its place."""
    if not re.fullmatch(r"[^=,#\s/\\]+", str(name)) or str(name) in (".", ".."):
        raise ValueError(f"name={name!r} cannot name a folder here: use no '=', ',', '#', '/' or space")
    return str(name)


def own_arguments(arguments: list[str]) -> list[str]:
    """Without what launchers add: `["--local_rank=0", "train.lr=1e-4"]` -> `["train.lr=1e-4"]`.

    Ranks other than 0 do not write Hydra's copy of the config: all share one run folder.
    """
    kept: list[str] = []
    skip_value = False
    for argument in arguments:
        if skip_value:
            skip_value = False
        elif argument in ("--local_rank", "--local-rank"):
            skip_value = True
        elif not argument.startswith(("--local_rank=", "--local-rank=")):
            kept.append(argument)
    if os.environ.get("RANK", "0") != "0":
        kept.append("hydra.output_subdir=null")
    return kept


def open_names(arguments: list[str], settings_type: type) -> list[str]:
    """Let users name new entries of a settings dictionary: `["heads.mine=folder"]` -> `["++heads.mine=folder"]`.

    Hydra takes every key that is not there yet for a mistake; the keys of a `dict` field are the user's own.
    """
    names = [field.name for field in dataclasses.fields(settings_type) if str(field.type).startswith("dict[")]
    pattern = re.compile(rf"({'|'.join(names)})(\.[\w-]+)?=")
    return [f"++{argument}" if names and pattern.match(argument) else argument for argument in arguments]


def _stop(message: str, status: int, error: BaseException, shows_tracebacks: str | None) -> NoReturn:
    if shows_tracebacks == "1":
        raise error
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set or unset one environment variable for a while; processes started meanwhile inherit it."""
    before: Any = os.environ.get(name)
    _set(name, value)
    try:
        yield
    finally:
        _set(name, before)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
