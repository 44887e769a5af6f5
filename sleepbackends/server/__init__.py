"""Routes that put an engine to sleep over HTTP, for an application of its own or alone.

Importing this needs FastAPI, which ``pip install 'sleepbackends[server]'`` brings.
"""

from __future__ import annotations

from sleepbackends.server.alone import app
from sleepbackends.server.routes import router

__all__ = ["app", "router"]
