"""The OpenAI-compatible server: HTTP around an `AsyncLLM`.

    client --HTTP--> uvicorn --> app.py --> completions.py, chat.py, ... --> serving.py --> AsyncLLM
                                 auth,      a request body (protocol.py)     prompts,       one engine for all
                                 limits,    becomes SamplingParams;          queue,
                                 metrics    outputs become JSON or SSE       disconnects

What it offers, and how its answers look, is vLLM's server's; `docs/conformance.md` goes through it row by row. Nothing
outside of this folder knows of HTTP. FastAPI reads and checks bodies, uvicorn speaks HTTP; the rest is here.

    $ tutorial-engine serve                      or: python -m tutorial_engine.server
    $ curl localhost:8000/v1/models
"""
