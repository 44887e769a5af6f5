"""The status page of a server that runs alone: one file, which may load nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse, Response


def page() -> Response:
    """Make the page, with a policy that lets its own script and style in and no other."""
    text = (files("sleepbackends.server") / "page.html").read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            "connect-src 'self'",
            "img-src data:",
            f"script-src {_hashes(text, 'script')}",
            f"style-src {_hashes(text, 'style')}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


def _hashes(text: str, element: str) -> str:
    found = re.findall(f"<{element}>(.*?)</{element}>", text, flags=re.DOTALL)
    digests = (hashlib.sha256(content.encode()).digest() for content in found)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
