"""The command line: ``tutorial-engine serve MODEL --max-model-len 2048 ...``, ``tutorial-engine bench serve ...``.

Every field of `AsyncEngineArgs` and `ServerOptions` is a flag, under its name with dashes, which is vLLM's name. So
there is no list of flags here: what a field is called, its type and its text come from the dataclass.

Owns: flags, sub-commands, starting uvicorn. Does not own: what the fields mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
import socket
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from tutorial_engine.exceptions import VLLMError, VLLMValidationError

logger = logging.getLogger(__name__)

COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]] = {}
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def command(name: str, text: str, add_arguments: Callable[[argparse.ArgumentParser], None]) -> Callable[..., Any]:
    """Register the decorated function as a sub-command; it is called with the parsed arguments."""
    def register(run: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
        COMMANDS[name] = text, add_arguments, run
        return run

    return register


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `tutorial-engine`."""
    parser = argparse.ArgumentParser("tutorial-engine", description="An LLM inference engine with vLLM's names.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, add_arguments, _) in COMMANDS.items():
        add_arguments(subparsers.add_parser(name, help=text, description=text, allow_abbrev=False))
    args = parser.parse_args([_with_dashes(argument) for argument in (sys.argv[1:] if argv is None else argv)])
    try:
        COMMANDS[args.command][2](args)
    except (VLLMError, TypeError) as error:
        parser.exit(2, f"tutorial-engine {args.command}: error: {error}\n")


def _with_dashes(argument: str) -> str:
    """--max_model_len is --max-model-len, as in vLLM."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


# Flags from dataclasses


def integer(text: str) -> int:
    """An integer, or one of thousands: 16k = 16000, 16K = 16384."""
    number, factor = (text[:-1], _FACTORS[text[-1]]) if text[-1:] in _FACTORS else (text, 1)
    try:
        return int(float(number) * factor) if factor > 1 else int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def integer_or_text(text: str) -> int | str:
    """`integer`, or a word such as "auto"."""
    return text if text.isalpha() else integer(text)


def json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


def add_fields(parser: argparse._ActionsContainer, kind: type) -> None:
    """A flag for each field. One that is not given is not set, so that the dataclass's own default holds."""
    hints, texts = typing.get_type_hints(kind), field_texts(kind)
    for field in dataclasses.fields(kind):
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": texts.get(field.name, "").replace("%", "%%")}
        parser.add_argument("--" + field.name.replace("_", "-"), **options, **_parsing(field.name, hints[field.name]))


def _parsing(name: str, hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = {typing.get_origin(k) or k for k in (typing.get_args(hint) if union else (hint,))} - {type(None)}
    if kinds == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    if kinds == {int}:
        return {"type": integer, "metavar": "N"}
    if kinds == {int, str}:
        return {"type": integer_or_text, "metavar": "N"}
    if kinds == {float}:
        return {"type": float, "metavar": "X"}
    if kinds <= {list, str} and list in kinds:
        if name == "allowed_origins":
            return {"type": json_value, "metavar": "JSON"}
        return {"nargs": "+", "action": "extend", "metavar": "TEXT"}
    if kinds == {str}:
        return {"metavar": "TEXT"}
    return {"type": json_value, "metavar": "JSON"}


def field_texts(kind: type) -> dict[str, str]:
    """What the docstrings of a dataclass, and of those it is derived from, say about each field."""
    names = [field.name for field in dataclasses.fields(kind)]
    begin = re.compile(rf"(?:^|(?<=[\s.:]))({'|'.join(names)}): ")
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        _, _, attributes = " ".join((base.__doc__ or "").split()).partition("Attributes")
        parts = begin.split(attributes)
        texts.update(zip(parts[1::2], (part.strip() for part in parts[2::2])))
    return texts


def made(kind: type, args: argparse.Namespace) -> Any:
    """The dataclass, from the flags that were given."""
    given = vars(args)
    return kind(**{field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given})


# tutorial-engine serve


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    from tutorial_engine.config import AsyncEngineArgs
    from tutorial_engine.server.serving import ServerOptions

    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all of this machine's")
    parser.add_argument("--port", type=int, default=8000, choices=range(2**16), metavar="N", help="0: any free one")
    parser.add_argument("--uvicorn-log-level", default="info",
                        choices=("critical", "error", "warning", "info", "debug", "trace"))
    parser.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line for each answer")
    parser.add_argument("--shutdown-timeout", type=int, default=30, metavar="SECONDS",
                        help="how long answers may still take after Ctrl-C or SIGTERM; what is left then is ended")
    add_fields(parser.add_argument_group("server"), ServerOptions)
    add_fields(parser.add_argument_group("engine"), AsyncEngineArgs)


@command("serve", "Serve a model over an OpenAI-compatible HTTP interface.", _serve_arguments)
def serve(args: argparse.Namespace) -> None:
    """Listen, load the model, answer until a signal comes."""
    import uvicorn

    from tutorial_engine.async_llm import AsyncLLM
    from tutorial_engine.config import AsyncEngineArgs
    from tutorial_engine.server.app import build_app
    from tutorial_engine.server.serving import ServerOptions

    if args.model_tag is not None:
        args.model = args.model_tag
    options, engine_args = made(ServerOptions, args), made(AsyncEngineArgs, args)
    logging.basicConfig(format="%(levelname)s %(asctime)s %(message)s", datefmt="%m-%d %H:%M:%S")
    logging.getLogger("tutorial_engine").setLevel(logging.INFO)
    # A page that is open asks twice a second.
    logging.getLogger("uvicorn.access").addFilter(lambda record: "/dashboard/state" not in record.getMessage())
    with _bind(args.host, args.port) as sock:  # a port that is taken is noticed before the model is loaded
        app = build_app(AsyncLLM.from_engine_args(engine_args), options)
        config = uvicorn.Config(app, log_level=args.uvicorn_log_level, access_log=not args.disable_uvicorn_access_log,
                                timeout_graceful_shutdown=args.shutdown_timeout)
        logger.info("Serving %s at http://%s:%d", app.state.serving.names[0], args.host, sock.getsockname()[1])
        uvicorn.Server(config).run(sockets=[sock])


def _bind(host: str, port: int) -> socket.socket:
    """A socket that has the address, and refuses connections until somebody listens."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise VLLMValidationError(f"Cannot listen at {host}, port {port}: {error.strerror}.", parameter="port",
                                  value=port) from error
    return sock


# tutorial-engine bench


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from tutorial_engine.bench.cli import add_arguments

    add_arguments(parser)


@command("bench", "Measure a server, or the engine: serve, throughput, latency.", _bench_arguments)
def bench(args: argparse.Namespace) -> None:
    args.run(args)
