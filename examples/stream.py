"""The answer while it is being written. Leaving the loop early ends the request at the server, too."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BASE_URL", "http://localhost:8000") + "/v1",
                api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id
with client.chat.completions.create(
        model=model, max_completion_tokens=40, stream=True, stream_options={"include_usage": True},
        messages=[{"role": "user", "content": "What is a KV cache?"}]) as stream:
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        else:  # the last one has the usage, and nothing else
            print(f"\n({chunk.usage.completion_tokens} tokens)")
