"""Which families tensor ranks and stages can divide, by what their models say."""

import families
import pytest
import tiny
from transformers import AutoConfig

from atoll.errors import UserError
from atoll.models.build import build_config, skeleton
from atoll.models.parts import blocks_of, parts_of
from atoll.plan.shapes import family_of
from atoll.settings import Model
from atoll.sharding.pipeline import check_between
from atoll.sharding.tensor import plan_of

CONFIGS = {name: families.config_of(name) for name in families.FAMILIES} | tiny.CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_a_login_node_knows_who_can_be_divided(name: str) -> None:
    settings = Model(name="x", config=CONFIGS[name])
    hf = skeleton(build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {}))
    block = blocks_of(hf, parts_of(hf))[0]
    try:
        divides = bool(plan_of(block, hf.config))
    except UserError:
        divides = False
    assert divides == family_of(hf.config.model_type).splits_matrices


@pytest.mark.parametrize("name", [n for n in families.FAMILIES if n != "granite"])
def test_stages_pass_hidden_states_on_as_they_are(name: str) -> None:
    settings = Model(name="x", config=CONFIGS[name] | {"output_router_logits": False})
    check_between(build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {}))


def test_what_stages_cannot_compute_is_refused() -> None:
    for name, words in (("granite", "outside its layers"), ("mixtral", "balance of experts")):
        settings = Model(name="x", config=CONFIGS[name])
        config = build_config(settings, tiny.VOCABULARY, tiny.SEQUENCE, {})
        with pytest.raises(UserError, match=words):
            check_between(config)
    # its own code stumbles over hidden states without positions to add
    with pytest.raises(UserError, match="outside its layers"):
        check_between(AutoConfig.for_model("gpt_bigcode", n_layer=2, n_embd=64, n_head=4))
