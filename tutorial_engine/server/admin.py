"""Routes about the server itself: which model, how it is, its metrics; and, on demand, levers to move the engine.

The levers (`dev_router`: sleep, pause, drop the cache, abort) exist only with VLLM_SERVER_DEV_MODE=1: whoever reaches
them can stop the service.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

import tutorial_engine
from tutorial_engine.exceptions import VLLMValidationError
from tutorial_engine.server.errors import error_response, json_response
from tutorial_engine.server.serving import Serving, answer

logger = logging.getLogger(__name__)
router, dev_router = APIRouter(), APIRouter()


def _serving(request: Request) -> Serving:
    return request.app.state.serving


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine works, 503 once it has ended."""
    try:
        await _serving(request).llm.check_health()
    except Exception as error:
        return error_response(error)
    return Response()


@router.get("/version")
async def version() -> Response:
    return json_response({"version": tutorial_engine.__version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Everything that is counted, in Prometheus's format."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    return Response(generate_latest(request.app.state.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model, under each of its names."""
    serving = _serving(request)
    return json_response({"object": "list", "data": [{
        "id": name, "object": "model", "created": serving.created, "owned_by": "vllm", "root": serving.root,
        "parent": None, "max_model_len": serving.max_model_len, "permission": [{
            "id": f"modelperm-{name}", "object": "model_permission", "created": serving.created,
            "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False,
            "allow_view": True, "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
        }]} for name in serving.names]})


@router.post("/v1/load_lora_adapter")
@router.post("/v1/unload_lora_adapter")
async def lora() -> Response:
    """Not here yet."""
    return error_response(NotImplementedError("This engine has no LoRA adapters."))


# Levers


@dev_router.post("/sleep")
async def sleep(request: Request, level: int = 1, mode: str = "abort") -> Response:
    """Give memory back, see `LLMEngine.sleep`."""
    async def work() -> Response:
        await _serving(request).llm.sleep(level, mode)
        return json_response({"status": "sleeping", "level": level})

    return await answer(request, work())


@dev_router.post("/wake_up")
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    """Undo sleep; by parts with tags weights, kv_cache, scheduling."""
    async def work() -> Response:
        await _serving(request).llm.wake_up(tags)
        return json_response({"is_sleeping": await _serving(request).llm.is_sleeping()})

    return await answer(request, work())


@dev_router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": await _serving(request).llm.is_sleeping()})


@dev_router.post("/pause")
async def pause(request: Request, mode: str = "abort", clear_cache: bool = True) -> Response:
    """Bring the engine to a stand, see `AsyncLLM.pause_generation`."""
    async def work() -> Response:
        await _serving(request).llm.pause_generation(mode=mode, clear_cache=clear_cache)
        return json_response({"status": "paused"})

    return await answer(request, work())


@dev_router.post("/resume")
async def resume(request: Request) -> Response:
    await _serving(request).llm.resume_generation()
    return json_response({"status": "resumed"})


@dev_router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": await _serving(request).llm.is_paused()})


@dev_router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, reset_running_requests: bool = False) -> Response:
    """Forget all cached blocks; no success if requests hold some."""
    return json_response({"success": await _serving(request).llm.reset_prefix_cache(reset_running_requests)})


class AbortRequest(BaseModel):
    """request_ids: ids of answers ("cmpl-..."); null: all."""

    request_ids: list[str] | None = None


@dev_router.post("/abort_requests")
async def abort_requests(request: Request, body: AbortRequest | None = None) -> Response:
    """End requests; their clients get what there is, with finish_reason "abort"."""
    llm = _serving(request).llm
    if body is None or body.request_ids is None:
        await llm.abort_all()
    else:
        await llm.abort(body.request_ids)
    return json_response({"status": "aborted"})


@dev_router.get("/server_info")
async def server_info(request: Request) -> Response:
    """The numbers that the engine runs with."""
    config = _serving(request).llm.llm_engine.vllm_config
    return json_response({"vllm_config": {name: {key: value if isinstance(value, (bool, int, str)) else str(value)
                                                 for key, value in vars(part).items()}
                                          for name, part in vars(config).items()}})


class RpcRequest(BaseModel):
    """A method of the worker, the model runner, with its arguments."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


@dev_router.post("/collective_rpc")
async def collective_rpc(request: Request, body: RpcRequest) -> Response:
    """Call a method of the worker between two steps; its result as text, unless it is null."""
    engine = _serving(request).llm.llm_engine

    def call() -> list[Any]:
        try:
            if body.method.startswith("_"):
                raise AttributeError(body.method)
            return engine.collective_rpc(body.method, args=tuple(body.args), kwargs=body.kwargs)
        except Exception as error:
            logger.exception("collective_rpc failed.")
            raise VLLMValidationError(f"The call failed: {type(error).__name__}.", parameter="method") from error

    async def work() -> Response:
        results = await _serving(request).llm.run_between_steps(call)
        return json_response({"results": [None if result is None else str(result) for result in results]})

    return await answer(request, work())
