"""POST /tokenize and /detokenize: text to ids and back, as the engine would see it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from tutorial_engine.server.errors import json_response
from tutorial_engine.server.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    fail,
)
from tutorial_engine.server.serving import Serving, answer

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeCompletionRequest | TokenizeChatRequest, request: Request) -> Response:
    """Count and show the tokens of a text or a conversation."""
    serving: Serving = request.app.state.serving

    async def work() -> Response:
        serving.check_model(body.model)
        text = body.prompt if isinstance(body, TokenizeCompletionRequest) else await serving.render(body)
        token_ids = await serving.tokenize(text, body.add_special_tokens)
        names = serving.tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
        return json_response({"count": len(token_ids), "max_model_len": serving.max_model_len, "tokens": token_ids,
                              "token_strs": names})

    return await answer(request, work())


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of some token ids."""
    serving: Serving = request.app.state.serving

    async def work() -> Response:
        serving.check_model(body.model)
        vocab_size: Any = serving.llm.llm_engine.input_processor.vocab_size
        if any(i >= vocab_size for i in body.tokens):
            fail(f"A token id is out of vocabulary: ids go from 0 to {vocab_size - 1}.", "tokens")
        return json_response({"prompt": await serving.llm.detokenize(body.tokens)})

    return await answer(request, work())
