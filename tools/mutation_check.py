"""Plant faults in a copy of the engine, one at a time, and see that the tests notice each: ``make mutation``.

A test suite that stays green says little until it is known that it can turn red. Every fault below is a mistake that an
engine like this one can really have. A fault names the few tests that ought to find it, so that a run takes a few
minutes; the exit status is 1 if one of them stays green. `tests/test_mutation_check.py` keeps the list true to the
source.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("tutorial_engine", "kernels", "tests", "conftest.py", "pyproject.toml")
TIMEOUT_S = 60  # of one test: some faults let the engine run for ever
SURVIVED = "SURVIVED"


class Fault(NamedTuple):
    """One planted mistake: in `file` of the package, `old` (which occurs there once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BLOCKS = "tests/core/test_block_manager.py"
SCHEDULER = "tests/core/test_scheduler.py"
ENGINE = "tests/core/test_engine.py"
AHEAD = "tests/core/test_async_scheduling.py"
ATTENTION = "tests/core/test_attention.py"
SAMPLER = "tests/api/test_sampler.py"
TEXT = "tests/api/test_detokenizer.py"
OUTPUTS = "tests/api/test_outputs.py"
CASES = "tests/api/test_cases.py"
LIFECYCLE = "tests/server/test_lifecycle.py"

FAULTS = (
    # Blocks
    Fault("the token after a full block gets no block of its own", "block_manager.py",
          "cdiv(num_slots, self.block_size) - num_owned", "cdiv(num_slots - 1, self.block_size) - num_owned",
          (BLOCKS,)),
    Fault("a prefix hit leaves nothing to compute", "block_manager.py",
          "range((request.num_tokens - 1) // self.block_size)", "range(request.num_tokens // self.block_size)",
          (BLOCKS,)),
    Fault("a second reader of a block is not counted", "block_manager.py",
          "block.ref_cnt += 1", "block.ref_cnt = 1", (BLOCKS,)),
    Fault("blocks are freed head first", "block_manager.py",
          "free_blocks(reversed(self.req_to_blocks.pop(request.request_id, [])))",
          "free_blocks(self.req_to_blocks.pop(request.request_id, []))", (BLOCKS,)),
    Fault("an evicted block can still be found", "block_manager.py",
          "self.uncache_block(block)\n            block.ref_cnt = 1", "block.ref_cnt = 1", (BLOCKS,)),
    Fault("a block is found before it is computed", "block_manager.py",
          "min(num_computed_tokens, request.num_tokens) // self.block_size", "request.num_tokens // self.block_size",
          (BLOCKS,)),
    Fault("salts are not kept apart", "block_manager.py",
          "if request.cache_salt and i == 0 else None", "if False else None", (BLOCKS,)),
    Fault("a request that finds its own blocks again counts as a hit", "block_manager.py",
          "preempted=request.num_preemptions > 0", "preempted=False", (SCHEDULER,)),
    # Scheduling
    Fault("blocks are registered before the victim is chosen", "scheduler.py",
          "is_first=False, samples=num_new == num_wanted)",
          "is_first=False, samples=num_new == num_wanted)\n"
          "                self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens + num_new)",
          (SCHEDULER,)),
    Fault("the token budget is ignored", "scheduler.py", "out.budget_left -= num_tokens", "pass", (SCHEDULER,)),
    Fault("the first one running is preempted", "scheduler.py",
          "return self.running[-1] if", "return self.running[0] if", (SCHEDULER,)),
    Fault("a preempted request goes to the back of the queue", "scheduler.py",
          "self._requests.appendleft(request)", "self._requests.append(request)", (SCHEDULER,)),
    Fault("the budget of a victim is lost", "scheduler.py",
          "out.budget_left += withdrawn.num_tokens", "pass", (SCHEDULER,)),
    Fault("the blocks of a failed step stay findable", "scheduler.py",
          "self.kv_cache_manager.uncache(out.newly_cached)", "pass", (ENGINE,)),
    Fault("one token more than the context holds", "request.py",
          "return (num_tokens >= max_model_len", "return (num_tokens > max_model_len", (ENGINE,)),
    Fault("ignore_eos does not ignore", "request.py", " and not params.ignore_eos", "", (SCHEDULER,)),
    # Two steps in flight
    Fault("a token in flight is not counted on", "scheduler.py",
          "s.request.num_output_placeholders += s.samples", "pass", (AHEAD,)),
    Fault("a request is computed beyond its last token", "scheduler.py",
          "if self._ends_in_flight(request):", "if False:", (AHEAD,)),
    Fault("someone is preempted for blocks that come back at once", "scheduler.py",
          "if any(map(self._ends_in_flight, self.running)):", "if False:", (AHEAD,)),
    Fault("the last block of an answer is not cached", "scheduler.py",
          "self._cache_filled_block(request)\n", "pass\n", (AHEAD,)),
    Fault("logprobs are counted without those who ended meanwhile", "output_processor.py",
          "enumerate(result.sampled_token_ids)", "enumerate(kept)", (AHEAD,)),
    Fault("the token of a request that has stopped is kept", "scheduler.py",
          "if request.status.is_finished:  # while the step was in flight", "if False:", (AHEAD,)),
    Fault("a step is planned ahead of one that somebody watches", "llm_engine.py",
          "                and not self.listeners)", ")", (AHEAD,)),
    Fault("a step that began with the tokens of a failed one goes on", "llm_engine.py",
          "failed = [s.plan for s in self._in_flight]", "failed = [step.plan]", (AHEAD,)),
    Fault("the newest token is taken from another row", "input_batch.py",
          "ids.append(LAST_TOKEN)", "ids.append(0)", (AHEAD,)),
    # Attention
    Fault("a query sees the token after it", "attention.py",
          "> position[:, :, None]", "> position[:, :, None] + 1", (ATTENTION,)),
    # Sampling
    Fault("top_p drops the token at its boundary", "sampler.py",
          "probs.cumsum(dim=-1) - probs >= p", "probs.cumsum(dim=-1) >= p", (f"{SAMPLER}::test_top_k_before_top_p",)),
    Fault("presence and frequency count the prompt", "sampler.py",
          "_count_tokens([r.output_token_ids for r in requests], metadata)",
          "_count_tokens([r.all_token_ids for r in requests], metadata)",
          (f"{SAMPLER}::test_prompt_counts_for_repetition_only",)),
    Fault("repetition forgets the prompt", "sampler.py",
          "(counts > 0) | (_count_tokens([r.prompt_token_ids", "(counts > 0) | (_count_tokens([r.output_token_ids",
          (f"{SAMPLER}::test_prompt_counts_for_repetition_only",)),
    Fault("noise is seeded by row, not by request", "sampler.py",
          "noise_key(requests[i].seed, num_tokens[i])", "noise_key(i, num_tokens[i])",
          (f"{SAMPLER}::test_a_draw_depends_on_nothing_but_seed_position_and_logits",)),
    Fault("each position draws with the same noise", "sampler.py",
          "noise_key(requests[i].seed, num_tokens[i])", "noise_key(requests[i].seed, 0)",
          (f"{SAMPLER}::test_draws_follow_the_distribution",)),
    Fault("min_tokens lets a stop token through one token early", "sampler.py",
          "request.num_output_tokens < p.min_tokens", "request.num_output_tokens + 1 < p.min_tokens",
          (f"{SAMPLER}::test_min_tokens_masks_stop_ids_until_enough_is_said",)),
    Fault("all completions of a prompt have one seed", "input_processor.py",
          "seed=base_seed + i", "seed=base_seed", (f"{CASES}::test_b06_each_completion_has_its_seed",)),
    # Text
    Fault("a stop string across two tokens is missed", "detokenizer.py",
          "max(num_old_chars - len(stop) + 1, 0)", "num_old_chars", (f"{TEXT}::test_streamed_stop_strings",)),
    Fault("the beginning of a stop string is streamed", "detokenizer.py",
          "max(len(s) for s in params.stop) - 1", "max(len(s) for s in params.stop) - 2",
          (f"{TEXT}::test_streamed_stop_strings",)),
    Fault("half a character is shown", "detokenizer.py", " or after.endswith(_INCOMPLETE)", "", (TEXT,)),
    Fault("a streamed token is delivered twice", "output_processor.py",
          "self.num_sent_tokens = len(self.token_ids)", "self.num_sent_tokens = len(self.token_ids) - 1", (OUTPUTS,)),
    # Around the engine
    Fault("the bits of a grammar's mask are read from the wrong end", "structured_outputs.py",
          "(packed[:, :, None] >> bits)", "(packed[:, :, None] >> (31 - bits))",
          ("tests/api/test_structured_outputs.py::test_choice",)),
    Fault("who leaves a stream is computed to the end", "async_llm.py",
          "self._thread.post(self._thread.drop, collector)", "pass",
          ("tests/api/test_async_llm.py::test_closing_a_generator_frees_everything",)),
    Fault("a cache that was given back is still believed in", "llm_engine.py",
          "self.scheduler.reset_prefix_cache(reset_running_requests=True)", "pass",
          ("tests/api/test_sleep.py::test_l54_after_a_sleep_everything_is_as_before",)),
    # The server
    Fault("a page that was left keeps the engine watched", "server/dashboard.py",
          "time.monotonic() - self._asked > PATIENCE_S", "False",
          ("tests/server/test_dashboard.py::test_records_only_while_somebody_asks",)),
    Fault("a trace that forgets keeps blocks that were overwritten", "trace.py",
          "hashed = (hashed | set(record.hashed)) - set(record.unhashed)", "hashed |= set(record.hashed)",
          ("tests/server/test_dashboard.py::test_forgetting_keeps_no_block_that_was_overwritten",)),
    Fault("bursts change the request rate", "bench/workload.py",
          "1 / (request_rate * burstiness)", "1 / request_rate",
          ("tests/server/test_bench.py::test_gaps_follow_their_distribution",)),
    Fault("one kept promise is enough for goodput", "bench/report.py",
          "return all(took[name]", "return any(took[name]", ("tests/server/test_bench.py::test_n4_measures",)),
    Fault("a client that leaves is served to the end", "server/serving.py",
          "        if not task.done():\n            raise ClientLeftError\n        return task.result()",
          "        return await task", (f"{LIFECYCLE}::test_b22_a_client_killed_in_the_middle_of_a_stream",)),
    Fault("places in the queue are never given back", "server/serving.py",
          "self.num_in_flight -= count", "pass", (f"{LIFECYCLE}::test_a_full_queue",)),
    Fault("an error in a stream ends it without a word", "server/serving.py",
          "yield dump(describe(error)[1])", "return",
          ("tests/server/test_streams.py::test_w8_an_error_after_the_stream_began",)),
    Fault("the prompt is counted once per completion", "server/serving.py",
          "self.prompt_tokens[prompt] = len(", "self.prompt_tokens[len(self.prompt_tokens)] = len(",
          ("tests/server/test_streams.py::test_b25_usage_of_a_stream_is_that_of_the_whole_answer",)),
    Fault("any token is a key", "server/app.py",
          "hmac.compare_digest(digest, other)", "True", ("tests/server/test_requests.py::test_w9_keys",)),
    Fault("the beginning of a tag is shown", "server/tool_parsers.py",
          "keep = 0 if final else overlap(self._text, BEGIN)", "keep = 0",
          ("tests/server/test_tools.py::test_w13_hermes",)),
    Fault("a failure inside is explained to clients", "server/errors.py",
          'error_body("The server failed while it worked on this request; its log says why.", 500)',
          "error_body(str(error), 500)",
          ("tests/server/test_streams.py::test_w8_an_error_after_the_stream_began",)),
)


def plant(fault: Fault, package: Path) -> None:
    """Change one line of the copy.

    Raises:
        ValueError: the source has changed, and the fault no longer names one place in it.
    """
    path = package / fault.file
    source = path.read_text(encoding="utf-8")
    if (count := source.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} occurs {count} times in {fault.file}, not once.")
    path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")


def first_failure(tests: tuple[str, ...], folder: Path) -> str:
    """Run tests in `folder` until one fails. Returns its name, or `SURVIVED`.

    Raises:
        RuntimeError: pytest could not run them; that proves nothing.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider",
               f"--timeout={TIMEOUT_S}", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return SURVIVED
    failed = re.search(r"^(?:FAILED|ERROR) [^:]+::(.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
    if result.returncode != 1 or failed is None:
        raise RuntimeError(f"pytest ended with status {result.returncode}:\n{result.stdout}{result.stderr}")
    return failed[1]


def main() -> int:
    """Run everything once without a fault, then once per fault; 1 if a fault survives."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        print("no fault: ", end="", flush=True)
        sound = first_failure(tuple(dict.fromkeys(test for fault in FAULTS for test in fault.tests)), folder)
        if sound != SURVIVED:
            print(f"{sound} fails already, so that nothing can be learnt. Mend it first.")
            return 1
        print("all tests pass")
        survivors = 0
        width = max(len(fault.name) for fault in FAULTS)
        for i, fault in enumerate(FAULTS, start=1):
            print(f"{i:2} of {len(FAULTS)}  {fault.name:{width}}  ", end="", flush=True)
            plant(fault, folder / "tutorial_engine")
            found = first_failure(fault.tests, folder)
            shutil.copy(ROOT / "tutorial_engine" / fault.file, folder / "tutorial_engine" / fault.file)
            survivors += found == SURVIVED
            print(SURVIVED if found == SURVIVED else f"caught by {found}", flush=True)
    print(f"{len(FAULTS) - survivors} of {len(FAULTS)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
