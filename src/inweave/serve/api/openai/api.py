"""OpenAI's images API: generations, edits, models; with streaming.

`model` may be "<model>+<lora>:<strength>+...", for clients that offer nothing but the name of a model.
"""

from __future__ import annotations

from inweave.serve.api.errors import Api
from inweave.serve.api.openai import images, models
from inweave.serve.api.openai.errors import OpenAIError, render

API = Api((images.router, models.router), OpenAIError, render)
