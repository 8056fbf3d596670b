"""What else the model might have said: the three likeliest tokens at each place, with their probabilities."""

import math
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BASE_URL", "http://localhost:8000") + "/v1",
                api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id
answer = client.chat.completions.create(
    model=model, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=3,
    messages=[{"role": "user", "content": "What is the capital of France?"}])
for place in answer.choices[0].logprobs.content:
    others = ", ".join(f"{other.token!r} {math.exp(other.logprob):.0%}" for other in place.top_logprobs)
    print(f"{place.token!r:>12}   of {others}")
