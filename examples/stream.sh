#!/bin/sh
# The answer while it is being written: a line "data: {...}" for each piece, "data: [DONE]" at the end.
curl --silent --show-error --fail-with-body --no-buffer "${BASE_URL:-http://localhost:8000}/v1/chat/completions" \
     -H "Content-Type: application/json" -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" -d '{
  "messages": [{"role": "user", "content": "What is a KV cache?"}],
  "max_completion_tokens": 40,
  "stream": true,
  "stream_options": {"include_usage": true}
}'
