#!/bin/sh
# A question and its answer, as one piece of JSON.
curl --silent --show-error --fail-with-body "${BASE_URL:-http://localhost:8000}/v1/chat/completions" \
     -H "Content-Type: application/json" -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" -d '{
  "messages": [{"role": "user", "content": "What is a KV cache?"}],
  "max_completion_tokens": 40,
  "temperature": 0
}'
