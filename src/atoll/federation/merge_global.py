"""`atoll merge-global`: what a facility's run begins with, where its own weights go on.

Fragments that were averaged since it last took any are alpha times its own and (1 - alpha) times
the global one (Streaming DiLoCo, Douillard et al. 2025, section 3.2). To those that only late work
has changed since the change is added: what it has learned there was not sent yet. The others are
its own.
"""

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from atoll.commands import CommandParser
from atoll.federation import global_model
from atoll.federation.fragments import PATTERNS, fragments_of, refuse_no_fragment
from atoll.federation.make_delta import refuse_other_tensors
from atoll.federation.tensors import Stretch, TensorReader
from atoll.one_writer import one_writer


def main(argv: list[str]) -> int:
    """`atoll merge-global GLOBAL OWN OUT`: averaged fragments into a facility's own weights."""
    parser = CommandParser("merge-global", main.__doc__)
    parser.add_argument("model", type=Path, help="the global model")
    parser.add_argument("own", type=Path, help="fp32 export of the facility's last run")
    parser.add_argument("out", type=Path)
    parser.add_argument("--fragments", type=int, required=True, help="parts of the model")
    parser.add_argument("--fragment-pattern", choices=list(PATTERNS), required=True)
    parser.add_argument("--merge", type=int, nargs="*", required=True, help="fragments to be taken")
    parser.add_argument("--add", type=int, nargs="*", default=[], help="whose change is added")
    parser.add_argument("--whole", type=int, nargs="*", default=[], help="taken at alpha 0")
    parser.add_argument("--before", type=Path, help="the global model that it had taken before")
    parser.add_argument("--alpha", type=float, required=True, help="of the facility's own value")
    arguments = parser.read(argv)
    named = [*arguments.merge, *arguments.add, *arguments.whole]
    refuse_no_fragment(named, arguments.fragments)
    with one_writer(arguments.out):
        merge_global(
            arguments.model,
            arguments.own,
            arguments.out,
            (arguments.fragments, arguments.fragment_pattern),
            arguments.merge,
            arguments.alpha,
            arguments.add,
            arguments.before,
            arguments.whole,
        )
    return 0


def merge_global(
    model: Path,
    own: Path,
    out: Path,
    fragments: tuple[int, str],
    merge: Collection[int],
    alpha: float,
    add: Collection[int] = (),
    before: Path | None = None,
    whole: Collection[int] = (),
) -> None:
    """Write `out`, whole or not at all: its export is a Hugging Face folder in fp32.

    merge: the fragments that are taken from the global model. add: those whose change since
    `before` is added. whole: those of which nothing of its own is kept. Raises `UserError` where
    the two have not the same tensors.
    """
    partial = global_model.begin(out)
    with (
        TensorReader(model / "master") as averaged,
        TensorReader(own) as trained,
        TensorReader((before or model) / "master") as earlier,
    ):
        refuse_other_tensors(trained, averaged)
        parts = fragments_of(averaged.layout, *fragments)
        taken, moved, replaced = (
            {name for n in chosen for tensors in parts[n].values() for name in tensors}
            for chosen in (merge, add, whole)
        )

        def values_of(stretch: Stretch) -> Tensor:
            if stretch.name in replaced:
                return averaged.values(stretch)
            if stretch.name in moved:
                change_N = averaged.values(stretch) - earlier.values(stretch)
                return trained.values(stretch).float() + change_N
            if stretch.name not in taken:
                return trained.values(stretch).float()
            averaged_N = averaged.values(stretch)
            if not alpha:
                return averaged_N
            return alpha * trained.values(stretch).float() + (1 - alpha) * averaged_N

        global_model.write_master(partial, averaged, values_of)
    global_model.link_export(model / "export", partial)
    global_model.publish(partial, out, {})
