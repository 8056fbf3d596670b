"""A question, an answer, and what it cost in tokens."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BASE_URL", "http://localhost:8000") + "/v1",
                api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id
answer = client.chat.completions.create(
    model=model, max_completion_tokens=40, temperature=0,
    messages=[{"role": "system", "content": "You answer in one sentence."},
              {"role": "user", "content": "What is a KV cache?"}])
print(answer.choices[0].message.content)
print(f"({answer.usage.prompt_tokens} tokens read, {answer.usage.completion_tokens} written, "
      f"finish_reason {answer.choices[0].finish_reason})")
