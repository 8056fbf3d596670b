"""The flags of ``tutorial-engine bench``, under vLLM's names.

    tutorial-engine bench serve --request-rate 1 2 4 8 --goodput ttft:300 tpot:50 --save-result

Several rates are a sweep: one table and one JSON file for each, and a picture of all. vLLM takes one rate at a time.

Owns: flags, files, printing. Does not own: measuring.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import math
from pathlib import Path
from typing import Any

from tutorial_engine.bench import report
from tutorial_engine.bench.workload import Job, arrival_times, check, random_jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One more level of sub-commands."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for name, text, add, run in (
            ("serve", "Send requests to a server that runs, and measure its answers.", _serve_arguments, serve),
            ("throughput", "Measure the engine, offline, with all requests there from the start.",
             _throughput_arguments, throughput),
            ("latency", "Measure how long the engine, offline, takes for one batch.", _latency_arguments, latency)):
        kind = kinds.add_parser(name, help=text, description=text, allow_abbrev=False,
                                formatter_class=_Help)
        add(kind)
        kind.set_defaults(run=run)


def _workload_arguments(parser: argparse.ArgumentParser, num_prompts: int = 100) -> None:
    parser.add_argument("--num-prompts", type=int, default=num_prompts, metavar="N", help="how many requests")
    parser.add_argument("--input-len", "--random-input-len", type=int, default=128, metavar="N",
                        help="tokens of a prompt, which are random")
    parser.add_argument("--output-len", "--random-output-len", type=int, default=64, metavar="N",
                        help="tokens of an answer")
    parser.add_argument("--random-range-ratio", type=float, default=0.0, metavar="X",
                        help="lengths vary by this fraction, up and down")
    parser.add_argument("--random-prefix-len", type=int, default=0, metavar="N",
                        help="further tokens in front of each prompt, the same in all")


def _jobs(args: argparse.Namespace, token_ids: Any, seed: int, count: int | None = None) -> list[Job]:
    return random_jobs(token_ids, count or args.num_prompts, args.input_len, args.output_len, args.random_range_ratio,
                       args.random_prefix_len, seed)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default not in (None, False, []) else action.help


# bench serve


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", metavar="URL", help="the server, instead of --host and --port")
    add("--host", default="127.0.0.1", help="of the server")
    add("--port", type=int, default=8000, metavar="N", help="of the server")
    add("--model", metavar="NAME", help="its name at the server; none: the first one that the server lists")
    _workload_arguments(parser)
    add("--request-rate", type=float, nargs="+", default=[math.inf], metavar="X",
        help="requests per second; inf: all at once; several: a sweep")
    add("--burstiness", type=float, default=1.0, metavar="X",
        help="1: a Poisson process; below: in bursts; above: more evenly")
    add("--max-concurrency", type=int, metavar="N", help="so many requests on their way at most")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests before the clock starts")
    add("--temperature", type=float, default=0.0, metavar="X", help="0: greedy")
    add("--ignore-eos", action="store_true", help="answers are as long as asked for")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="promised milliseconds of ttft, tpot, e2el: count the requests that kept them")
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help="of ttft, tpot, itl, e2el")
    add("--metric-percentiles", default="99", metavar="NUMBERS", help="which percentiles, as 50,99")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals")
    add("--save-result", action="store_true", help="write JSON; for a sweep also a picture")
    add("--save-detailed", action="store_true", help="write the times of each request, too")
    add("--result-dir", default=".", metavar="FOLDER", help="where to")
    add("--result-filename", metavar="NAME", help="for one rate; none: made of rate, model and date")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def serve(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run each rate, print its table; returns what is saved of each."""
    _check_serve(args)
    summaries = asyncio.run(_serve(args))
    sweep = [s for s in summaries if s["request_rate"] != "inf"]
    if args.save_result and len(sweep) > 1 and "p99_ttft_ms" in sweep[0]:
        path = Path(args.result_dir) / f"sweep-{_file_name(sweep[0])}.png"
        report.plot(sweep, args.goals, path)
        print(f"Saved {path}")
    return summaries


