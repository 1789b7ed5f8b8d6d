"""The rules of the tree: who may import whom, no shadowed names, and every command that the texts show exists."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGES = ("train", "heads", "data", "conf", "eval", "scripts", "tests")
# What a package may import of ours beside itself; the `__main__` of a stage may import conf as well, and that of train
# the one function that decodes: the loop gets it handed in.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "heads": (),
    "conf": (),
    "data": ("heads.target", "heads.spec"),
    "train": ("data", "heads"),
    "eval": ("heads", "data"),
    "scripts": ("train", "heads", "data", "conf", "eval"),
}
MAIN_MAY_IMPORT = {"train": ("conf", "eval.live")}
# Seen to fail: a module of that name hides the package, or the installed package, from code beside it.
INSTALLED = ("torch", "transformers", "accelerate", "datasets", "hydra", "omegaconf", "wandb", "gguf", "numpy")

# Runs in an environment of its own (`make vllm`), never in this one.
ELSEWHERE = ("vllm",)

# Where the package on the index has another name than the module.
DISTRIBUTIONS = {"hydra": "hydra-core"}


def sources(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


def own_imports(path: Path) -> set[str]:
    """Dotted names of ours that a file imports, at any depth: `from heads.target import Target` -> `heads.target`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in PACKAGES}


def allowed(name: str, package: str, is_main: bool) -> bool:
    permitted = (package, *MAY_IMPORT[package], *(MAIN_MAY_IMPORT.get(package, ("conf",)) if is_main else ()))
    return any(name == prefix or name.startswith(prefix + ".") for prefix in permitted)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_follow_the_flow_of_data(root: Path, package: str) -> None:
    wrong = [
        f"{path.relative_to(root)} imports {name}"
        for path in sources(root, package)
        for name in sorted(own_imports(path))
        if not allowed(name, package, path.name == "__main__.py")
    ]
    assert wrong == []


def test_the_import_rule_can_fail() -> None:
    assert not allowed("train.loop.Loop", "eval", is_main=True)
    assert not allowed("heads.eagle3.Eagle3", "data", is_main=False)
    assert not allowed("eval.live.measure_acceptance", "train", is_main=False)
    assert not allowed("eval.generate.generate", "train", is_main=True)
    assert not allowed("conf.entry.run", "data", is_main=False)
    assert allowed("heads.target.Target", "data", is_main=False)


def test_builtin_eval_is_never_hidden_by_the_package(root: Path) -> None:
    plain = re.compile(r"^\s*import (eval|train|data|heads|conf|scripts)\b(?!\.)", re.MULTILINE)
    found = [str(path) for package in PACKAGES for path in sources(root, package) if plain.search(path.read_text())]
    assert found == []


def test_no_module_bears_a_top_level_or_an_installed_name(root: Path) -> None:
    taken = {*PACKAGES, *INSTALLED}
    wrong = [
        str(path.relative_to(root))
        for package in PACKAGES
        for path in sources(root, package)
        if (path.parent.name if path.name == "__init__.py" and path.parent != root / package else path.stem) in taken
    ]
    assert wrong == []


def test_packages_are_packages_and_tests_are_flat(root: Path) -> None:
    assert [name for name in PACKAGES[:-1] if not (root / name / "__init__.py").is_file()] == []
    assert not (root / "tests/__init__.py").exists()
    assert [str(path) for path in (root / "tests").rglob("*.py") if path.parent != root / "tests"] == []


def test_no_file_names_a_package_index_or_a_folder_of_one_machine(root: Path) -> None:
    forbidden = re.compile(
        "|".join(["extra-" + "index", "index-" + "url", "find-" + "links", "/" + "work/", "/" + "root/"])
    )
    names = ["*.py", "*.sh", "*.toml", "*.txt", "*.md", "*.yaml", "Makefile", ".ci/run"]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *names],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert [name for name in listed if (root / name).is_file() and forbidden.search((root / name).read_text())] == []


def texts(root: Path) -> list[Path]:
    return [path for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))] if path.is_file()]


def shown_commands(root: Path) -> list[str]:
    """Commands in the code blocks and code spans of README.md and docs/*.md."""
    pattern = re.compile(r"(?:python -m|bash|make|accelerate launch)\s[^`\n#]+")
    return [match.strip() for path in texts(root) for match in pattern.findall(path.read_text())]


