"""The OpenAI-compatible server in front of one engine: `qllm serve`.

Each room imports only from rooms earlier in this list:

    http        connections, API keys, limits on bodies, the shape of errors
    requests    the engine as routes see it: admission, tokenising, answers
    tools       tools in a prompt; tool calls and reasoning in an answer
    state       the state folder: files, batches, stored responses
    api         the routes of OpenAI's and Anthropic's interfaces
    batch       batches, and the worker that answers their lines
    prompts     prompts that arrive in pieces
    ops         probes, banner, supervisor, the run of a server
    page        the live page and the documentation
    app         the FastAPI app, made of the rooms above
    serve       `qllm serve`: the socket, the engine, the app

`config` and `metrics` come before all rooms. `apart_process` reads long bodies outside of the
server's process. The server uses only public parts of `QLLMEngine`.
"""
