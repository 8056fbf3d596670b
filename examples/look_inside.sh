#!/bin/sh
# Which model answers, how it splits a text, and what has been counted so far.
url="${BASE_URL:-http://localhost:8000}"
key="Authorization: Bearer ${OPENAI_API_KEY:-none}"
curl --silent --show-error --fail-with-body "$url/v1/models" -H "$key" && echo &&
curl --silent --show-error --fail-with-body "$url/tokenize" -H "Content-Type: application/json" -H "$key" \
     -d '{"prompt": "A paged KV cache", "return_token_strs": true}' && echo &&
curl --silent --show-error --fail-with-body "$url/metrics" | grep '^vllm:.*_tokens_total'