def missing_part(root: Path, command: str) -> str | None:
    """What a shown command names and the checkout lacks; None when all of it is there."""
    words = command.split()
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE)
        return next((word for word in words[1:] if re.fullmatch("[a-z-]+", word) and word not in targets), None)
    if words[0] == "bash":
        return None if (root / words[1]).is_file() or words[1].startswith("-") else words[1]
    module = words[words.index("-m") + 1] if "-m" in words else ""
    path = root / module.replace(".", "/")
    if module.split(".")[0] in PACKAGES and not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()):
        return f"-m {module}"
    for key, _, choice in (word.partition("=") for word in words):
        if (root / "conf" / key).is_dir() and choice and "," not in choice and "." not in choice:
            if not (root / "conf" / key / f"{choice}.yaml").is_file():
                return f"{key}={choice}"
    return None


def test_every_command_that_the_texts_show_exists(root: Path) -> None:
    commands = shown_commands(root)
    assert any("scripts/quickstart.sh" in command for command in commands), "README.md shows how to start"
    assert {command: missing for command in commands if (missing := missing_part(root, command))} == {}


def test_every_path_that_the_texts_name_exists(root: Path) -> None:
    named = re.compile(rf"`((?:{'|'.join((*PACKAGES, 'docs'))})/[\w./-]+)`")
    missing = [
        f"{path.name}: {name}"
        for path in texts(root)
        for name in named.findall(path.read_text())
        if not (root / name).exists()
    ]
    assert missing == []


def test_the_command_check_can_fail(root: Path) -> None:
    assert missing_part(root, "python -m no") is None  # not ours
    assert missing_part(root, "python -m train.nothing") == "-m train.nothing"
    assert missing_part(root, "python -m train launcher=nothing") == "launcher=nothing"
    assert missing_part(root, "bash scripts/nothing.sh") == "scripts/nothing.sh"
    assert missing_part(root, "make nothing") == "nothing"


@pytest.mark.parametrize("script", ["setup", "test", "quickstart", "vllm", "compare"])
def test_scripts_are_valid_bash(root: Path, script: str) -> None:
    read = subprocess.run(["bash", "-n", str(root / "scripts" / f"{script}.sh")], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr


def test_quickstart_refuses_an_unknown_flag_with_its_usage(root: Path) -> None:
    refused = subprocess.run(
        ["bash", str(root / "scripts/quickstart.sh"), "--quick"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "--quick" in refused.stderr and "usage:" in refused.stderr


def test_quickstart_names_experiments_that_exist(root: Path) -> None:
    named = re.findall(r"experiment=\$line/(\w+)", (root / "scripts/quickstart.sh").read_text())
    assert sorted(named) == ["data", "eagle3", "eval", "export", "medusa"]
    lines = ("quickstart", "quickstart_fast")
    wanted = [root / "conf/experiment" / line / f"{name}.yaml" for line in lines for name in named]
    assert [str(path) for path in wanted if not path.is_file()] == []


def test_make_prints_its_own_help(root: Path) -> None:
    shown = subprocess.run(["make", "-C", str(root)], capture_output=True, text=True, check=True).stdout
    assert all(f"make {target}" in shown for target in ("check", "test", "bench", "demo", "report", "clean"))


def test_constraints_are_exact_versions_and_cover_the_ranges(root: Path) -> None:
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert declared(root, "dev") - pinned == set()


def test_every_installed_package_that_the_code_imports_is_declared(root: Path) -> None:
    helpers = {path.stem for path in sources(root, "tests")}
    undeclared: dict[str, set[str]] = {}
    for package in PACKAGES:
        permitted = declared(root, *(["dev"] if package == "tests" else []))
        for path in sources(root, package):
            for name in (
                imported_tops(path)
                - set(sys.stdlib_module_names)
                - set(PACKAGES)
                - helpers
                - {"__future__", *ELSEWHERE}
            ):
                if DISTRIBUTIONS.get(name, name).replace("_", "-") not in permitted:
                    undeclared.setdefault(name, set()).add(str(path.relative_to(root)))
    assert undeclared == {}


def declared(root: Path, *extras: str) -> set[str]:
    """Names of the packages in pyproject.toml's ranges."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [item for extra in extras for item in project["optional-dependencies"][extra]]
    return {re.split(r"[<>=\[ ]", item)[0].lower().replace("_", "-") for item in wanted}


def imported_tops(path: Path) -> set[str]:
    """First parts of every name a file imports: `from hydra.types import RunMode` -> `hydra`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found
