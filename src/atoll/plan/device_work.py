"""What a device computes and moves in a step, whatever it does in a second."""

from atoll.plan.activations import PASSES, block_activations, passes_of, passes_over_head
from atoll.plan.adapters import adapter_parameters
from atoll.plan.memory import Memory
from atoll.plan.pipeline_parts import Part
from atoll.plan.shapes import Shape
from atoll.plan.weights import FP32, weights_of
from atoll.settings import Run


def flops(run: Run, shape: Shape, part: Part) -> float:
    """Of one device: two for each weight and token in a pass, and attention.

    The last stage of a pipeline has the head as well, which is never computed again. Adapters
    learn beside weights that have no gradients.
    """
    sequence, stages = run.data.sequence_tokens, run.axes.pipeline
    tokens = run.training.global_batch_samples * sequence * stages / run.world_size
    products, attentions = passes_of(run)
    head = 0 if shape.labels else shape.head_parameters
    block = (shape.multiplied_parameters - head) / shape.layers
    context = shape.attended_tokens(sequence)
    layer = products * 2.0 * block + attentions * 4 * shape.query_width * context
    if run.model.lora is not None:
        layer += PASSES["none"][0] * 2.0 * adapter_parameters(run, shape) / shape.layers
    return tokens * (part.layers * layer + part.heads * passes_over_head(run) * 2.0 * head)


def state_bytes(run: Run, shape: Shape, memory: Memory) -> float:
    """Once a step: what learns and its moments are read and written, gradients read."""
    learning = memory.parameters
    if run.model.lora is not None:
        learning = round(FP32 * weights_of(run, shape, run.axes.pipeline - 1).learning)
    return 2 * (learning + memory.optimizer) + learning


def moved_bytes(run: Run, shape: Shape, part: Part) -> float:
    """Activations of all microbatches, written and read."""
    return 2 * run.microbatches * part.layers * block_activations(run, shape)
