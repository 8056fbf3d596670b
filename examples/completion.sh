#!/bin/sh
# Two ways to go on from a text. "seed" makes them the same ones each time.
curl --silent --show-error --fail-with-body "${BASE_URL:-http://localhost:8000}/v1/completions" \
     -H "Content-Type: application/json" -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" -d '{
  "prompt": "Once upon a time",
  "n": 2,
  "seed": 7,
  "max_tokens": 20
}'
