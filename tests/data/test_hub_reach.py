"""A hub that does not answer is known within seconds, and told in one line."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_runs import make_run

from atoll.data import vocabulary
from atoll.data.sources import corpus, hub_reach
from atoll.errors import UserError


@pytest.fixture(autouse=True)
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub behind a closed port, and everything as it was after the test."""
    for name in hub_reach.SAID:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    modules = [__import__(name, fromlist=["_"]) for name in ("huggingface_hub.constants",)]
    modules.append(pytest.importorskip("datasets.config"))
    for module in modules:
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    hub_reach.use_cache_if_unreachable.cache_clear()
    yield
    os.environ.pop("HF_HUB_OFFLINE", None)
    hub_reach.use_cache_if_unreachable.cache_clear()


def test_a_hub_that_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        assert not hub_reach.use_cache_if_unreachable()
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "HF_HUB_OFFLINE"])
def test_whoever_said_how_to_reach_it_is_not_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(hub_reach, "answers", lambda: pytest.fail("asked"))
    assert not hub_reach.use_cache_if_unreachable()


def test_a_name_that_is_looked_up_for_ever_takes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_reach, "WAIT_SECONDS", 0.1)

    def slow(*_: object) -> None:
        time.sleep(2)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", slow)
    began = time.monotonic()
    assert not hub_reach.answers()
    assert time.monotonic() - began < 1


def test_data_and_tokenizer_of_the_hub_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked once between them: each of its libraries would ask again and again, for minutes."""
    look_up, asked = socket.getaddrinfo, list[object]()

    def counted(*words: Any, **more: Any) -> Any:
        asked.append(words)
        return look_up(*words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", counted)
    data = make_run(tmp_path, {"source": "hub", "hub": "nobody/nothing"}).data
    with pytest.raises(UserError, match="the hub does not answer from here"):
        corpus.train_corpus(data)
    with pytest.raises(UserError, match="the hub does not answer from here"):
        vocabulary.load(make_run(tmp_path, tokenizer={"path": "nobody/nothing"}))
    assert len(asked) <= 1
