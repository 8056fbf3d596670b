"""What the files around the code promise: importing is cheap, and every list of packages agrees with pyproject.toml."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tutorial_engine

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def requirements(*extras: str) -> dict[str, Requirement]:
    """The runtime dependencies, then those of the extras, by canonical name."""
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return {canonicalize_name(req.name): req for req in map(Requirement, lines)}


def pins(lines: list[str]) -> dict[str, str]:
    """``name==version`` lines as a dictionary; comments and options are left out, anything else is an error."""
    kept = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("#", "--"))]
    split = [line.split("==") for line in kept]
    assert all(len(parts) == 2 for parts in split), f"not all are exact pins: {kept}"
    return {canonicalize_name(package): version for package, version in split}


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text().splitlines())
COLAB = pins((ROOT / ".github" / "colab-versions.txt").read_text().splitlines())


# ---------------------------------------------------------------------- the package


def test_importing_the_package_imports_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'matplotlib', 'IPython'} & set(sys.modules)"
    code = (
        f"import sys, tutorial_engine; dir(tutorial_engine); tutorial_engine.__version__; assert not {heavy}, {heavy}"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", [name for name in tutorial_engine.__all__ if not name.startswith("_")])
def test_public_name(name: str) -> None:
    value = getattr(tutorial_engine, name)
    assert getattr(tutorial_engine, name) is value
    assert name in dir(tutorial_engine)
    home = import_module(f"tutorial_engine.{tutorial_engine._HOME[name]}")
    assert getattr(home, name) is value


def test_star_import_brings_the_public_names() -> None:
    scope: dict[str, object] = {}
    exec("from tutorial_engine import *", scope)
    assert set(tutorial_engine.__all__) <= set(scope)


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'LLm'; it exports LLM, LLMEngine"):
        tutorial_engine.LLm  # noqa: B018 - the access is the test
    with pytest.raises(ImportError, match="BlockManager"):
        exec("from tutorial_engine import BlockManager")


def test_every_folder_of_the_package_is_installed() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "tutorial_engine").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert setuptools["packages"] == sorted({*names, "tutorial_engine.kernels"})
    assert setuptools["package-dir"] == {"tutorial_engine": "tutorial_engine", "tutorial_engine.kernels": "kernels"}


def test_every_file_of_the_package_is_installed() -> None:
    patterns = [(package.replace(".", "/"), pattern) for package, some in
                PROJECT["tool"]["setuptools"]["package-data"].items() for pattern in some]
    named = {path for folder, pattern in patterns for path in (ROOT / folder).glob(pattern)}
    others = {path for path in (ROOT / "tutorial_engine").rglob("*") if path.is_file() and path.suffix != ".py"
              and "__pycache__" not in path.parts}
    assert others == named


def test_kernels_is_no_package_of_its_own() -> None:
    """transformers looks for a package `kernels` and, finding ours, would take it for the one on PyPI."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    sources = [path for folder in ("tutorial_engine", "kernels", "tests", "bench") for path in
               (ROOT / folder).rglob("*.py")]
    assert not [p for p in sources if re.search(r"^\s*(import|from) kernels\b", p.read_text(), re.MULTILINE)]
    for path in (ROOT / "kernels").glob("*.py"):
        assert find_spec(f"tutorial_engine.kernels.{path.stem}").origin == str(path)


# ---------------------------------------------------------------------- lists of versions


def test_dependencies_are_floors() -> None:
    """An upper bound or an exact pin here would make Colab replace what its runtime came with."""
    for requirement in requirements().values():
        assert [spec.operator for spec in requirement.specifier] == [">="], requirement


@pytest.mark.parametrize("name, requirement", requirements("lab", "test").items())
def test_constraints_pin_what_make_installs(name: str, requirement: Requirement) -> None:
    assert requirement.specifier.contains(CONSTRAINTS[name]), f"{requirement} against {CONSTRAINTS[name]}"


def test_conda_environment_is_the_same() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (python,) = [entry for entry in environment["dependencies"] if str(entry).startswith("python=")]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    wanted = {name: CONSTRAINTS[name] for name in requirements("lab", "test")}
    assert pins(pip) == wanted
    assert {"--constraint constraints.txt", "--editable ."} <= set(pip)
    assert PROJECT["project"]["requires-python"] == ">=3.11" and python in {"python=3.11", "python=3.12", "python=3.13"}


@pytest.mark.parametrize("name, requirement", requirements().items())
def test_colab_already_has_it(name: str, requirement: Requirement) -> None:
    assert requirement.specifier.contains(COLAB[name]), f"{requirement} against Colab's {COLAB[name]}"


# ---------------------------------------------------------------------- what a reader is told


def test_readme_names_the_commands_that_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", " ".join(re.findall(r"`[^`]+`|^```.*?^```", readme, re.M | re.S))))
    assert {"demo", "test"} <= named <= targets


def test_the_project_lives_in_one_place() -> None:
    """A link to another copy of the project would be one that was forgotten when it moved."""
    repository = PROJECT["project"]["urls"]["Repository"].removeprefix("https://github.com/")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        links = re.findall(
            r"(?:github\.com|colab\.research\.google\.com/github)/([\w-]+/tutorial-engine)", path.read_text()
        )
        assert set(links) <= {repository}, path


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflow_is_valid_yaml(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])


def test_ci_runs_the_readme_command() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "exec make test"
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], timeout=10).returncode == 0
