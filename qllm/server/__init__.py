"""The OpenAI-compatible server in front of one engine: `qllm serve`.

Each part imports only from parts earlier in this list:

        http        connections, API keys, limits on bodies, the shape of errors
        requests    access of the routes to the engine: admission, tokenising, answers
    tools       tools in a prompt; tool calls and reasoning in an answer
    state       the state folder: files, batches, stored responses
    api         the routes of OpenAI's and Anthropic's interfaces
    batch       batches, and the worker that answers their lines
    prompts     prompts that arrive in pieces
        ops         probes, banner, supervisor, start and stop of the server
    page        the live page and the documentation
        app         the FastAPI app, made of the parts above
    serve       `qllm serve`: the socket, the engine, the app

`config` and `metrics` come before all parts. `apart_process` reads long bodies in a process other
than the server's. The server uses only public parts of `QLLMEngine`.
"""
