"""The page on a run's text: repeats that are exact or near, lengths, and who shares what."""

import json
import random
from pathlib import Path

import pytest
import yaml
from data_runs import make_run

from atoll import run_dir
from atoll.data.duplicates import near_duplicates
from atoll.data.tokenize import main
from atoll.settings import dumped

LETTERS = "abcdefghij"


def words(seed: int, count: int = 100) -> list[str]:
    source = random.Random(seed)
    return ["".join(source.choices(LETTERS, k=5)) for _ in range(count)]


def changed(text: list[str], every: int) -> list[str]:
    """Another word in so many places."""
    return [f"{word}x" if n % every == every - 1 else word for n, word in enumerate(text)]


def test_texts_that_differ_in_a_word_are_near_and_others_are_not() -> None:
    texts = [words(seed) for seed in range(40)]
    one_word = [changed(text, 60) for text in texts[:12]]
    every_sixth = [changed(text, 6) for text in texts[12:30]]
    short = [["a", "b"], ["a", "b"]]  # shorter than a run of words: never near
    every = [" ".join(text) for text in [*texts, *one_word, *every_sixth, *short]]
    assert near_duplicates(every) == len(one_word)
    assert near_duplicates(["a b", "a b"]) == 0


def test_the_page_counts_documents_repeats_and_lengths(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = [" ".join(words(seed, 20 + seed)) for seed in range(60)]
    near = " ".join(changed(words(59, 79), 60))
    others = [f"Este es el libro número {n} de la biblioteca de mi abuelo." for n in range(7)]
    files = {"a": [*texts, texts[3], near], "b": [texts[7], *others, "  "]}
    sources = []
    for name, lines in files.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"text": line}) for line in lines))
        sources.append({"name": name, "files": str(path), "validation": {"fraction": 0.4}})
    run = make_run(tmp_path, {"name": "two", "sources": sources, "workers": 1})
    folder = run_dir.folder(run)
    run_dir.write_whole(run_dir.settings_file(folder), yaml.safe_dump(dumped(run)))
    assert main([str(folder), "--report"]) == 0
    page = run_dir.text_report_file(folder).read_text()
    assert page in capfd.readouterr().out
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]]
        for line in page.splitlines()
        if line.startswith("|")
    }
    assert rows["documents"] == ["62", "8"] and rows["blank"] == ["0", "1"]
    assert rows["exact repeats"] == ["1 (1.6%)", "0 (0.0%)"]
    assert rows["also in another source"] == ["1 (1.6%)", "1 (12.5%)"]
    assert rows["looked at closely"] == ["61", "8"]
    assert rows["of them near repeats"] == ["1 (1.6%)", "0 (0.0%)"]
    assert rows["languages"][1].startswith("es ")
    bars = [line.split()[3] for line in page.splitlines() if " to " in line]
    assert sum(map(int, bars)) == 70
