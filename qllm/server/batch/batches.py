"""The routes `/v1/files` and `/v1/batches`, in OpenAI's shape."""

import asyncio
import json
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, Request, UploadFile
from fastapi.responses import FileResponse
from pydantic import field_validator

from qllm.server.batch.worker import Worker
from qllm.server.http.errors import RESPONSES, ApiError
from qllm.server.http.fields import Body
from qllm.server.state.store import Row, Store

WINDOW_S = 24 * 3600
MAX_METADATA = 16
FILE_FIELDS = {"file", "purpose"}

Limit = Annotated[int, Query(ge=1, le=10_000)]
Order = Literal["asc", "desc"]


class BatchRequest(Body):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None

    @field_validator("metadata")
    @classmethod
    def _is_small(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value is not None and len(value) > MAX_METADATA:
            raise ValueError(f"at most {MAX_METADATA} entries are allowed")
        return value

    @field_validator("output_expires_after")
    @classmethod
    def _no_expiry(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("is not supported; delete files when you are done")
        return value


def file_object(row: Row) -> dict[str, Any]:
    """Return a file in the API's shape."""
    names = ("id", "bytes", "created_at", "filename", "purpose")
    return {
        "object": "file",
        **{name: row[name] for name in names},
        "status": "processed",
        "expires_at": None,
    }


def batch_object(row: Row) -> dict[str, Any]:
    """Return a batch in the API's shape."""
    hidden = ("owner", "total", "num_ok", "num_failed")
    counts = {"total": row["total"], "completed": row["num_ok"], "failed": row["num_failed"]}
    return {
        "object": "batch",
        "completion_window": "24h",
        **{name: value for name, value in row.items() if name not in hidden},
        "errors": json.loads(row["errors"]),
        "metadata": json.loads(row["metadata"]),
        "request_counts": counts,
    }


def _page(rows: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a list in the API's shape.

    A row after the first `limit` rows means that there are more.
    """
    data = rows[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(rows) > limit,
    }


def _found(row: Row | None, what: str, name: str) -> Row:
    if row is None:
        raise ApiError(404, f"there is no {what} {name!r:.80}", code=f"{what}_not_found")
    return row


def _caller(request: Request) -> str:
    return str(request.state.caller)


def file_routes(store: Store) -> APIRouter:
    """Return the routes of files."""
    router = APIRouter(tags=["files"])

    @router.post("/v1/files", responses=RESPONSES)
    async def create_file(
        request: Request, file: UploadFile, purpose: Annotated[Literal["batch"], Form()]
    ) -> dict[str, Any]:
        """Upload the lines of a batch."""
        wrong = sorted(set(await request.form()) - FILE_FIELDS)
        if wrong:
            raise ApiError(400, f"{wrong[0]} is not supported; leave it out", param=wrong[0])
        name = (file.filename or "batch.jsonl").encode("utf-8", "replace").decode()
        add = partial(store.add_file, _caller(request), name, file.file, file.size or 0)
        row = await asyncio.to_thread(add)
        return file_object(row)

    @router.get("/v1/files", responses=RESPONSES)
    async def list_files(
        request: Request,
        limit: Limit = 10_000,
        after: str | None = None,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> dict[str, Any]:
        """List the caller's files."""
        rows = await asyncio.to_thread(
            store.page, "files", _caller(request), after, limit + 1, order == "desc", purpose
        )
        return _page([file_object(row) for row in rows], limit)

    @router.get("/v1/files/{file_id}", responses=RESPONSES)
    async def get_file(request: Request, file_id: str) -> dict[str, Any]:
        """Return one file's description."""
        row = await asyncio.to_thread(store.file, file_id, _caller(request))
        return file_object(_found(row, "file", file_id))

    @router.get("/v1/files/{file_id}/content", responses=RESPONSES)
    async def get_content(request: Request, file_id: str) -> FileResponse:
        """Return the content of a file."""
        row = _found(
            await asyncio.to_thread(store.file, file_id, _caller(request)), "file", file_id
        )
        if not await asyncio.to_thread(store.is_whole, row):
            text = f"file {file_id!r} is damaged or missing on the server's disk; upload it again"
            raise ApiError(500, text, code="file_damaged")
        return FileResponse(store.path(row["id"]), media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}", responses=RESPONSES)
    async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
        """Delete a file, unless an unfinished batch reads it."""
        row = _found(
            await asyncio.to_thread(store.file, file_id, _caller(request)), "file", file_id
        )
        if not await asyncio.to_thread(store.delete_file, row["id"], row["owner"]):
            raise ApiError(409, f"an unfinished batch reads file {file_id!r}; cancel it first")
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def batch_routes(store: Store, worker: Worker) -> APIRouter:
    """Return the routes of batches."""
    router = APIRouter(tags=["batches"])

    @router.post("/v1/batches", responses=RESPONSES)
    async def create_batch(request: Request, body: BatchRequest) -> dict[str, Any]:
        """Start a batch: the lines of a file are answered as BE."""
        caller = _caller(request)
        file = await asyncio.to_thread(store.file, body.input_file_id, caller)
        _found(file, "file", body.input_file_id)
        await asyncio.to_thread(store.refuse_more, caller)
        row = await asyncio.to_thread(
            store.add_batch,
            caller, body.endpoint, body.input_file_id, body.metadata or {}, WINDOW_S,
        )  # fmt: skip
        worker.begin(row["id"])
        return batch_object(row)

    @router.get("/v1/batches", responses=RESPONSES)
    async def list_batches(
        request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> dict[str, Any]:
        """List the caller's batches, newest first."""
        rows = await asyncio.to_thread(store.page, "batches", _caller(request), after, limit + 1)
        return _page([batch_object(row) for row in rows], limit)

    @router.get("/v1/batches/{batch_id}", responses=RESPONSES)
    async def get_batch(request: Request, batch_id: str) -> dict[str, Any]:
        """Return one batch."""
        row = await asyncio.to_thread(store.owned_batch, batch_id, _caller(request))
        return batch_object(_found(row, "batch", batch_id))

    @router.post("/v1/batches/{batch_id}/cancel", responses=RESPONSES)
    async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
        """Cancel a batch; the lines answered so far stay."""
        row = await asyncio.to_thread(store.owned_batch, batch_id, _caller(request))
        _found(row, "batch", batch_id)
        moved = await asyncio.to_thread(
            lambda: store.move(batch_id, "cancelling", only_from=("validating", "in_progress"))
        )
        now = await asyncio.to_thread(store.batch, batch_id)
        if moved:
            worker.cancel(batch_id)
        elif now["status"] not in ("cancelling", "cancelled"):
            raise ApiError(409, f"batch {batch_id} is {now['status']}; it cannot be cancelled")
        return batch_object(now)

    return router
