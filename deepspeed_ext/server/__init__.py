"""An HTTP server in the form of OpenAI's, over an inference engine; see `run`.

Nothing is imported before it is used: starlette and uvicorn are the extra ``serve``.
"""
