"""The OpenAI-compatible server in front of one engine: `qllm serve`.

    config -> app -> chat, completions, tools, batches, ui    the routes
              |      front                                    admission, tokenising, live answers
              |      guard                                    keys, rates, body limits
              |      metrics                                  what /metrics says
              run                                             uvicorn, drain

It uses only what `QLLMEngine` shows to everybody.
"""
