"""Messages of conversations, as data files name them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from longspan.generation.chat_template import Message

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}


def read_messages(value: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`, also where they are named `from` and `value`.

    Raises:
        ValueError: A message has neither.
    """
    found = []
    for message in value:
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(content, list):  # parts, of which some are text
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(role, str) or not isinstance(content, str | None):
            shown = json.dumps(message, default=str)[:60]
            raise ValueError(f"a message needs role and content (or from and value), got {shown}")
        rest = {name: x for name, x in message.items() if name not in ("role", "from", "content", "value")}
        found.append({**rest, "role": ROLES.get(role, role), "content": content or ""})
    return found
