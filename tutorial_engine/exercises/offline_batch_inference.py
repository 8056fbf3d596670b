"""Offline batches: count who was cut off, and ask again only those, in one call a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tutorial_engine.checks import Answer, check
from tutorial_engine.outputs import CompletionOutput, RequestOutput
from tutorial_engine.sampling_params import SamplingParams


class Outputs(list):
    """A list of RequestOutputs that a message can show in one line."""

    def __repr__(self) -> str:
        return f"outputs({', '.join('+'.join(str(c.finish_reason) for c in output.outputs) for output in self)})"


def outputs(*reasons: str) -> Outputs:
    """Outputs with these finish reasons: one prompt each; "stop+length" is a prompt with two completions."""
    return Outputs(_output(str(i), "", text.split("+")) for i, text in enumerate(reasons))


def _output(prompt: str, text: str, reasons: Iterable[str]) -> RequestOutput:
    completions = [CompletionOutput(j, text, list(range(len(text.split()))), finish_reason=r)
                   for j, r in enumerate(reasons)]
    return RequestOutput("0", prompt, [0], None, completions, finished=True)


class PretendLLM:
    """Stands in for an LLM: it knows how many words each answer has, and a word is a token.

    Args:
        lengths: prompt -> words in its answer. The token that ends an answer needs room, too.

    Attributes:
        calls: (prompts, max_tokens) of each call of `generate`. steps: engine steps that they would have taken.
    """

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self.lengths = dict(lengths)
        self.calls: list[tuple[list[str], int]] = []
        self.steps = 0

    def generate(self, prompts: str | Sequence[str], sampling_params: SamplingParams | None = None, **_: Any
                 ) -> Outputs:
        """Like `LLM.generate`, for one `SamplingParams`; only its max_tokens counts."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        limit = (sampling_params or SamplingParams()).max_tokens
        self.calls.append((prompts, limit))
        self.steps += max((min(self.lengths[p] + 1, limit) for p in prompts), default=0)
        return Outputs(_output(p, answer_text(p, min(self.lengths[p], limit)),
                               ["length" if self.lengths[p] + 1 > limit else "stop"]) for p in prompts)

    def __repr__(self) -> str:
        return "llm"

    def __deepcopy__(self, memo: dict) -> PretendLLM:
        return self  # a check gives it away, and then asks it what was done with it


def answer_text(prompt: str, num_words: int) -> str:
    return " ".join(f"{prompt}{i}" for i in range(num_words))


def audit(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Finish reason -> number of completions that ended with it."""
    return dict(Counter(completion.finish_reason for output in outputs for completion in output.outputs))


def finish(llm: Any, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """The whole answer to each prompt, in order; who is cut off is asked again with twice the tokens."""
    texts: dict[int, str] = {}
    open_ = list(range(len(prompts)))
    while open_:
        results = llm.generate([prompts[i] for i in open_], SamplingParams(temperature=0, max_tokens=max_tokens))
        for i, result in zip(open_, results):
            if result.outputs[0].finish_reason != "length":
                texts[i] = result.outputs[0].text
        open_ = [i for i in open_ if i not in texts]
        max_tokens *= 2
    return [texts[i] for i in range(len(prompts))]


@check(audit)
def check_audit(answer: Answer) -> None:
    """One line tells you whether a batch can be used, before anybody reads 50,000 answers."""
    answer(outputs()).gives({}, "a batch without prompts: an empty dict.")
    answer(outputs("stop")).gives({"stop": 1}, "where the reason stands: outputs[i].outputs[j].finish_reason.")
    answer(outputs("stop", "length", "stop")).gives({"stop": 2, "length": 1}, "the counting: one for each answer.")
    answer(outputs("stop+length", "length+length")).gives(
        {"stop": 1, "length": 3}, "the second answers: with n=2 a prompt has two completions, and each has its reason.")
    answer(outputs("abort", "length")).gives({"abort": 1, "length": 1}, "reasons that you have not thought of: count "
                                                                        "whatever is there.")


@check(finish)
def check_finish(answer: Answer) -> None:
    """Nobody is cut off, nobody is asked twice without need, and every round is one call."""
    order = "the order: who is done first does not come first. The texts are in the order of the prompts."
    again = "who is asked again, and how: only those that were cut off, in one call, with twice the tokens."
    _case(answer, {"a": 2}, ["a"], 4, "a single prompt whose answer fits: its text is outputs[0].outputs[0].text.")
    _case(answer, {"a": 2, "b": 3, "c": 1}, ["a", "b", "c"], 4, order, "a round: give generate the whole list. In a "
                                                                       "loop, the engine has one passenger at a time.")
    cut_off = 'finish_reason: "length" says that the answer was cut off. Ask again with twice the tokens.'
    _case(answer, {"a": 5}, ["a"], 4, cut_off)
    _case(answer, {"a": 2, "b": 5, "c": 1}, ["a", "b", "c"], 4, order, again)
    _case(answer, {"a": 9, "b": 2, "c": 5, "d": 1}, ["a", "b", "c", "d"], 4, order, again)
    _case(answer, {"a": 20, "b": 1}, ["b", "a", "b"], 2, "several rounds, of 2, 4, 8, 16 and 32 tokens. And the same "
                                                         "prompt may be there twice.")
    _case(answer, {}, [], 4, "an empty list: there is nobody to ask.")


def _case(answer: Answer, lengths: dict[str, int], prompts: list[str], max_tokens: int, look_at: str,
          look_at_calls: str = "") -> None:
    """One call, judged by its texts and by the calls of `generate` that it made."""
    llm, course = PretendLLM(lengths), PretendLLM(lengths)
    texts = finish(course, prompts, max_tokens)
    returned = answer(llm, prompts, max_tokens)
    returned.gives(texts, look_at)
    returned.must(lambda _: llm.calls == course.calls or (not prompts and llm.calls == [([], max_tokens)]),
                  f"these calls of generate: {_shown(course)}; there were {_shown(llm)}", look_at_calls or look_at)


def _shown(llm: PretendLLM) -> str:
    shown = [f"{prompts} with max_tokens={limit}" for prompts, limit in llm.calls[:6]]
    return ", ".join(shown) + (", ..." if len(llm.calls) > 6 else "") or "none"
