"""The code that a document shows."""

from __future__ import annotations

import re


def blocks(text: str, language: str) -> list[str]:
    """Fenced code of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
