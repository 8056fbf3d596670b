"""Conversations: templates, their flags and their errors, content parts, special tokens."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.support import CHAT_TEMPLATE, byte_tokenizer, greedy, piece_ids, save_tiny_model, scripted_llm
from tests.core.support import assert_clean
from tutorial_engine import LLM
from tutorial_engine.exceptions import ChatTemplateResolutionError, VLLMClientError, VLLMValidationError

BYTES = byte_tokenizer(bos=True)
PLAIN = "{% for m in messages %}{{ m['role'] }}={{ m['content'] }};{% endfor %}"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def make_llm(template: str | dict[str, str] | None = CHAT_TEMPLATE, **kwargs: Any) -> LLM:
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = template
    return scripted_llm(tokenizer, [*piece_ids(BYTES, b"O", b"K"), 1], max_model_len=128, **kwargs)


def prompt_of(llm: LLM, messages: Any, **kwargs: Any) -> str:
    (output,) = llm.chat(messages, greedy(1), use_tqdm=False, **kwargs)
    assert_clean(llm.llm_engine)
    return output.prompt


def test_one_conversation() -> None:
    llm = make_llm()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, greedy(5), use_tqdm=False)
    assert output.prompt == "<s><|turn|>system: Be brief.<|turn|>user: Hi<|turn|>assistant: "
    assert output.outputs[0].text == "OK" and output.outputs[0].finish_reason == "stop"
    # The template writes the BOS; there is exactly one.
    assert output.prompt_token_ids == BYTES.encode(output.prompt, add_special_tokens=False)
    assert output.prompt_token_ids.count(0) == 1 and output.prompt_token_ids.count(2) == 3


def test_list_of_conversations() -> None:
    llm = make_llm()
    outputs = llm.chat([user("a"), user("b"), tuple(user("c"))], [greedy(1), greedy(2), greedy(3)], use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["O", "OK", "OK"]
    assert [o.prompt for o in outputs] == [f"<s><|turn|>user: {c}<|turn|>assistant: " for c in "abc"]
    assert [o.request_id for o in outputs] == ["0", "1", "2"]
    assert llm.chat([], use_tqdm=False) == []
    with pytest.raises(VLLMValidationError, match=r"prompts \(2\) and params \(1\)"):
        llm.chat([user("a"), user("b")], [greedy(1)], use_tqdm=False)


def test_flags() -> None:
    llm = make_llm()
    begun = [*user("Say yes."), {"role": "assistant", "content": "Y"}]
    assert prompt_of(llm, begun, add_generation_prompt=False) == "<s><|turn|>user: Say yes.<|turn|>assistant: Y"
    llm = make_llm("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}")
    assert prompt_of(llm, begun, add_generation_prompt=False).endswith("[assistant]Y</s>")
    assert prompt_of(llm, begun, add_generation_prompt=False, continue_final_message=True).endswith("[assistant]Y")
    with pytest.raises(VLLMValidationError, match="continue_final_message and add_generation_prompt are not compat"):
        llm.chat(begun, continue_final_message=True, use_tqdm=False)


def test_templates_of_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(PLAIN)
    for template in (PLAIN, str(path)):
        assert prompt_of(make_llm(), user("Hi"), chat_template=template) == "user=Hi;"
        assert prompt_of(make_llm(None), user("Hi"), chat_template=template) == "user=Hi;"
        assert prompt_of(make_llm(chat_template=template), user("Hi")) == "user=Hi;"
    both = make_llm(chat_template="engine")
    assert prompt_of(both, user("Hi"), chat_template=PLAIN) == "user=Hi;"  # the call's wins
    for template in ("missing.jinja", str(tmp_path)):
        with pytest.raises(VLLMValidationError, match="neither a Jinja template nor a file") as caught:
            make_llm().chat(user("Hi"), chat_template=template, use_tqdm=False)
        assert caught.value.parameter == "chat_template"


def test_named_templates_of_the_tokenizer() -> None:
    """Some models have one template for tools, and another one."""
    llm = make_llm({"default": PLAIN, "tool_use": "{{ tools[0]['function']['name'] }}"})
    tool = {"type": "function", "function": {"name": "clock", "description": "Time.", "parameters": {}}}
    assert prompt_of(llm, user("Hi")) == "user=Hi;"
    assert prompt_of(llm, user("Hi"), tools=[tool]) == "clock"


def test_no_template() -> None:
    with pytest.raises(ChatTemplateResolutionError, match=r"as of transformers v4\.44, default chat") as caught:
        make_llm(None).chat(user("Hi"), use_tqdm=False)
    assert isinstance(caught.value, VLLMClientError) and isinstance(caught.value, ValueError)


def test_template_arguments() -> None:
    llm = make_llm()
    assert prompt_of(llm, user("Hi"), chat_template_kwargs={"shout": 1}).endswith("Hi!<|turn|>assistant: ")
    assert prompt_of(llm, user("Hi"), chat_template_kwargs={"unknown": 1}).endswith("Hi<|turn|>assistant: ")


def test_tools_reach_the_template() -> None:
    llm = make_llm("{{ tools | length }} {{ messages[0]['content'] }}")
    tool = {"type": "function", "function": {"name": "clock", "description": "Time.", "parameters": {}}}
    assert prompt_of(llm, user("Hi"), tools=[tool]) == "1 Hi"


@pytest.mark.parametrize("content, shown", [
    ("text", "text"), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"), (["a", "b"], "a\nb"),
    ([], ""), (None, ""), ("", "")])
def test_content(content: Any, shown: str) -> None:
    messages = user(content)
    assert prompt_of(make_llm(PLAIN), messages) == f"user={shown};"
    assert messages == user(content)  # the caller's messages stay as they are
    assert prompt_of(make_llm(PLAIN), [{"role": "assistant"}]) == "assistant=;"


@pytest.mark.parametrize("messages, words", [
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "serves text only"),
    ([{"role": "user", "content": [{"type": "text"}]}], "serves text only"),
    ([{"role": "user", "content": [5]}], "serves text only"),
    ([{"role": "user", "content": 5}], "must be text, got int"),
    ([{"content": "x"}], "'role' and 'content'"), ([{"role": 5, "content": "x"}], "'role' and 'content'"),
    (["Hello"], "A conversation must be a list"), ([5], "A conversation must be a list"),
    ([[]], "at least one message"), ([["Hello"]], "'role' and 'content'"),
    ([{"role": "user", "content": "a"}, "b"], "'role' and 'content'")])
def test_bad_messages(messages: Any, words: str) -> None:
    llm = make_llm()
    with pytest.raises(VLLMValidationError, match=words) as caught:
        llm.chat(messages, use_tqdm=False)
    assert caught.value.parameter == "messages"
    assert_clean(llm.llm_engine)


@pytest.mark.parametrize("messages", ["Hello", 5, None, {"role": "user", "content": "x"}])
def test_messages_must_be_a_list(messages: Any) -> None:
    with pytest.raises(TypeError, match="messages should be a list of messages, or a list of such lists"):
        make_llm().chat(messages, use_tqdm=False)


@pytest.mark.parametrize("template, words", [
    ("{{ raise_exception('roles must alternate') }}", "The chat template failed: roles must alternate"),
    ("{% for %}", "The chat template failed"), ("{{ messages[9]['content'] }}", "The chat template failed")])
def test_templates_that_fail(template: str, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        make_llm().chat(user("Hi"), chat_template=template, use_tqdm=False)


def test_one_bad_conversation_among_good_ones() -> None:
    llm = make_llm()
    with pytest.raises(VLLMValidationError):
        llm.chat([user("good"), user("x" * 500), user("good")], greedy(1), use_tqdm=False)
    assert_clean(llm.llm_engine)
    assert llm.chat(user("good"), greedy(2), use_tqdm=False)[0].outputs[0].text == "OK"


def test_content_format() -> None:
    llm = make_llm()
    assert prompt_of(llm, user("Hi"), chat_template_content_format="string") == prompt_of(llm, user("Hi"))
    with pytest.raises(VLLMValidationError, match="must be 'auto' or 'string'"):
        llm.chat(user("Hi"), chat_template_content_format="openai", use_tqdm=False)


def test_other_arguments() -> None:
    llm = make_llm()
    with pytest.raises(VLLMValidationError, match="LoRA is not enabled"):
        llm.chat(user("Hi"), lora_request=object(), use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="priority scheduling is not enabled"):
        llm.chat(user("Hi"), priority=[1], use_tqdm=False)
    with pytest.raises(TypeError, match="unexpected keyword"):
        llm.chat(user("Hi"), temperature=0)
    (output,) = llm.chat(user("Hi"), greedy(1), False)  # as in vLLM, more goes by position here than in generate()
    assert output.outputs[0].text == "O"


def test_bars(capsys: pytest.CaptureFixture[str]) -> None:
    make_llm().chat(user("Hi"), greedy(1))
    shown = capsys.readouterr().err
    assert "Rendering conversations" in shown and "Processed prompts" in shown and "Rendering prompts" not in shown


def test_tiny_model_with_and_without_template(llm: LLM, tmp_path: Path) -> None:
    (output,) = llm.chat(user("Hi"), greedy(4), use_tqdm=False)
    (same,) = llm.generate(output.prompt, greedy(4), use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
    assert output.outputs[0] == same.outputs[0] and output.prompt_token_ids[0] == 0
    folder = save_tiny_model(tmp_path, chat_template=False)
    with LLM(str(folder), max_model_len=64, num_gpu_blocks_override=9) as plain, pytest.raises(
            ChatTemplateResolutionError):
        plain.chat(user("Hi"), use_tqdm=False)
