"""What learns beside weights that stay: the linear layers of a block, and their adapters.

peft puts a pair of matrices of `model.lora.rank` beside each linear layer that `model.lora.targets`
names, or beside all but the head (Hu et al. 2021); bitsandbytes stores the layers in 8 or 4 bits.
"""

from dataclasses import dataclass

from atoll.plan.shapes import Shape, family_of
from atoll.settings import Run

# Bytes of a weight that stays: nf4 has a scale of one byte for each 64, and one of four for each
# 256 of those (Dettmers et al. 2023); int8 a scale of four bytes a row.
PACKED_BYTES = 0.5  # of an nf4 weight without its scales
STORED_BYTES = {"none": 4.0, "nf4": PACKED_BYTES + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
ROW_BYTES = {"int8": 4}
# Of what a layer gives, an adapter's part is written, scaled and added, and its gradient scaled; of
# the gradients of what the layer reads there are two to add.
MOVED_OUTPUTS, MOVED_INPUTS = 1 + 2 + 3 + 2, 3


@dataclass(frozen=True)
class Linear:
    """A linear layer by its name, and what it reads."""

    name: str
    reads: str  # attention: the first norm's result; joined: the heads'; mlp; product
    inputs: int
    outputs: int

    def adapter(self, rank: int) -> int:
        return rank * (self.inputs + self.outputs)


@dataclass(frozen=True)
class Staying:
    """What a run's adapters add to a block, and what of it is stored otherwise."""

    block: int  # parameters of a block's adapters
    rest: int  # of those outside the blocks
    stored: int  # weights of a block that are quantised
    stored_bytes: float  # of all these
    largest: int  # weights of the largest of them: it is unpacked to be multiplied
    reads: frozenset[str]  # inputs that are kept for the adapters' gradients
    kept: int  # numbers of a token that adapters keep beside those
    moved: int  # numbers of a token read and written around their products, in both passes


def linear_layers(shape: Shape) -> tuple[Linear, ...]:
    """Those of one block. A mixture's experts and router are none: they are parameters."""
    h, i, q, kv = shape.hidden, shape.intermediate, shape.query_width, shape.kv_width
    if shape.family in NAMES:
        attention, joined, up, down = NAMES[shape.family]
        wide = q + 2 * kv if len(attention) == 1 else q
        ups = 2 * i if shape.family == "phi3" else i
    else:
        attention, joined, down, wide, ups = (
            ("q_proj", "k_proj", "v_proj"),
            "o_proj",
            "down_proj",
            q,
            i,
        )
        up = ("gate_proj", "up_proj") if family_of(shape.family).gated else ("up_proj",)
    widths = (wide, kv, kv)
    layers = [Linear(name, "attention", h, n) for name, n in zip(attention, widths, strict=False)]
    layers.append(Linear(joined, "joined", q, h))
    if not shape.experts:
        layers += [Linear(name, "mlp", h, ups) for name in up]
        layers.append(Linear(down, "product", i, h))
    return tuple(layers)


# family -> names of the layers that read hidden states, heads, hidden states again, the product
NAMES: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], str]] = {
    "gpt2": (("c_attn",), "c_proj", ("c_fc",), "c_proj"),
    "opt": (("q_proj", "k_proj", "v_proj"), "out_proj", ("fc1",), "fc2"),
    "bert": (("query", "key", "value"), "dense", ("dense",), "dense"),
    "phi3": (("qkv_proj",), "o_proj", ("gate_up_proj",), "down_proj"),
}


def outer_layers(shape: Shape) -> tuple[Linear, ...]:
    """Linear layers outside the blocks, but for heads, which have no adapters."""
    h, e = shape.hidden, shape.embedded
    if shape.family == "bert" and not shape.labels:
        return (Linear("dense", "", h, h),)
    if shape.family == "opt" and e != h:
        return (Linear("project_in", "", e, h), Linear("project_out", "", h, e))
    return ()


def staying(run: Run, shape: Shape) -> Staying | None:
    """Of a run with adapters; None where all weights learn."""
    lora, quantisation = run.model.lora, run.model.quantisation
    if lora is None:
        return None
    layers = linear_layers(shape)
    adapted = [layer for layer in layers if _is_target(run, layer)]
    outer = [layer for layer in outer_layers(shape) if _is_target(run, layer)]
    # transposed matrices are no linear layers, and stay as they are
    quantised = layers if quantisation != "none" and shape.family != "gpt2" else ()
    weights = sum(layer.inputs * layer.outputs for layer in quantised)
    rows = sum(layer.outputs for layer in quantised)
    dropped = run.model.lora is not None and lora.dropout > 0
    # int8's own product keeps what it multiplies
    reading = layers if quantisation == "int8" else adapted
    return Staying(
        block=sum(layer.adapter(lora.rank) for layer in adapted),
        rest=sum(layer.adapter(lora.rank) for layer in outer),
        stored=weights,
        stored_bytes=weights * STORED_BYTES[quantisation] + rows * ROW_BYTES.get(quantisation, 0),
        largest=max((layer.inputs * layer.outputs for layer in quantised), default=0),
        reads=frozenset(layer.reads for layer in reading),
        kept=sum(lora.rank + dropped * layer.inputs for layer in adapted),
        moved=sum(MOVED_OUTPUTS * layer.outputs + MOVED_INPUTS * layer.inputs for layer in adapted),
    )


def adapter_parameters(run: Run, shape: Shape) -> int:
    """How many parameters learn in a run with adapters; none without."""
    parts = staying(run, shape)
    return 0 if parts is None else shape.layers * parts.block + parts.rest


def unknown_targets(run: Run, shape: Shape) -> list[str]:
    """Names in `model.lora.targets` that no layer of the tables has."""
    if run.model.lora is None or run.model.lora.targets == "all-linear":
        return []
    names = {layer.name for layer in (*linear_layers(shape), *outer_layers(shape))}
    return [name for name in run.model.lora.targets if name.rpartition(".")[2] not in names]


def _is_target(run: Run, layer: Linear) -> bool:
    assert run.model.lora is not None
    targets = run.model.lora.targets
    return targets == "all-linear" or layer.name in [t.rpartition(".")[2] for t in targets]
