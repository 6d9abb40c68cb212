"""Each value says where it came from, and the text stays YAML whatever the values hold."""

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.config.provenance import annotated, leaves, origins
from atoll.settings import dumped

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NAMES = st.text(st.characters(categories=["L", "N", "P", "Zs"]), min_size=1, max_size=40)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=8
)


def test_each_value_has_the_source_that_won(tree, composed):
    (tree / "local").mkdir()
    (tree / "local" / "default.yaml").write_text("# @package _global_\nfacility: {account: mine}\n")
    sources = composed(
        "facility=laptop",
        "experiment=demo",
        "optimizer=adamw_8bit",
        "optimizer.weight_decay=0.2",
        "++data.validation={fraction: 0.2}",
    ).sources
    assert sources["facility.account"] == "hydra_conf/local/default.yaml"
    assert sources["facility.node.devices"] == "hydra_conf/facility/laptop.yaml"
    assert sources["launcher.name"] == "hydra_conf/launcher/static_node.yaml"
    assert sources["optimizer.name"] == "hydra_conf/optimizer/adamw_8bit.yaml"
    assert sources["optimizer.decay"] == "hydra_conf/optimizer/adamw.yaml"
    assert sources["optimizer.weight_decay"] == "command line"
    assert sources["data.validation.fraction"] == "command line"
    assert sources["training.steps"] == "hydra_conf/experiment/demo.yaml"
    assert sources["seed"] == "hydra_conf/run.yaml"
    assert sources["name"] == "derived from the configuration"
    assert "facility.driver" not in sources


def test_a_given_name_comes_from_the_command_line(composed):
    assert composed("facility=laptop", "name=mine").sources["name"] == "command line"


def test_the_source_stands_beside_each_leaf(composed):
    composition = composed("facility=laptop", "seed=7")
    text = composition.as_yaml()
    lines = {line.partition(":")[0].strip(): line for line in text.splitlines()}
    assert lines["seed"].endswith("  # command line")
    assert lines["driver"].endswith("  # default in settings")
    count = sum("  # " in line for line in text.splitlines())
    assert count == len(list(leaves(dumped(composition.run))))
    assert yaml.safe_load(text) == dumped(composition.run)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_annotated_values_read_back_the_same(values):
    text = annotated(values, {})
    assert (yaml.safe_load(text) or {}) == values
    assert len(text.splitlines()) == len(text.split("\n")) - 1  # nothing but our own line ends


def test_the_last_layer_wins():
    assert origins([("a", {"x": {"y": 1, "z": 2}}), ("b", {"x": {"y": 3}})]) == {
        "x.y": "b",
        "x.z": "a",
    }
