"""The endpoints: OpenAI's completions and chats, the health and metrics of the server, and a page to watch it.

The steps of a completion:

1. `Gate` checks host and origin, `_Api.guarded` the key.
2. `read_body` takes the body. In a thread, `parse` checks it, and `Prompts.tokens` tokenizes its texts.
3. `Choices.submit` passes a request for each choice to `Engine.submit_all`, whose module says how it goes on.
4. In each step, the engine's thread queues an `Event`; after it, `wake_all` wakes the event loop.
5. `Choices.pieces` makes text of the events; its `ChoiceText` ends at a stop string.
6. `Answer` words each piece as a chunk of a stream, in `_events`, or all of them as one body, in `_whole`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hmac
import json
import logging
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from flax_layers.models.checkpoint.optional import needs
from flax_layers.serving.api.access import Access, Gate
from flax_layers.serving.api.answers import Answer, AnswerOptions, ChatAnswer, ServedTokenizer, server_sent
from flax_layers.serving.api.bodies import BodyKind, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody, parse
from flax_layers.serving.api.chats import ChatBody
from flax_layers.serving.api.choices import MAX_BACKLOG, Choices, Woken, wake_all
from flax_layers.serving.api.messages import MessageStyle
from flax_layers.serving.api.metrics import Metrics
from flax_layers.serving.api.prompts import Prompts
from flax_layers.serving.api.text import ChoiceText, TokenTexts
from flax_layers.serving.api.transport import (
    ApiError,
    Disconnected,
    EventStream,
    Limits,
    read_body,
    unless_disconnected,
)
from flax_layers.serving.engine.constraints import Constraint
from flax_layers.serving.engine.engine import Engine
from flax_layers.serving.engine.requests import Request as EngineRequest

with needs("starlette", "serve"):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

_LOG = logging.getLogger(__name__)
_PAGE_RULES = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)

MAX_SCORES = 1 << 20
"""Log probabilities of the prompts of one request, at most; up to 120 MB while they are collected."""

Endpoint = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Served:
    """The served model, API keys and limits."""

    name: str  # name of the model
    stop_tokens: tuple[int, ...] = ()  # tokens that end a text
    # API keys. A client must send one of them; if there are none, no key is required
    keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    limits: Limits = Limits()  # noqa: RUF009  frozen; limits of request bodies
    # returns True while programs are being compiled. Requests wait until then
    is_starting: Callable[[], bool] = lambda: False
    shares_prefixes: bool = False  # whether clients with different keys share cached prefixes
    access: Access = dataclasses.field(default=Access(), repr=False)  # allowed hosts and web pages
    # sampling parameters of requests that leave them out, as of `generation_config.json`
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)


class _Job(NamedTuple):
    """A request that has been read."""

    body: GenerationBody
    requests: list[EngineRequest]  # one for each choice
    text: Callable[[int], ChoiceText]  # makes the text of a choice
    answer: Answer
    source: str = "prompt"  # the parameter that tokens come from
    constraint: str = "response_format"  # the parameter that the constraint comes from


def create_app(engine: Engine, tokenizer: ServedTokenizer, served: Served) -> Gate:
    """Creates the ASGI application. The caller starts and stops the engine."""
    api = _Api(engine, tokenizer, served)
    guarded = api.guarded
    app = Starlette(
        routes=[
            Route("/", api.page),
            Route("/health", api.health),
            Route("/metrics", guarded(api.metrics)),
            Route("/stats", guarded(api.stats)),
            Route("/tokenize", guarded(api.tokenize), methods=["POST"]),
            Route("/detokenize", guarded(api.detokenize), methods=["POST"]),
            Route("/tokenizer_info", guarded(api.tokenizer_info)),
            Route("/v1/models", guarded(api.models)),
            Route("/v1/models/{name:path}", guarded(api.model)),
            Route("/v1/completions", guarded(api.completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(api.chats), methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Disconnected: _gone,
            Exception: _unforeseen,
        },
    )
    return Gate(app, served.access)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers errors of the router: 404 and 405."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        text = f"`{request.url.path}` takes {allowed}. Got {request.method}."
    else:
        text = f"There is no `{request.url.path}`. `/v1/completions` and `/v1/chat/completions` generate text."
    answer = ApiError(error.status_code, text)
    return JSONResponse(answer.body(), answer.status, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has left


async def _unforeseen(request: Request, error: Exception) -> Response:
    return await _api_error(request, ApiError(500, "The server failed. Its log says more. Try again."))


class _Api:
    """The endpoints and their shared state."""

    def __init__(self, engine: Engine, tokenizer: ServedTokenizer, served: Served):
        self._engine, self._tokenizer, self._served = engine, tokenizer, served
        self._metrics, self._woken = Metrics(engine.stats), Woken()
        engine.after_step.append(lambda: wake_all(self._woken))
        self._created = int(time.time())
        self._prompts = Prompts(tokenizer, engine.context, engine.config.vocabulary)
        self._token_texts = TokenTexts(tokenizer.token_bytes)
        self._compiling = concurrent.futures.ThreadPoolExecutor(2, "jflex-constraints")
        self._keys = [key.encode() for key in served.keys]
        self._page = pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """An endpoint that asks for a key, if there are keys. All are compared, each in constant time."""

        async def answer(request: Request) -> Response:
            scheme, _, sent = request.headers.get("authorization", "").partition(" ")
            token = sent.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
            matches = [hmac.compare_digest(token, key) for key in self._keys]
            if self._keys and not any(matches):
                raise ApiError(401, "An API key is required. Send one of this server: `Authorization: Bearer KEY`.")
            request.state.tenant = matches.index(True) if self._keys and not self._served.shares_prefixes else None
            return await endpoint(request)

        return answer

    async def page(self, request: Request) -> Response:
        """The page."""
        return Response(self._page, media_type="text/html", headers={"Content-Security-Policy": _PAGE_RULES})

    async def health(self, request: Request) -> Response:
        """Answers 503 if the engine broke down or is shutting down, so that no requests are taken."""
        status = self._status()
        if status == "stopped":
            raise ApiError(503, "The engine takes no more requests: it is shutting down, or it broke down.")
        return JSONResponse({"status": status})

    async def metrics(self, request: Request) -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def stats(self, request: Request) -> Response:
        """Statistics of the engine as JSON, for the page."""
        has_chat = bool(self._tokenizer.chat_templates)
        head = {"model": self._served.name, "status": self._status(), "chat": has_chat, "context": self._engine.context}
        return JSONResponse({**head, **dataclasses.asdict(self._engine.stats())})

    async def models(self, request: Request) -> Response:
        """The list of models: one."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """One model."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text."""
        return Response(await self._read(request, TokenizeBody, self._tokenize), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return JSONResponse({"prompt": await self._read(request, DetokenizeBody, self._detokenize)})

    async def tokenizer_info(self, request: Request) -> Response:
        """Special tokens and the chat template, for clients that count tokens, such as lm-evaluation-harness."""
        special, template = self._tokenizer.special_tokens, self._tokenizer.chat_templates.get("default")
        tokens = {name: special.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return JSONResponse({**tokens, "chat_template": template})

    async def completions(self, request: Request) -> Response:
        """Continues prompts."""
        return await self._generate(request, await self._read(request, CompletionBody, self._read_completion))

    async def chats(self, request: Request) -> Response:
        """Answers in a chat."""
        return await self._generate(request, await self._read(request, ChatBody, self._read_chat))

    async def _read(
        self, request: Request, kind: type[BodyKind], function: Callable[[BodyKind, int | None], Result]
    ) -> Result:
        """Reads a body, and calls a function of it and the tenant in a thread, as long as the client is there."""

        def read(raw: bytes) -> Result:
            body = parse(kind, raw)
            self._check_model(body.model)
            return function(body, request.state.tenant)

        raw = await read_body(request, self._served.limits)
        return await unless_disconnected(request.receive, self._prompts.in_thread(raw, read))

    async def _generate(self, request: Request, job: _Job) -> Response:
        body, requests, answer = job.body, job.requests, job.answer
        max_backlog = MAX_BACKLOG if body.stream else None
        choices = Choices(requests, body.choices, job.text, self._metrics, self._woken, max_backlog, job.constraint)
        with contextlib.ExitStack() as unfinished:
            unfinished.callback(choices.cancel)
            try:
                # Constraints have threads of their own: while some compile, other requests are tokenized and submitted.
                pool = None if requests[0].constraint is None else self._compiling
                await asyncio.get_running_loop().run_in_executor(pool, choices.submit, self._engine)
            except ApiError as error:
                error.param = job.source if error.param == "prompt" else error.param
                raise
            if body.stream:
                unfinished.pop_all()  # the stream cancels it
                events = _events(choices, answer, len(requests), request.state.request_id)
                return EventStream(events, choices.cancel)
            content = await unless_disconnected(request.receive, _whole(choices, answer))
        return Response(content, media_type="application/json")

    def _tokenize(self, body: TokenizeBody, tenant: int | None) -> bytes:
        """Runs beside the event loop, as the methods that follow."""
        tokens = self._prompts.tokens(body.prompt, special_tokens=body.add_special_tokens is not False)
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": self._engine.context}
        return json.dumps(answer, separators=(",", ":")).encode()

    def _detokenize(self, body: DetokenizeBody, tenant: int | None) -> str:
        return self._prompts.text(body.tokens, "tokens", special_tokens=True)

    def _read_completion(self, body: CompletionBody, tenant: int | None) -> _Job:
        options = self._engine.options
        texts, most = len(body.prompt) * body.choices, options.max_requests + options.max_waiting
        if texts > most:
            raise ApiError(
                400, f"`prompt` and `n` together must make at most {most} texts. Got {texts}. Send less at once."
            )
        special = body.add_special_tokens is not False
        prompts = [self._prompts.tokens(prompt, special_tokens=special) for prompt in body.prompt]
        text = lambda x: x if isinstance(x, str) else self._prompts.text(x, "prompt")
        echoes = [text(prompt) for prompt in body.prompt] if body.echo else []
        return self._job(body, prompts, tenant, body.response_format, echoes)

    def _read_chat(self, body: ChatBody, tenant: int | None) -> _Job:
        name, template = self._prompts.template(has_tools=bool(body.callable_tools))
        try:
            values = body.template_values(template) | ({} if name == "default" else {"template": name})
            text = self._prompts.chat([x.model_dump(exclude_none=True) for x in body.messages], **values)
            style, constraint = body.style(template, text), body.constraint(template)
        except ValueError as error:
            raise ApiError(400, str(error).replace("`constraint`", "`tool_choice`")) from error
        tokens = self._prompts.tokens(text, "messages", special_tokens=bool(body.add_special_tokens))
        job = self._job(body, [tokens], tenant, constraint, style=style)
        return job._replace(source="messages", constraint="tool_choice" if body.forced else "response_format")

    def _job(
        self,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        tenant: int | None,
        constraint: Constraint | None,
        echoes: Sequence[str] = (),
        style: MessageStyle = MessageStyle(),  # noqa: B008  immutable
    ) -> _Job:
        """The requests for tokenized prompts, and how they are answered; `echoes` are texts of all prompts, or none."""
        vocabulary, served, prompt = self._engine.config.vocabulary, self._served, self._prompts
        for token in body.stop_token_ids or ():
            if not 0 <= token < vocabulary:
                raise ApiError(400, f"`stop_token_ids` must be tokens from 0 to {vocabulary - 1}. Got {token}.")
        scores = 0 if body.scored is None else sum(map(len, prompts)) * body.choices * (2 + body.scored)
        if scores > MAX_SCORES:
            raise ApiError(
                400,
                f"`prompt_logprobs`, or `logprobs` with `echo`, must be at most {MAX_SCORES} numbers of all prompts, "
                f"two more for each token than asked for. Got {scores}. Send less at once.",
            )
        namespace = body.cache_salt if tenant is None else (tenant, body.cache_salt)
        fields = {"namespace": namespace, "constraint": constraint, "bad_words": prompt.bad_words(body.bad_words or ())}
        try:
            make = lambda tokens: body.requests(tokens, served.stop_tokens, served.sampling, **fields)
            requests = [request for tokens in prompts for request in make(tokens)]
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        offsets = [() if body.scored is None else prompt.offsets(tokens) for tokens in prompts]
        text: Callable[[int], ChoiceText] = lambda index: ChoiceText(
            prompt.stream(prompts[index // body.choices] if isinstance(body, CompletionBody) else ()),
            body.stop,
            keeps_stops=bool(body.include_stop_str_in_output),
            min_tokens=body.min_tokens or 0,
            echo=echoes[index // body.choices] if echoes else "",
            prompt=offsets[index // body.choices],
            is_hidden=isinstance(body, CompletionBody) and body.is_only_echoed,
        )
        has_echoes, lists_prompt = bool(echoes) and body.top is not None, body.prompt_logprobs is not None
        options = AnswerOptions(served.name, len(requests), body.include_usage, has_echoes, lists_prompt, style)
        kind = ChatAnswer if isinstance(body, ChatBody) else Answer
        return _Job(body, requests, text, kind(self._token_texts, options))

    def _status(self) -> str:
        if self._served.is_starting():
            return "compiling"
        return "running" if self._engine.is_running else "stopped"

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._served.name):
            raise ApiError(
                404,
                f"`model` must be {self._served.name!r}, the only one here. Got {name!r}.",
                param="model",
                code="model_not_found",
            )

    def _model(self) -> dict[str, object]:
        head = {"id": self._served.name, "object": "model", "created": self._created, "owned_by": "jflex"}
        return {**head, "max_model_len": self._engine.context}


async def _whole(choices: Choices, answer: Answer) -> bytes:
    """The JSON of an answer. Other requests have their turn while it is made."""
    async for pieces in choices.pieces():
        for index, piece in pieces:
            answer.take(index, piece)
    parts = []
    for part in answer.whole(choices.usage):
        parts.append(part)
        await asyncio.sleep(0)
    return b"".join(parts)


async def _events(choices: Choices, answer: Answer, count: int, request_id: str) -> AsyncIterator[bytes]:
    """The events of a streamed answer; a failure is the last one."""
    try:
        if opening := b"".join(map(answer.opening, range(count))):
            yield opening
        async for pieces in choices.pieces():
            yield b"".join(answer.chunk(index, piece) for index, piece in pieces)
        end = answer.closing(choices.usage)
    except ApiError as error:
        _LOG.warning("The stream %s ended with status %d: %s", request_id, error.status, error.message)
        end = server_sent(error.body())
    yield end + server_sent("[DONE]")
