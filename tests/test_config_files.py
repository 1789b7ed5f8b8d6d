"""Every configuration of the repository composes into its stage's settings: primaries, group choices, experiments."""

import ast
import importlib
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from conf.entry import CONF, register, to_settings

MODULES = {
    "data": "data.__main__",
    "train": "train.__main__",
    "eval": "eval.__main__",
    "export": "scripts.export",
    "convert": "scripts.convert",
}
EXPERIMENTS = sorted(CONF.glob("experiment/**/*.yaml"))
COMMAND = re.compile(r"^# python -m (\w+(?:\.\w+)?) (experiment=\S+)", re.MULTILINE)


def entry_of(stage: str) -> tuple[type, dict[str, type]]:
    """The settings class and group schemas that a stage passes to `run(...)` at the end of its module."""
    module = importlib.import_module(MODULES[stage])
    assert module.__file__
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run":
            if isinstance(node.args[0], ast.Constant) and node.args[0].value == stage:
                given = [*node.args[1:2], *node.args[3:4], *(k.value for k in node.keywords if k.arg == "schemas")]
                values = [eval(ast.unparse(argument), vars(module)) for argument in given]
                return values[0], values[1] if len(values) > 1 else {}
    raise AssertionError(f"{MODULES[stage]} does not call run({stage!r}, ...)")


def composed(stage: str, *overrides: str) -> tuple[DictConfig, Any]:
    """Hydra's own part and the settings object."""
    settings_type, schemas = entry_of(stage)
    register(stage, settings_type, schemas)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(stage, list(overrides), return_hydra_config=True)
    with open_dict(config):
        hydra = config.pop("hydra")
    settings: Any = to_settings(config, settings_type)
    with open_dict(config):
        config.hydra = hydra
    return config, settings


def defaults_of(stage: str) -> list[Any]:
    """The defaults list as it is written; empty where there is no such primary config."""
    primary = CONF / f"{stage}.yaml"
    if not primary.is_file():
        return []
    content: Any = OmegaConf.to_container(OmegaConf.load(primary), resolve=False)
    return list(content["defaults"])


def choices() -> list[tuple[str, str]]:
    """Each `(stage, group=choice)` for the groups in the defaults of a primary config."""
    found = []
    for stage in MODULES:
        groups = [
            group for entry in defaults_of(stage) if isinstance(entry, dict) for group in entry if group != "experiment"
        ]
        for group in groups:
            found += [(stage, f"{group}={path.stem}") for path in sorted((CONF / group).glob("*.yaml"))]
    return found


@pytest.mark.parametrize("stage", MODULES)
def test_a_primary_config_composes_and_has_a_run_folder_without_a_timestamp(stage: str) -> None:
    config, settings = composed(stage)
    assert is_dataclass(settings)
    assert config.hydra.job.name == stage
    assert config.hydra.run.dir == f"{config.get('outputs', 'outputs')}/{stage}/{config.name}"
    assert config.hydra.job.chdir is False


@pytest.mark.parametrize("stage", MODULES)
def test_a_primary_config_names_its_schema_first(stage: str) -> None:
    defaults = defaults_of(stage)
    assert defaults[:2] == [f"{stage}_settings", "common"]
    assert defaults[-2:] == ["_self_", {"experiment": None}]


@pytest.mark.parametrize("stage", MODULES)
def test_no_plain_key_has_the_name_of_a_group_folder(stage: str) -> None:
    """Hydra would take `data=outputs/data/own` for a choice from conf/data and refuse it."""
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    chosen = {group for entry in defaults_of(stage) if isinstance(entry, dict) for group in entry}
    plain = {f.name for f in fields(entry_of(stage)[0]) if not is_dataclass(f.type)}
    assert plain & groups - chosen == set()


@pytest.mark.parametrize(("stage", "choice"), choices())
def test_every_group_choice_composes(stage: str, choice: str) -> None:
    assert is_dataclass(composed(stage, choice)[1])


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_experiment_states_the_command_that_runs_it_and_composes(path: Path) -> None:
    text = path.read_text()
    # Hydra reads `@package` only in the first line; the command stands in the second.
    assert text.startswith("# @package _global_\n# python -m ")
    command = COMMAND.search(text)
    assert command, "the second line is: # python -m STAGE experiment=PATH"
    module, override = command.groups()
    assert override == f"experiment={path.relative_to(CONF / 'experiment').with_suffix('')}"
    assert is_dataclass(composed(module.rpartition(".")[2], override)[1])


@pytest.mark.parametrize("overrides", [["train.loss.terms={neg_log_alpha: 1, js: 2}"],
                                       ["train.loss.terms.neg_log_alpha=1", "train.loss.terms.js=2"]])  # fmt: skip
def test_a_mapping_takes_keys_of_the_users_own(overrides: list[str]) -> None:
    assert composed("train", *overrides)[1].train.loss.terms == {"neg_log_alpha": 1.0, "js": 2.0}
    with pytest.raises(ValueError, match="train.loss.terms='mse' must be one of"):
        composed("train", "train.loss.terms={mse: 1}")
    assert composed("eval", "heads={mine: outputs/train/mine}")[1].heads["mine"] == "outputs/train/mine"
