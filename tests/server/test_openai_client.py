"""The server, asked by the `openai` package."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.api.support import llm_of
from tests.server.support import Live, serve, serve_letters
from tutorial_engine import LLM, AsyncEngineArgs, LLMEngine, SamplingParams


def test_models(tiny: Live, tiny_model: Path) -> None:
    """R1, W11."""
    listed = list(tiny.openai().models.list())
    assert [model.id for model in listed] == ["tiny", "also-tiny"]
    first = listed[0]
    assert (first.object, first.owned_by, first.root, first.max_model_len) == ("model", "vllm", str(tiny_model), 128)


def test_completion(tiny: Live, tiny_model: Path) -> None:
    """R1, W1: the tokens of the offline engine."""
    completion = tiny.openai().completions.create(model="tiny", prompt="the described", temperature=0, max_tokens=8,
                                                  extra_body={"return_token_ids": True})
    assert completion.id.startswith("cmpl-") and completion.object == "text_completion" and completion.model == "tiny"
    with LLM(str(tiny_model), max_model_len=128, num_gpu_blocks_override=33) as llm:
        (wanted,) = llm.generate("the described", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    choice = completion.choices[0]
    assert (choice.text, choice.token_ids) == (wanted.outputs[0].text, wanted.outputs[0].token_ids)
    assert choice.prompt_token_ids == wanted.prompt_token_ids
    assert choice.finish_reason == wanted.outputs[0].finish_reason
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(wanted.prompt_token_ids), len(choice.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("n", [1, 2])
def test_stream_says_what_the_whole_answer_says(tiny: Live, n: int) -> None:
    """W3, X1: several completions, told apart by their index."""
    client = tiny.openai()
    arguments = {"model": "tiny", "messages": [{"role": "user", "content": "he said"}], "n": n, "seed": 5,
                 "temperature": 0.8, "max_completion_tokens": 12, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**arguments)
    texts, reasons, usage = [""] * n, [None] * n, None
    for chunk in client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk" and chunk.id.startswith("chatcmpl-")
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices] and reasons == ["length"] * n
    assert [choice.index for choice in whole.choices] == list(range(n))
    without_cache = {"prompt_tokens_details"}
    assert usage.model_dump(exclude=without_cache) == whole.usage.model_dump(exclude=without_cache)
    assert usage.completion_tokens == 12 * n


def test_chat(letters: Live) -> None:
    """W2."""
    answer = letters.openai().chat.completions.create(model="smollm2-135m-instruct", temperature=0, stop=["wo"],
                                                      messages=[{"role": "user", "content": "hi"}])
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    message = answer.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", "hello ", None)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason == "wo"


def test_errors_have_their_classes(letters: Live) -> None:
    """W7, Q9."""
    client = letters.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-5", prompt="p")
    assert missing.value.body == {"message": "The model `gpt-5` does not exist.", "type": "NotFoundError",
                                  "param": "model", "code": 404}
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="smollm2-135m-instruct", prompt="p", top_p=0)
    assert bad.value.param == "top_p" and bad.value.body["type"] == "BadRequestError"


def test_key() -> None:
    """W9."""
    with serve_letters("a", options={"api_key": ["one", "two"]}) as live:
        assert live.openai().models.list().data
        assert openai.OpenAI(base_url=live.url + "/v1", api_key="two").models.list().data
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=live.url + "/v1", api_key="three").models.list()


def test_the_default_model_says_online_what_it_says_offline() -> None:
    """Greedy `chat`, whole and streamed, is the offline engine's, to the letter."""
    questions = ["What is the capital of France?"]
    engine = LLMEngine.from_engine_args(AsyncEngineArgs(max_model_len=256, num_gpu_blocks_override=65))
    params = SamplingParams(temperature=0, max_tokens=10)
    offline = llm_of(engine).chat([[{"role": "user", "content": q}] for q in questions], params, use_tqdm=False)
    with serve(engine) as live:
        for question, wanted in zip(questions, offline):
            ask = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": question}],
                   "temperature": 0, "max_tokens": 10}
            whole = live.openai().chat.completions.create(**ask)
            chunks = list(live.openai().chat.completions.create(**ask, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == whole.choices[0].message.content == wanted.outputs[0].text
            assert whole.usage.prompt_tokens == len(wanted.prompt_token_ids)
            assert chunks[-1].choices[0].finish_reason == wanted.outputs[0].finish_reason
    assert "Paris" in offline[0].outputs[0].text
