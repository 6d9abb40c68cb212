"""A model as the harness calls one, over all ranks: each answers for some of the documents."""

import sys
from collections.abc import Callable
from typing import Any

from lm_eval.models.huggingface import HFLM

from atoll.models.text_generator import memory_in_two_lines
from atoll.sharding.process_group import World, gathered, run_on_all_ranks


class ModelOnRanks(HFLM):
    """A whole model on each rank, of which the harness sees one process alone.

    All ranks have the same requests in the same order, and hear all answers: what the harness makes
    of them is what it makes of one process's, to the last digit.
    """

    def __init__(
        self, model: Any, tokenizer: Any, world: World, beat: Callable[[], None], hint: str
    ) -> None:
        """beat: called before each pass, for whoever watches this rank.

        hint: what to do where a rank's device has no room for a pass; all ranks then say so.
        """
        super().__init__(pretrained=model, tokenizer=tokenizer)
        self.ranks, self.beat, self.hint = world, beat, hint

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._shared(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._shared(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._shared(super().generate_until, requests, disable_tqdm)

    def _model_call(self, *words: Any, **named: Any) -> Any:
        self.beat()
        return super()._model_call(*words, **named)

    def _model_generate(self, *words: Any, **named: Any) -> Any:
        self.beat()
        return super()._model_generate(*words, **named)

    def _shared(
        self, answer: Callable[..., list[Any]], requests: list[Any], disable_tqdm: bool
    ) -> list[Any]:
        rank, size = self.ranks.rank, self.ranks.size
        places = [places_of(requests, each, size) for each in range(size)]
        own = [requests[place] for place in places[rank]]
        silent = disable_tqdm or rank > 0 or not sys.stderr.isatty()

        def answered() -> list[Any]:
            with memory_in_two_lines("what the tasks ask", self.hint):
                return answer(own, disable_tqdm=silent) if own else []

        answers = run_on_all_ranks(self.ranks, answered)
        ordered: list[Any] = [None] * len(requests)
        for of_rank, theirs in zip(places, gathered(self.ranks, answers), strict=True):
            for place, each in zip(of_rank, theirs, strict=True):
                ordered[place] = each
        return ordered


def places_of(requests: list[Any], rank: int, size: int) -> list[int]:
    """Those of a document stay together: of choices of one token, one pass answers all."""
    return [n for n, request in enumerate(requests) if (request.doc_id or 0) % size == rank]
