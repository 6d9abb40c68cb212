"""Whether the hub answers: asked once and briefly, where its libraries would ask for minutes."""

import os
import socket
import sys
import threading
from functools import cache
from urllib.parse import urlsplit

ENDPOINT = "https://huggingface.co"
WAIT_SECONDS = 3.0
NO_ANSWER = "the hub does not answer from here, and its cache here has no copy"
# Whoever says one of these knows better: offline already, or by way of another machine.
SAID = ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
# what the libraries keep of the variable from when they were imported
KEPT = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("transformers.utils.hub", "_is_offline_mode"),  # of version 4
)


@cache
def use_cache_if_unreachable() -> bool:
    """Have the hub's libraries read their cache alone where the hub does not answer; is it so."""
    if any(os.environ.get(name) for name in SAID) or answers():
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module, name in KEPT:
        if module in sys.modules:
            setattr(sys.modules[module], name, True)
    return True


def endpoint() -> str:
    """The hub's address, or that of a copy of it, without a slash at its end."""
    return (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def answers() -> bool:
    """Whether the hub takes a connection; names are looked up for as long as the wait, too."""
    parts = urlsplit(endpoint())
    address = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    reached = threading.Event()

    def ask() -> None:
        try:
            socket.create_connection(address, WAIT_SECONDS).close()
            reached.set()
        except OSError:
            pass
        finally:
            asked.set()

    asked = threading.Event()
    threading.Thread(target=ask, daemon=True).start()
    asked.wait(WAIT_SECONDS)
    return reached.is_set()