def _check_serve(args: argparse.Namespace) -> None:
    """Before anything is sent. Adds what the texts of some flags mean."""
    args.goals = report.parse_goodput(args.goodput)
    args.measures = args.percentile_metrics.split(",")
    check("percentile_metrics", set(args.measures) <= set(report.MEASURES), args.percentile_metrics,
          f"of {', '.join(report.MEASURES)}")
    try:
        args.percentiles = [float(p) for p in args.metric_percentiles.split(",")]
    except ValueError:
        args.percentiles = [-1.0]
    check("metric_percentiles", all(0 <= p <= 100 for p in args.percentiles), args.metric_percentiles,
          "numbers from 0 to 100 with commas in between")
    check("max_concurrency", args.max_concurrency is None or args.max_concurrency >= 1, args.max_concurrency,
          "at least 1")
    check("num_warmups", args.num_warmups >= 0, args.num_warmups, "at least 0")
    check("result_filename", args.result_filename is None or len(args.request_rate) == 1, args.result_filename,
          "left out for several rates: each has a file of its own")
    if args.save_result:
        try:
            Path(args.result_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            check("result_dir", False, args.result_dir, f"a folder that can be written to: {error.strerror}")


async def _serve(args: argparse.Namespace) -> list[dict[str, Any]]:
    from tutorial_engine.bench.client import ask_server, open_client, run

    times = {rate: arrival_times(args.num_prompts, rate, args.burstiness, args.seed) for rate in args.request_rate}
    summaries = []
    async with open_client(args.base_url or f"http://{args.host}:{args.port}") as client:
        model, token_ids = await ask_server(client, args.model)
        body = {"model": model, "temperature": args.temperature, "ignore_eos": args.ignore_eos}
        if args.num_warmups:
            jobs = _jobs(args, token_ids, args.seed + len(times), args.num_warmups)
            await run(client, jobs, [0.0] * len(jobs), body)
        for i, (rate, at) in enumerate(times.items()):
            jobs = _jobs(args, token_ids, args.seed + i)  # other prompts each time: the server's cache knows the last
            print(f"Traffic request rate: {rate:g}, burstiness: {args.burstiness:g}, {len(jobs)} requests to "
                  f"{client.base_url}", flush=True)
            results, duration = await run(client, jobs, at.tolist(), body, args.max_concurrency, not args.disable_tqdm)
            summaries.append(_report(args, model, rate, results, duration))
    return summaries


def _report(args: argparse.Namespace, model: str, rate: float, results: list[Any], duration: float) -> dict[str, Any]:
    """Print one run's table, and save it."""
    summary = {"date": f"{datetime.datetime.now():%Y%m%d-%H%M%S}", "model_id": model, "num_prompts": len(results),
               "request_rate": rate if math.isfinite(rate) else "inf", "burstiness": args.burstiness,
               "max_concurrency": args.max_concurrency, "seed": args.seed, "goodput_goals_ms": args.goals,
               **report.summarize(results, duration, args.goals, args.measures, args.percentiles)}
    print(report.table(summary, args.measures, args.percentiles), flush=True)
    for error in sorted({r.error for r in results if r.error}):
        print(f"Failed: {error[:300]}")
    if args.save_result:
        _save(args, summary, results)
    return summary


def _file_name(summary: dict[str, Any]) -> str:
    limit = f"concurrency{summary['max_concurrency']}-" if summary["max_concurrency"] else ""
    return f"{limit}{summary['model_id'].rpartition('/')[2]}-{summary['date']}"


def _save(args: argparse.Namespace, summary: dict[str, Any], results: list[Any]) -> None:
    details = {} if not args.save_detailed else {
        "input_lens": [r.prompt_len for r in results], "output_lens": [r.output_len for r in results],
        "start_times": [r.sent for r in results], "ttfts": [r.ttft if r.chunks else 0.0 for r in results],
        "itls": [r.itls for r in results], "errors": [r.error for r in results]}
    name = args.result_filename or f"{summary['request_rate']}qps-{_file_name(summary)}.json"
    path = Path(args.result_dir) / name
    path.write_text(json.dumps(summary | details, indent=1) + "\n", encoding="utf-8")
    print(f"Saved {path}")


# bench throughput, bench latency


def _engine_arguments(parser: argparse.ArgumentParser) -> None:
    from tutorial_engine.config import EngineArgs
    from tutorial_engine.server.cli import add_fields

    parser.add_argument("--output-json", metavar="FILE", help="write the result there, too")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_fields(parser.add_argument_group("engine"), EngineArgs)


def _llm(args: argparse.Namespace) -> tuple[Any, range]:
    """The engine, and the ids to make prompts of. Prompts are drawn from the engine's seed."""
    from tutorial_engine.config import EngineArgs
    from tutorial_engine.llm import LLM

    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(EngineArgs) if hasattr(args, f.name)}
    args.seed = abs(given.get("seed", 0))
    llm = LLM(**given)
    return llm, range(llm.llm_engine.input_processor.vocab_size)


def _finish(args: argparse.Namespace, text: str, result: dict[str, Any]) -> dict[str, Any]:
    print(text)
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _throughput_arguments(parser: argparse.ArgumentParser) -> None:
    _workload_arguments(parser)
    _engine_arguments(parser)


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return the result."""
    from tutorial_engine.bench import offline

    llm, token_ids = _llm(args)
    with llm:
        result = offline.throughput(llm, _jobs(args, token_ids, args.seed), not args.disable_tqdm)
    return _finish(args, offline.throughput_text(result), result)


def _latency_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=32, metavar="N", help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens of an answer")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts in the batch")
    parser.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="batches that do not count")
    parser.add_argument("--num-iters", type=int, default=30, metavar="N", help="batches that count")
    _engine_arguments(parser)


def latency(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return the result."""
    from tutorial_engine.bench import offline

    llm, token_ids = _llm(args)
    with llm:
        jobs = random_jobs(token_ids, args.batch_size, args.input_len, args.output_len, 0.0, 0, args.seed)
        result = offline.latency(llm, jobs, args.num_iters_warmup, args.num_iters, not args.disable_tqdm)
    return _finish(args, offline.latency_text(result), result)
