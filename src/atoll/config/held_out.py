"""What is held out of a text that is one document: its end."""

from pathlib import Path

from atoll.settings import Run, Validation

ONE_TEXT = "a single text is one document: its end is held out"


def with_held_out_tail(run: Run, sources: dict[str, str]) -> Run:
    """The run with the end of its text held out, where no share of documents could be.

    That is so of a single text file that is one document. Says so in `sources`.
    """
    data = run.data
    fraction = data.validation.fraction
    is_one_text = (
        data.source == "files"
        and data.document == "file"
        and len(data.files) == 1
        and data.files[0].endswith(".txt")
        and Path(data.files[0]).is_file()
    )
    if not fraction or not is_one_text:
        return run
    sources["data.validation.tail"] = sources["data.validation.fraction"] = ONE_TEXT
    held_out = Validation(tail=fraction)
    update = {"data": data.model_copy(update={"validation": held_out})}
    return run.model_copy(update=update)
